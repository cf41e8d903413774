"""Unsupported fields and their error messages. No field is dropped silently.

Tensors that clients of TensorRT-LLM's ensemble send are declared, with their neutral value as the
only one allowed. Other names have no tensor. Triton passes such a JSON key to the backend as a
request parameter, and refuses a gRPC tensor of that name itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from smartspec_py.api.tensor_spec import OneOf, TensorSpec
from smartspec_py.faults import shown

_NO_BEAMS = "beam search is not supported"
_NO_LOGITS = "logits are not returned"

NEUTRAL = (
    TensorSpec("pad_id", "INT32", "no effect, because nothing is padded"),
    TensorSpec("beam_width", "INT32", "number of beams", OneOf((1,), _NO_BEAMS)),
    TensorSpec(
        "num_return_sequences",
        "INT32",
        "number of texts for one prompt",
        OneOf((1,), "send the request again, with another seed"),
    ),
    TensorSpec(
        "length_penalty", "FP32", "length penalty of beam search", OneOf((0.0, 1.0), _NO_BEAMS)
    ),
    TensorSpec(
        "return_context_logits", "BOOL", "logits of the prompt", OneOf((False,), _NO_LOGITS)
    ),
    TensorSpec(
        "return_generation_logits", "BOOL", "logits of the text", OneOf((False,), _NO_LOGITS)
    ),
    TensorSpec(
        "use_draft_logits",
        "BOOL",
        "see `verification`",
        OneOf((False,), "set verification to rejection instead"),
    ),
)
"""Tensors with only a neutral value."""

_NAMES = {
    "not supported": "early_stopping beam_search_diversity_rate lora_weights lora_config "
    "prompt_embedding_table prompt_table_extra_ids prompt_vocab_size draft_input_ids "
    "draft_logits draft_acceptance_threshold top_p_min top_p_decay top_p_reset_ids "
    "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids lookahead_window_size "
    "lookahead_ngram_size lookahead_verification_set_size retention_token_range_starts "
    "retention_token_range_ends retention_token_range_priorities "
    "retention_token_range_durations_ms retention_decode_priority retention_decode_duration_ms "
    "image_input decoder_text_input",
    "not supported; write the conversation as text in text_input": "messages",
    "unknown; use text_input": "prompt",
    "unknown; use max_tokens": "request_output_len max_new_tokens",
    "unknown; use stream": "streaming",
    "unknown; use top_k": "runtime_top_k",
    "unknown; use top_p": "runtime_top_p",
    "unknown; use length_penalty": "len_penalty",
    "unknown; use seed": "random_seed",
    "unknown; use min_tokens": "min_length",
    "unknown; use stop_words": "stop stop_words_list",
    "unknown; use bad_words": "bad_words_list",
    "unknown; use embedding_bias_words": "embedding_bias logit_bias",
    "unknown; use lora_name": "lora_task_id",
    "unknown; use speculation_policy": "policy",
    "unknown; use request_priority": "priority",
    "unknown; use deadline_ms": "timeout",
}
REFUSED = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Reasons by name of a request parameter: unsupported features, and fields of other interfaces that
have another name here."""


def why_refused(name: str, value: object, inputs: Collection[str]) -> str | None:
    """The error message for a request parameter. inputs: names of all input tensors.

    None if it may be ignored: it turns off a feature that is not supported, or is the client's `id`
    of the request, which Triton passes on.
    """
    if name == "id" or (name in REFUSED and value is False):
        return None
    if name in inputs:
        return f"{name}: send it as a tensor (in JSON: a top-level key), not as a parameter"
    if name in REFUSED:
        return f"{name}: {REFUSED[name]}"
    # Comparing a very long name would take too long.
    close = difflib.get_close_matches(name[:64], inputs)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else f"see the {len(inputs)} input tensors"
    )
    return f"unknown parameter {shown(name)}: {hint} (docs/reference/tensors.md)"
