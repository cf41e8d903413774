"""The wire contract: one table of every tensor, for the codec, config.pbtxt and the docs.

The table of inputs is `inputs.py`. The model has max_batch_size 1. So a tensor of dims [1] is sent
as [1, 1], and a list as [1, n]. Only `text_output` is sent as [1].
"""

from __future__ import annotations

from smartspec_py.api.inputs import INPUT_GROUPS
from smartspec_py.api.tensor_spec import TensorSpec

MODEL_NAME = "smartspec"

GATEWAY = "gateway_outputs"
"""Request parameter of the gateway, which uses Triton's generate_stream: the names of the outputs
to send, separated by commas; empty for all.

With it, an empty response comes at once, because Triton 2.51 does not see before the first response
that a client has disconnected. A second one comes when the request is accepted, so that a stream
can begin before the prompt is read. And errors begin with the name of their code and a colon,
because Triton does not pass codes on there.
"""

INPUTS = tuple(spec for group in INPUT_GROUPS.values() for spec in group)

_LOG_PROBS = "if return_log_probs is true"
_DETAILED = "if return_spec_metrics is detailed, after the first drafts"
_PERF = "if return_perf_metrics is true"
_NO_BLOCKS = "always 0: blocks are not counted; see `num_cached_tokens`"

OUTPUTS = (
    # TensorRT-LLM's postprocessing sends the texts as a plain list, and its clients rely on it.
    TensorSpec(
        "text_output",
        "STRING",
        "text since the last response, or all of it",
        dims=(-1,),
        has_batch=False,
    ),
    TensorSpec(
        "finish_reason",
        "STRING",
        "empty until the last response; then stop, length, cancelled or deadline",
    ),
    TensorSpec(
        "num_input_tokens",
        "INT32",
        "prompt tokens, on the last response; 0 on responses before it",
        when="unless return_num_input_tokens is false",
    ),
    TensorSpec(
        "num_output_tokens",
        "INT32",
        "tokens in this response",
        when="unless return_num_output_tokens is false",
    ),
    TensorSpec(
        "acceptance_rate", "FP32", "accepted over drafted tokens so far; 0 if none were drafted"
    ),
    TensorSpec("total_accepted_draft_tokens", "INT32", "drafts accepted so far"),
    TensorSpec("total_draft_tokens", "INT32", "tokens drafted so far"),
    TensorSpec("num_steps", "INT32", "decoding steps so far, including those without drafts"),
    TensorSpec("seed", "UINT64", "seed of the request"),
    TensorSpec(
        "cum_log_probs",
        "FP32",
        "sum of the natural log-probabilities of the tokens so far",
        dims=(-1,),
        when=_LOG_PROBS,
    ),
    TensorSpec(
        "output_log_probs",
        "FP32",
        "natural log-probability of each token in this response",
        dims=(-1, -1),
        when=_LOG_PROBS,
    ),
    TensorSpec(
        "output_ids",
        "INT32",
        "the tokens of this response",
        dims=(-1, -1),
        when="if return_output_ids is true",
    ),
    TensorSpec(
        "token_log_probs",
        "STRING",
        "JSON document. `output` has an entry for each token of this response: token, natural "
        "log-probability, and a list of the most probable tokens with theirs. `prompt`, in the "
        "first response, has the same for the prompt from its second token on",
        when="if return_token_log_probs is set",
    ),
    TensorSpec(
        "num_cached_tokens", "INT32", "prompt tokens served from the prefix cache", when="last"
    ),
    TensorSpec(
        "arrival_time_ns",
        "INT64",
        "arrival of the request, in nanoseconds; only differences between times are meaningful. "
        "All times are 0 on responses before the last",
        when=_PERF,
    ),
    TensorSpec("first_scheduled_time_ns", "INT64", "start of the prefill", when=_PERF),
    TensorSpec("first_token_time_ns", "INT64", "time of the first token", when=_PERF),
    TensorSpec("last_token_time_ns", "INT64", "time of the last token", when=_PERF),
    *(
        TensorSpec(f"kv_cache_{name}_blocks", "INT32", _NO_BLOCKS, when=_PERF)
        for name in ("alloc_new", "reused", "alloc_total")
    ),
    TensorSpec(
        "metrics",
        "STRING",
        "JSON document with speculation statistics of the request, with vLLM's field names",
        when="last, if return_spec_metrics is summary or detailed",
    ),
    TensorSpec("proposer", "STRING", "the proposer of the latest drafts", when=_DETAILED),
    TensorSpec(
        "explanation",
        "STRING",
        "step trace, JSON lines (docs/operate/troubleshooting.md)",
        when="the only output, if explain_steps is set",
    ),
    TensorSpec(
        "no_speculation",
        "STRING",
        "reason why the request could not use speculation",
        when="last, if the request could not use speculation",
    ),
)
