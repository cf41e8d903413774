"""The fields of a request and their input tensors: one table for checks, config.pbtxt and docs.

The tensors have the names of TensorRT-LLM's Triton models (`ensemble`, `tensorrt_llm_bls`), so that
clients of those models work unchanged. Tensors of unsupported features are declared too
(`refused.py`). Only their neutral value is allowed.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from smartspec_py.api.refused import NEUTRAL
from smartspec_py.api.tensor_spec import Allowed, OneOf, Range, TensorSpec, Text
from smartspec_py.constants import PRIORITY_WORTH_S
from smartspec_py.core.types import GuideType, SpecMetrics, Verification

MAX_STOP_WORDS = 16
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_BIAS_WORDS = 300
MAX_TOP_LOG_PROBS = 20
MAX_PROMPT_IDS = 1 << 18
MAX_ANSWER_VALUES = 1 << 20
"""Tokens and log-probabilities of one response. As JSON, they take about 70 MB."""

MAX_WORDS_BYTES = 1 << 14
"""Of all words of a list. They are tokenized when the request comes, and each step uses them."""

MAX_GUIDE_BYTES = 1 << 16
WORD = Text(max_bytes=1024)
NAME = Text(max_bytes=64)


def tensor(value: Any, meaning: str, allowed: Allowed | None = None, /, **more: Any) -> Any:
    """A field with this default, and its tensor.

    more: other attributes of `TensorSpec`. Without them, the tensor has the field's name, and its
    dtype, shape and choices follow from the field's type.
    """
    given = {} if allowed is None else {"allowed": allowed}
    return field(default=value, metadata={"meaning": meaning, **given, **more})


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A request as the client sent it.

    None is the server's default, or that nothing was asked for. Either `text` or `prompt_ids` is
    empty.
    """

    text: str = tensor(
        MISSING,
        "the prompt, UTF-8; empty with `input_ids`",
        name="text_input",
        model_range="at least one token, and short enough for the context with room for one more",
    )
    max_tokens: int = tensor(
        MISSING,
        "largest number of tokens to generate",
        Range(1),
        model_range="at most the context length minus the prompt",
    )
    prompt_ids: tuple[int, ...] = tensor(
        (),
        "the prompt as token ids, instead of `text_input`",
        Range(0),
        name="input_ids",
        max_elements=MAX_PROMPT_IDS,
        model_range="below the vocabulary; as many as `text_input` may have",
    )
    stream: bool = tensor(
        False, "send text as it is generated. Not for HTTP `generate`, which returns one response"
    )
    priority: int = tensor(
        0,
        "waiting requests with a higher value are served first, and preempt running requests with "
        f"a lower value if there is no room. One level counts as {PRIORITY_WORTH_S:g} s of waiting",
        Range(-100, 100),
        name="request_priority",
    )
    deadline_ms: int | None = tensor(
        None,
        "milliseconds from arrival after which generation stops; a request without a token by then "
        "fails with `UNAVAILABLE`",
        Range(1),
    )
    workload: str | None = tensor(
        None,
        "name of a group of similar requests, which share one acceptance estimate. Without it, "
        "requests are grouped by temperature and verification",
        NAME,
    )
    adapter: str | None = tensor(
        None,
        "name of the LoRA adapter that generates the text",
        NAME,
        name="lora_name",
        default="the model without an adapter",
        model_range="a name in `engine.lora` of engine.json",
    )
    tpot_slo_ms: float | None = tensor(
        None,
        "target for the mean time per output token, in milliseconds; draft lengths are chosen to "
        "meet it if possible",
        Range(0.001, 3.6e6),
    )
    reuse_prefix: bool = tensor(
        True,
        "reuse the cached prefix of an earlier request, and for drafts what other requests of the "
        "tenant have generated. Without it, others do not reuse this text either",
    )
    tenant: str = tensor(
        "",
        "whose request it is. Drafts never come from texts of other tenants. OpenAI's API sets it "
        "by the API key",
        Text(max_bytes=64, may_be_empty=True),
    )

    temperature: float = tensor(0.0, "0 is greedy", Range(0.0))
    top_k: int = tensor(
        0,
        "draw from the k most probable tokens",
        Range(-1, note="0 or -1: off"),
        convert=lambda value: max(0, value),
    )
    top_p: float = tensor(
        1.0,
        "draw from the smallest set of tokens with this total probability; 1 is off, 0 is greedy",
        Range(0.0, 1.0),
    )
    min_p: float = tensor(
        0.0,
        "exclude tokens with less than this share of the highest probability; 0 is off",
        Range(0.0, 1.0),
    )
    seed: int | None = tensor(
        None,
        "seed of sampling: same seed, same text",
        dtype="UINT64",
        default="random; returned in the response",
    )
    repetition_penalty: float = tensor(
        1.0,
        "divides positive and multiplies negative logits of tokens in the prompt or the generated "
        "text; 1 is off",
        Range(0.01, 100.0),
    )
    presence_penalty: float = tensor(
        0.0,
        "subtracted once from the logit of each generated token; the prompt counts with "
        "TensorRT-LLM only",
        Range(-100.0, 100.0),
    )
    frequency_penalty: float = tensor(
        0.0,
        "subtracted from a token's logit for each time it was generated; the prompt counts with "
        "TensorRT-LLM only",
        Range(-100.0, 100.0),
    )
    bad_words: tuple[str, ...] = tensor(
        (),
        "words that are never generated. They are matched as token sequences, with and without a "
        "leading space; other tokenizations of a word are not blocked",
        WORD,
        max_elements=MAX_BAD_WORDS,
        model_range=f"at most {MAX_WORDS_BYTES} bytes in all",
    )
    bias_words: tuple[str, ...] = tensor(
        (),
        "words whose tokens get the bias at the same index of `embedding_bias_weights`",
        WORD,
        name="embedding_bias_words",
        max_elements=MAX_BIAS_WORDS,
        model_range=f"at most {MAX_WORDS_BYTES} bytes in all",
    )
    bias_weights: tuple[float, ...] = tensor(
        (),
        "added to the logits of all tokens of the word; biases of a token in several words add up. "
        "As many as `embedding_bias_words`",
        Range(-1000.0, 1000.0),
        name="embedding_bias_weights",
        max_elements=MAX_BIAS_WORDS,
    )

    guide_type: GuideType | None = tensor(  # noqa: RUF009
        None,
        "restrict the text to a grammar of this type. json needs no guide; choice takes a JSON "
        "list of texts; ebnf_grammar is Lark or GBNF. JSON is written on one line",
        OneOf(("", *(each.value for each in GuideType))),
        name="guided_decoding_guide_type",
        convert=lambda value: GuideType(value) if value else None,
    )
    guide: str = tensor(
        "",
        "text of the grammar",
        Text(MAX_GUIDE_BYTES, may_be_empty=True),
        name="guided_decoding_guide",
        model_range="a grammar that can be compiled",
    )

    stop_words: tuple[str, ...] = tensor(
        (),
        "stop generation at any of these; the text ends before it. One may be a special token",
        WORD,
        max_elements=MAX_STOP_WORDS,
    )
    stop_token_ids: tuple[int, ...] = tensor(
        (),
        "more tokens that end generation, also with `ignore_eos`; they are not part of the text",
        Range(0),
        max_elements=MAX_STOP_TOKENS,
        model_range="below the vocabulary",
    )
    end_id: int | None = tensor(
        None,
        "token that ends generation, instead of the model's own (`eos_token_id` in "
        "generation_config.json or config.json, and the tokenizer's `eos_token`); end tokens are "
        "not part of the text",
        Range(-1, note="-1: none"),
        default="the model's own",
        model_range="below the vocabulary",
    )
    min_tokens: int = tensor(
        0,
        "number of tokens to generate before the text can end with an end token or a stop word",
        Range(0),
        model_range="at most max_tokens",
    )
    ignore_eos: bool = tensor(False, "continue past end tokens")

    num_draft_tokens: int | None = tensor(
        None,
        "largest draft length; of a tree of drafts, its longest path",
        Range(0, note="0: no speculation"),
        default="the server's limit",
    )
    policy: str | None = tensor(
        None,
        "how draft lengths are chosen",
        NAME,
        name="speculation_policy",
        default="the server's",
        model_range="none, fixed:K, batch_table, goodput_global or goodput",
    )
    proposer: str | None = tensor(
        None,
        "source of the drafts",
        NAME,
        default="the server's",
        model_range="draft_model, heads, prompt_lookup or grammar, if the server has it",
    )
    verification: Verification = tensor(  # noqa: RUF009
        Verification.COUPLED,
        "coupled: a draft is accepted if it equals the target's own token, so the text is the same "
        "as without speculation. rejection: drafts are accepted with a probability that keeps the "
        "target's distribution",
    )

    exclude_input: bool = tensor(
        True,
        "exclude the prompt from `text_output`; streamed text never has it",
        name="exclude_input_in_output",
    )
    return_log_probs: bool = tensor(False, "return `output_log_probs` and `cum_log_probs`")
    num_token_log_probs: int | None = tensor(
        None,
        "return `token_log_probs`, with this many of the most probable tokens at each position",
        Range(0, MAX_TOP_LOG_PROBS),
        name="return_token_log_probs",
        model_range=f"at most {MAX_ANSWER_VALUES} tokens and log-probabilities in one response, "
        "which has those of the prompt if they are asked for, and without `stream` all of the text",
    )
    prompt_log_probs: bool = tensor(
        False,
        "with `return_token_log_probs`: also for the tokens of the prompt, whose cached prefix is "
        "then not reused",
        name="return_prompt_log_probs",
    )
    return_output_ids: bool = tensor(False, "return `output_ids`")
    return_perf_metrics: bool = tensor(False, "return the times of the request, and block counts")
    return_num_input_tokens: bool = tensor(True, "return `num_input_tokens`")
    return_num_output_tokens: bool = tensor(True, "return `num_output_tokens`")
    explain_steps: int | None = tensor(
        None,
        "generate nothing, and return this many recent steps in `explanation`. `smartspec explain` "
        "shows them. They have numbers of all requests, but no text. Refused unless `explain` is "
        "true in engine.json",
        Range(1, 1024),
    )
    health_check: bool = tensor(
        False,
        "generate nothing, and return an empty text at the next step, even if the queue is full. "
        "It shows that the step loop runs. `text_input` and `max_tokens` have no effect",
    )
    spec_metrics: SpecMetrics = tensor(  # noqa: RUF009
        SpecMetrics.NONE,
        "return `metrics`. detailed adds an entry for each step",
        name="return_spec_metrics",
    )


