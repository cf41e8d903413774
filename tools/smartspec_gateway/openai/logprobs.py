"""Log-probabilities in OpenAI's two formats.

An entry of the model is a token, its log-probability and a list of the most probable tokens with
theirs. It becomes text when it comes, because the objects of Python take ten times the memory.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from smartspec_gateway.openai.json_parts import Encoded

TokenBytes = Callable[[int], bytes]

MAX_ENTRIES = 32
"""Tokens whose log-probabilities are converted at once."""

_DECODER = json.JSONDecoder()


def documents(text: str) -> Iterator[dict[str, Any]]:
    """The documents in which `token_log_probs` is passed on, each with MAX_ENTRIES or less.

    text: {"prompt":[..],"output":[..]} without spaces, maybe with only one of them, or none.
    """
    at = 1
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at + (text[at] == ","))
        at += 1  # the colon
        entries: list[Any] = []
        while text[at] != "]":
            entry, at = _DECODER.raw_decode(text, at + 1)  # behind a bracket or a comma
            entries.append(entry)
            if len(entries) == MAX_ENTRIES:
                yield {name: entries}
                entries = []
        at += 1
        yield {name: entries}


class LogProbs(ABC):
    """Those of one choice that were not taken yet."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        """token_bytes: of a token in the middle of a text."""
        self._token_bytes = token_bytes

    @abstractmethod
    def add(self, entries: Sequence[Any]) -> None:
        """Those of generated tokens."""

    def add_prompt(self, entries: Sequence[Any]) -> None:
        """Those of the prompt."""
        self.add(entries)

    @abstractmethod
    def take(self) -> dict[str, Any]:
        """`logprobs` of the choice."""


class OfChat(LogProbs):
    """In the format of chats."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__(token_bytes)
        self._content: list[Encoded] = []

    def add(self, entries: Sequence[Any]) -> None:
        for token, log_prob, top in entries:
            found = self._one(token, log_prob) | {"top_logprobs": [self._one(*one) for one in top]}
            self._content.append(_encoded(found))

    def take(self) -> dict[str, Any]:
        content, self._content = self._content, []
        return {"content": content, "refusal": None}

    def _one(self, token: int, log_prob: float) -> dict[str, Any]:
        raw = self._token_bytes(token)
        return {"token": _text(raw), "logprob": log_prob, "bytes": list(raw)}


class OfText(LogProbs):
    """In the format of completions, with a list for each kind of value."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        special: Container[int] = (),
        first: int | None = None,
        num_added: int = 0,
    ) -> None:
        """special: tokens that generated text leaves out. first: the first token of a prompt, which
        has no log-probability. num_added: characters of the prompt's tokens before its text."""
        super().__init__(token_bytes)
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = -num_added
        self._columns: dict[str, list[Any]] = {}
        self._empty()
        self.add_prompt([] if first is None else [(first, None, None)])

    def add(self, entries: Sequence[Any]) -> None:
        self._add(entries, self._special)

    def add_prompt(self, entries: Sequence[Any]) -> None:
        """Its text has its special tokens, but those that the tokenizer adds before it."""
        self._add(entries, ())

    def _add(self, entries: Sequence[Any], left_out: Container[int]) -> None:
        columns = self._columns
        for token, log_prob, top in entries:
            raw = self._token_bytes(token)
            columns["tokens"].append(_text(raw))
            columns["token_logprobs"].append(log_prob)
            columns["text_offset"].append(max(0, self._num_characters))
            # The token may be a part of a character, which counts with its last part.
            shown = b"" if token in left_out else raw
            self._num_characters += len(self._decoder.decode(shown))
            best = {_text(self._token_bytes(other)): value for other, value in reversed(top or ())}
            # OpenAI adds the chosen token where it is not among the most probable ones.
            chosen = None if top is None else {**best, _text(raw): log_prob}
            columns["top_logprobs"].append(_encoded(chosen))

    def take(self) -> dict[str, Any]:
        found = self._columns
        self._empty()
        return found

    def _empty(self) -> None:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self._columns = {name: [] for name in names}


def _encoded(value: Any) -> Encoded:
    return Encoded(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _text(raw: bytes) -> str:
    """The token's text. A part of a character is written as OpenAI does, so that parts differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
