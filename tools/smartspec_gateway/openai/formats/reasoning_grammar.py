"""Grammars for models that may write a reasoning block first: the grammar begins behind it."""

from __future__ import annotations

import json
import re
from typing import Any

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.reasoning import Start
from smartspec_py.constants import JSON_STYLE, lark_text

ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)

REASONING = r"""block[suffix=END]: /(?s:.*)/
SPACE: /[ \n]{0,2}/"""
"""A block up to its end, which is text. END is a place for the mark."""

BY_TEXT = "reasoning: block SPACE"
BY_TOKEN = """reasoning: (THOUGHT END | block) SPACE
THOUGHT: /(?s:.*)/"""
"""The end is a token of the model, which no text contains. Models rarely write it in pieces."""


def behind_reasoning(
    kind: str, text: str, field: str, start: Start, end_is_token: bool
) -> tuple[str, str]:
    """The type and the text of the grammar of a whole answer.

    start: inside of a reasoning block, or before one, with which the answer may begin.
    end_is_token: whether the tokenizer has the end of a block as one token. Raises ApiError.
    """
    begin, end = json.dumps(start.marks.begin), json.dumps(start.marks.end)
    block = " ".join(["reasoning", *map(lark_text, filter(None, [start.marks.turn]))])
    block = block if start.place == "inside" else f"({begin} {block})?"
    if start.marks.answer and kind != "ebnf_grammar":  # calls have their own begin
        block += f" {lark_text(start.marks.answer)}"
    reasoning = f"{BY_TOKEN if end_is_token else BY_TEXT}\n{REASONING}".replace("END", end)
    return "ebnf_grammar", f"start: {block} answer\n{reasoning}\n{_answer(kind, text, field)}"


def _answer(kind: str, text: str, field: str) -> str:
    """Rules of Lark that define `answer`."""
    if kind == "json_schema":
        schema = _parsed(text, field)
        if not isinstance(schema, dict):
            raise ApiError(400, f"{field}: must be a JSON object", field)
        return f"answer: %json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"
    if kind == "choice":
        return f"answer: TEXT\nTEXT: {' | '.join(map(lark_text, _parsed(text, field)))}"
    if kind == "regex":
        escaped = ESCAPED_OR_SLASH.sub(lambda one: "\\/" if one[0] == "/" else one[0], text)
        return f"answer: /{escaped}/"
    if field.endswith("grammar"):  # the client's own
        raise ApiError(400, f"{field}: not for a model that writes reasoning first", field)
    return text.replace("start: ", "answer: ", 1)


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field}: is not valid JSON: {error}", field) from None
