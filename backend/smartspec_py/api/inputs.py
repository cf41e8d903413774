"""The input tensors of a request.

They have the names of TensorRT-LLM's Triton models (`ensemble`, `tensorrt_llm_bls`), so that
clients of those models work unchanged. Tensors of unsupported features are declared too
(`refused.py`). Only their neutral value is allowed.
"""

from __future__ import annotations

from smartspec_py.api.refused import NEUTRAL
from smartspec_py.api.tensor_spec import Choice, Range, TensorSpec, Text
from smartspec_py.core.types import SpecMetrics, Verification
from smartspec_py.defaults import PRIORITY_WORTH_S

MAX_STOP_WORDS = 16
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_BIAS_WORDS = 300
MAX_TOP_LOG_PROBS = 20
MAX_PROMPT_IDS = 1 << 18
WORD = Text(max_bytes=1024)
NAME = Text(max_bytes=64)

REQUEST = (
    TensorSpec(
        "text_input",
        "STRING",
        "the prompt, UTF-8; empty with `input_ids`",
        Text(may_be_empty=True),
        is_optional=False,
        field="text",
        model_range="at least one token, and short enough for the context with room for one more",
    ),
    TensorSpec(
        "input_ids",
        "INT32",
        "the prompt as token ids, instead of `text_input`",
        Range(0),
        dims=(-1,),
        field="prompt_ids",
        max_elements=MAX_PROMPT_IDS,
        model_range="below the vocabulary; as many as `text_input` may have",
    ),
    TensorSpec(
        "max_tokens",
        "INT32",
        "largest number of tokens to generate",
        Range(1),
        is_optional=False,
        model_range="at most the context length minus the prompt",
    ),
    TensorSpec(
        "stream",
        "BOOL",
        "send text as it is generated. Not for HTTP `generate`, which returns one response",
    ),
    TensorSpec(
        "request_priority",
        "INT32",
        "waiting requests with a higher value are served first, and preempt running requests with "
        f"a lower value if there is no room. One level counts as {PRIORITY_WORTH_S:g} s of waiting",
        Range(-100, 100),
        field="priority",
    ),
    TensorSpec(
        "deadline_ms",
        "INT32",
        "milliseconds from arrival after which generation stops; a request without a token by then "
        "fails with `UNAVAILABLE`",
        Range(1),
        default="none",
    ),
    TensorSpec(
        "workload",
        "STRING",
        "name of a group of similar requests, which share one acceptance estimate. Without it, "
        "requests are grouped by temperature and verification",
        NAME,
        default="none",
    ),
    TensorSpec(
        "tpot_slo_ms",
        "FP32",
        "target for the mean time per output token, in milliseconds; draft lengths are chosen to "
        "meet it if possible",
        Range(0.001, 3.6e6),
        default="none",
    ),
    TensorSpec("reuse_prefix", "BOOL", "reuse the cached prefix of an earlier request"),
)

SAMPLING = (
    TensorSpec("temperature", "FP32", "0 is greedy", Range(0.0)),
    TensorSpec(
        "top_k",
        "INT32",
        "draw from the k most probable tokens",
        Range(-1, note="0 or -1: off"),
        convert=lambda value: max(0, value),
    ),
    TensorSpec(
        "top_p",
        "FP32",
        "draw from the smallest set of tokens with this total probability; 1 is off, 0 is greedy",
        Range(0.0, 1.0),
    ),
    TensorSpec(
        "min_p",
        "FP32",
        "exclude tokens with less than this share of the highest probability; 0 is off",
        Range(0.0, 1.0),
    ),
    TensorSpec(
        "seed",
        "UINT64",
        "seed of sampling: same seed, same text",
        default="random; returned in the response",
    ),
    TensorSpec(
        "random_seed",
        "UINT64",
        "older name of `seed`; if both are given, they must be equal",
        field="seed",
        default="that of `seed`",
    ),
    TensorSpec(
        "repetition_penalty",
        "FP32",
        "divides positive and multiplies negative logits of tokens in the prompt or the generated "
        "text; 1 is off",
        Range(0.01, 100.0),
    ),
    TensorSpec(
        "presence_penalty",
        "FP32",
        "subtracted once from the logit of each generated token; the prompt counts with "
        "TensorRT-LLM only",
        Range(-100.0, 100.0),
    ),
    TensorSpec(
        "frequency_penalty",
        "FP32",
        "subtracted from a token's logit for each time it was generated; the prompt counts with "
        "TensorRT-LLM only",
        Range(-100.0, 100.0),
    ),
    TensorSpec(
        "bad_words",
        "STRING",
        "words that are never generated. They are matched as token sequences, with and without a "
        "leading space; other tokenizations of a word are not blocked",
        WORD,
        dims=(-1,),
        max_elements=MAX_BAD_WORDS,
    ),
    TensorSpec(
        "embedding_bias_words",
        "STRING",
        "words whose tokens get the bias at the same index of `embedding_bias_weights`",
        WORD,
        dims=(-1,),
        field="bias_words",
        max_elements=MAX_BIAS_WORDS,
    ),
    TensorSpec(
        "embedding_bias_weights",
        "FP32",
        "added to the logits of all tokens of the word; biases of a token in several words add up. "
        "As many as `embedding_bias_words`",
        Range(-1000.0, 1000.0),
        dims=(-1,),
        field="bias_weights",
        max_elements=MAX_BIAS_WORDS,
    ),
)

