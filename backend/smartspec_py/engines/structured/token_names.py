"""Grammars name the tokens that a tokenizer has for marks such as `<tool_call>` or `</think>`.

A model writes such a mark as one token. In a grammar, llguidance takes a quoted mark as bytes,
which only pieces of it match, and `<[7]>` as token 7. It also encodes forced bytes with the
tokenizer, which gives the mark's token, and then refuses this token. So

- the library gets a tokenizer whose added tokens have other names: bytes never become one of them;
- in rules of a Lark grammar, quoted marks and names such as `<tool_call>` become token numbers.

Special tokens, such as the end of a turn, are no text: where a grammar quotes them, they are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

LARK_JSON = re.compile(r"%json\s*")
"""What is before a JSON schema in a Lark grammar."""

_PIECE = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      |(?P<head>^[ \t]*[?!]?(?P<rule>[A-Za-z_]\w*)(?:\.-?\d+)?(?:[ \t]*\[[^\]\n]*\])?[ \t]*:)
      |(?P<text>"(?:\\.|[^"\\\n])*"(?P<flag>i?))
      |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
      |(?P<name><[^\[<>\s"][^<>\n"]*>)
      |(?P<json>%json\s*)""",
    re.VERBOSE | re.MULTILINE,
)
"""The parts of a Lark grammar that matter here. A head is what is before the body of a rule, with
its attributes."""


def regexes_in(lark: str) -> Iterator[str]:
    """The regular expressions of a Lark grammar, without the escapes of `/`."""
    at = 0
    while found := _PIECE.search(lark, at):
        at = _end_of_json(lark, found.end()) if found["json"] else found.end()
        if found["regex"]:
            body, _, _ = found["regex"][1:].rpartition("/")
            yield re.sub(r"\\(/)|(\\.)", r"\1\2", body)


class AddedTokens:
    """The added tokens of a tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        """tokenizer_json: as `Tokenizer.to_str` writes it."""
        document = json.loads(tokenizer_json)
        added = document.get("added_tokens", [])
        self.numbers: Mapping[str, int] = {one["content"]: one["id"] for one in added}
        """Of all added tokens, by name."""

        self._texts = {one["content"]: one["id"] for one in added if not one["special"]}
        names = sorted(self._texts, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.hidden_json = json.dumps(_hidden(document))
        """The tokenizer with other names for them."""

    def in_lark(self, lark: str) -> str:
        """The grammar with numbers for these tokens. Raises ValueError for a mark in a terminal,
        which cannot have tokens."""
        return "".join(self._pieces(lark))

    def _pieces(self, lark: str) -> Iterator[str]:
        at, rule = 0, ""
        while found := _PIECE.search(lark, at):
            yield lark[at : found.start()]
            at = found.end()
            if found["json"]:
                at = _end_of_json(lark, at)
                yield lark[found.start() : at]
            elif found["text"] and not found["flag"]:
                yield self._text(found["text"], rule)
            elif found["name"] and found["name"] in self.numbers:
                yield f"<[{self.numbers[found['name']]}]>"
            else:
                rule = found["rule"] or rule
                yield found[0]
        yield lark[at:]

    def _text(self, quoted: str, rule: str) -> str:
        """A quoted text of a rule, with tokens for the marks in it."""
        text = _unquoted(quoted)
        if text is None or not self._marks.search(text):
            return quoted
        if rule.isupper():
            mark = self._marks.search(text)
            raise ValueError(
                f"{mark and mark[0]!r} in the terminal {rule} is one token of this model: write it "
                "in a rule, which has a lower-case name"
            )
        parts, at = list[str](), 0
        for mark in self._marks.finditer(text):
            if text[at : mark.start()]:
                parts.append(json.dumps(text[at : mark.start()]))
            parts.append(f"<[{self._texts[mark[0]]}]>")
            at = mark.end()
        if text[at:]:
            parts.append(json.dumps(text[at:]))
        return f"({' '.join(parts)})"


def _unquoted(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None  # escapes of Lark that JSON does not have


def _end_of_json(lark: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(lark, start)[1]
    except ValueError:
        return start  # the library says what is wrong


def _hidden(document: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with names that no text contains, for its added tokens."""
    added, model = document.get("added_tokens", []), document["model"]
    names = {one["content"]: f"<|token {one['id']}|>" for one in added}
    for one in added:
        one["content"] = names[one["content"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of a name and a score
        model["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    return document