_DTYPES = {bool: "BOOL", int: "INT32", float: "FP32"}


def _spec(field: Field[Any], hint: Any) -> TensorSpec:
    """The tensor of a field of `GenerateParams`."""
    kind = next(iter(get_args(hint)), hint)  # int, also of `int | None` and `tuple[int, ...]`
    spec: dict[str, Any] = {
        "name": field.name,
        "dims": (-1,) if get_origin(hint) is tuple else (1,),
        "is_optional": field.default is not MISSING,
        "dtype": _DTYPES.get(kind, "STRING"),
    }
    if issubclass(kind, Enum) and "allowed" not in field.metadata:
        spec |= {"allowed": OneOf(tuple(each.value for each in kind)), "convert": kind}
    return TensorSpec(**spec | dict(field.metadata))


_HINTS = get_type_hints(GenerateParams)
_SPECS = {field.name: _spec(field, _HINTS[field.name]) for field in fields(GenerateParams)}
_FIRST = {
    "text": "The request",
    "temperature": "Sampling",
    "stop_words": "Where the text ends",
    "num_draft_tokens": "Speculation",
    "exclude_input": "What is returned",
}
"""The title of each group of fields, by its first field."""

INPUT_GROUPS: dict[str, tuple[TensorSpec, ...]] = {}
for _name, _tensor in _SPECS.items():
    _title = _FIRST.get(_name) or list(INPUT_GROUPS)[-1]
    INPUT_GROUPS[_title] = (*INPUT_GROUPS.get(_title, ()), _tensor)

INPUT_GROUPS["Accepted in its neutral value only"] = NEUTRAL

FIELDS = {spec.name: name for name, spec in _SPECS.items()}
"""The field of GenerateParams for each tensor. Tensors without effect are left out."""
