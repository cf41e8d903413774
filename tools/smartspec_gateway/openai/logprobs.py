"""Log-probabilities in OpenAI's two formats.

An entry of the model is a token, its log-probability and a list of the most probable tokens with
theirs.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

TokenBytes = Callable[[int], bytes]


class Offsets:
    """Counts the characters of a text whose tokens may be parts of a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def of_next(self, raw: bytes) -> int:
        """The number of characters before this token, in which its first one is not counted."""
        before = self._num_characters
        self._num_characters += len(self._decoder.decode(raw))
        return before


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
    first: int | None, entries: Sequence[Any], offsets: Offsets, token_bytes: TokenBytes
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. first: the first token of a prompt, which has no
    log-probability. offsets: after the tokens before these."""
    found: dict[str, Any] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    every = [] if first is None else [(first, None, None)]
    for token, log_prob, top in [*every, *entries]:
        raw = token_bytes(token)
        found["tokens"].append(_text(raw))
        found["token_logprobs"].append(log_prob)
        found["text_offset"].append(offsets.of_next(raw))
        best = {_text(token_bytes(other)): value for other, value in reversed(top or ())}
        # OpenAI adds the chosen token where it is not among the most probable ones.
        found["top_logprobs"].append(None if top is None else {**best, _text(raw): log_prob})
    return found


def _text(raw: bytes) -> str:
    """The token's text. A part of a character is written as OpenAI does, so that parts differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
