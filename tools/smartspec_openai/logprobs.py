"""Log-probabilities in OpenAI's two formats.

An entry of the model is a token, its log-probability and a list of the most probable tokens with
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

TokenBytes = Callable[[int], bytes]


def of_chat(entries: Sequence[Any], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def one(token: int, log_prob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _text(raw), "logprob": log_prob, "bytes": list(raw)}

    content = [
        one(token, log_prob) | {"top_logprobs": [one(*other) for other in top]}
        for token, log_prob, top in entries
    ]
    return {"content": content, "refusal": None}


def of_text(
    first: int | None, entries: Sequence[Any], offset: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. first: the first token of a prompt, which has no
    log-probability. offset: characters before the first token."""
    found: dict[str, Any] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    every = [] if first is None else [(first, None, None)]
    for token, log_prob, top in [*every, *entries]:
        text = _text(token_bytes(token))
        found["tokens"].append(text)
        found["token_logprobs"].append(log_prob)
        found["text_offset"].append(offset)
        offset += len(text)
        best = {_text(token_bytes(other)): value for other, value in reversed(top or ())}
        # OpenAI adds the chosen token where it is not among the most probable ones.
        found["top_logprobs"].append(None if top is None else {**best, text: log_prob})
    return found


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
