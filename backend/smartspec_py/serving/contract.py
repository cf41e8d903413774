"""The wire contract: one table of every tensor, read by the codec, config.pbtxt and the docs.

Names and types are those of TensorRT-LLM's Triton models (`ensemble`, `tensorrt_llm_bls`), so that
their clients work unchanged; `random_seed` is the older name of `seed`. `speculation_policy` and
`finish_reason` are additions. Every tensor has dims [1]; the model has max_batch_size 1, and so
requests arrive as [1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_NAME = "smartspec"


@dataclass(frozen=True)
class TensorSpec:
    """name: on the wire. dtype: Triton's, without the TYPE_ prefix. meaning: one line for docs."""

    name: str
    dtype: str
    meaning: str
    allowed: str = ""
    is_optional: bool = True
    dims: int = 1


INPUTS = (
    TensorSpec("text_input", "STRING", "the prompt, UTF-8", "not empty", is_optional=False),
    TensorSpec("max_tokens", "INT32", "tokens to generate at most", ">= 1", is_optional=False),
    TensorSpec("stream", "BOOL", "send text as it is generated, not for /generate; default false"),
    TensorSpec("temperature", "FP32", "0 is greedy; default 0", ">= 0, finite"),
    TensorSpec(
        "top_k", "INT32", "draw from the k most probable tokens; 0 is off; default 0", ">= 0"
    ),
    TensorSpec(
        "top_p", "FP32", "draw from the smallest set of this probability; default 1", "(0, 1]"
    ),
    TensorSpec("seed", "UINT64", "keys the sampling noise: same seed, same text; default: drawn"),
    TensorSpec("random_seed", "UINT64", "older name of seed; give one of the two"),
    TensorSpec(
        "stop_words",
        "STRING",
        "end generation at any of these; not part of the text",
        "at most 16, not empty",
        dims=-1,
    ),
    TensorSpec(
        "end_id",
        "INT32",
        "token that ends generation; default: the model's own; -1: none",
        "-1 .. vocabulary - 1",
    ),
    TensorSpec(
        "exclude_input_in_output", "BOOL", "leave the prompt out of text_output; default true"
    ),
    TensorSpec("beam_width", "INT32", "only 1 is supported", "1"),
    TensorSpec(
        "num_draft_tokens",
        "INT32",
        "the most tokens to draft in a step; 0: no speculation; default: the server's limit",
        ">= 0",
    ),
    TensorSpec("speculation_policy", "STRING", "none, fixed:K or goodput; default: the server's"),
)

OUTPUTS = (
    TensorSpec("text_output", "STRING", "text since the last response, or all of it"),
    TensorSpec(
        "finish_reason", "STRING", "empty until the last response; then stop, length, cancelled"
    ),
    TensorSpec("num_input_tokens", "INT32", "tokens of the prompt, on the last response"),
    TensorSpec("num_output_tokens", "INT32", "tokens in this response"),
    TensorSpec("acceptance_rate", "FP32", "accepted over drafted tokens so far; 0 where none"),
    TensorSpec("total_accepted_draft_tokens", "INT32", "drafts accepted so far"),
    TensorSpec("total_draft_tokens", "INT32", "tokens drafted so far"),
    TensorSpec("num_steps", "INT32", "decoding steps so far, those without drafts included"),
    TensorSpec("seed", "UINT64", "the seed that was used"),
)


def config_pbtxt(name: str = MODEL_NAME) -> str:
    """Triton's model configuration: names and shapes only; all else is in engine.json."""
    lines = [
        f'name: "{name}"',
        'backend: "smartspec_py"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        # One instance: kind CPU, or Triton would start one process a GPU.
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
    ]
    for heading, tensors in (("input", INPUTS), ("output", OUTPUTS)):
        lines.append(f"{heading} [")
        lines.append(",\n".join(_pbtxt_tensor(t, heading == "input") for t in tensors))
        lines.append("]")
    return "\n".join(lines) + "\n"


def _pbtxt_tensor(tensor: TensorSpec, is_input: bool) -> str:
    optional = ", optional: true" if is_input and tensor.is_optional else ""
    return (
        f'  {{ name: "{tensor.name}", data_type: TYPE_{tensor.dtype}, '
        f"dims: [ {tensor.dims} ]{optional} }}"
    )