ENDING = (
    TensorSpec(
        "stop_words",
        "STRING",
        "stop generation at any of these; the text ends before it. They may contain special tokens",
        WORD,
        dims=(-1,),
        max_elements=MAX_STOP_WORDS,
    ),
    TensorSpec(
        "stop_token_ids",
        "INT32",
        "more tokens that end generation, also with `ignore_eos`; they are not part of the text",
        Range(0),
        dims=(-1,),
        max_elements=MAX_STOP_TOKENS,
        model_range="below the vocabulary",
    ),
    TensorSpec(
        "end_id",
        "INT32",
        "token that ends generation, instead of the model's own (`eos_token_id` in "
        "generation_config.json or config.json, and the tokenizer's `eos_token`); end tokens are "
        "not part of the text",
        Range(-1, note="-1: none"),
        default="the model's own",
        model_range="below the vocabulary",
    ),
    TensorSpec(
        "min_tokens",
        "INT32",
        "number of tokens to generate before the text can end with an end token or a stop word",
        Range(0),
        model_range="at most max_tokens",
    ),
    TensorSpec("ignore_eos", "BOOL", "continue past end tokens"),
)

SPECULATION = (
    TensorSpec(
        "num_draft_tokens",
        "INT32",
        "largest draft length",
        Range(0, note="0: no speculation"),
        default="the server's limit",
    ),
    TensorSpec(
        "speculation_policy",
        "STRING",
        "how draft lengths are chosen",
        NAME,
        field="policy",
        default="the server's",
        model_range="none, fixed:K, batch_table, goodput_global or goodput",
    ),
    TensorSpec(
        "proposer",
        "STRING",
        "source of the drafts",
        NAME,
        default="the server's",
        model_range="draft_model, heads or prompt_lookup, if the server has it",
    ),
    TensorSpec(
        "verification",
        "STRING",
        "coupled: a draft is accepted if it equals the target's own token, so the text is the same "
        "as without speculation. rejection: drafts are accepted with a probability that keeps the "
        "target's distribution",
        Choice(tuple(v.value for v in Verification)),
        convert=Verification,
    ),
)

RETURNED = (
    TensorSpec(
        "exclude_input_in_output",
        "BOOL",
        "exclude the prompt from `text_output`; streamed text never has it",
        field="exclude_input",
    ),
    TensorSpec("return_log_probs", "BOOL", "return `output_log_probs` and `cum_log_probs`"),
    TensorSpec(
        "return_token_log_probs",
        "INT32",
        "return `token_log_probs`, with this many of the most probable tokens at each position",
        Range(0, MAX_TOP_LOG_PROBS),
        field="num_token_log_probs",
        default="none",
    ),
    TensorSpec(
        "return_prompt_log_probs",
        "BOOL",
        "with `return_token_log_probs`: also for the tokens of the prompt, whose cached prefix is "
        "then not reused",
        field="prompt_log_probs",
    ),
    TensorSpec("return_output_ids", "BOOL", "return `output_ids`"),
    TensorSpec("return_perf_metrics", "BOOL", "return the times of the request, and block counts"),
    TensorSpec("return_num_input_tokens", "BOOL", "return `num_input_tokens`"),
    TensorSpec("return_num_output_tokens", "BOOL", "return `num_output_tokens`"),
    TensorSpec(
        "explain_steps",
        "INT32",
        "generate nothing, and return this many recent steps in `explanation`. `smartspec explain` "
        "shows them. They have numbers of all requests, but no text. Refused unless `explain` is "
        "true in engine.json",
        Range(1, 1024),
        default="none",
    ),
    TensorSpec(
        "health_check",
        "BOOL",
        "generate nothing, and return an empty text at the next step, even if the queue is full. "
        "It shows that the step loop runs. `text_input` and `max_tokens` have no effect",
    ),
    TensorSpec(
        "return_spec_metrics",
        "STRING",
        "return `metrics`. detailed adds an entry for each step",
        Choice(tuple(m.value for m in SpecMetrics)),
        field="spec_metrics",
        convert=SpecMetrics,
    ),
)

INPUT_GROUPS = {
    "The request": REQUEST,
    "Sampling": SAMPLING,
    "Where the text ends": ENDING,
    "Speculation": SPECULATION,
    "What is returned": RETURNED,
    "Accepted in its neutral value only": NEUTRAL,
}

FIELDS = {
    spec.name: spec.field or spec.name
    for group in INPUT_GROUPS.values()
    for spec in group
    if spec not in NEUTRAL
}
"""The field of GenerateParams for each tensor. Tensors without effect are left out."""
