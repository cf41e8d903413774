"""Grammars for models that may write a reasoning block first: the grammar begins behind it."""

from __future__ import annotations

import json
import re
from typing import Any

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.reasoning import BEGIN, END
from smartspec_py.defaults import JSON_STYLE, lark_text

ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)

REASONING = f"""reasoning: block SPACE
block[suffix={json.dumps(END)}]: /(?s:.*)/
SPACE: /[ \\n]{{0,2}}/"""


def behind_reasoning(kind: str, guide: str, field: str, is_inside: bool) -> tuple[str, str]:
    """The type and the text of the grammar of a whole answer.

    is_inside: whether the prompt ends inside of a reasoning block. If not, the answer may begin
    with one. Raises ApiError.
    """
    block = "reasoning" if is_inside else f"({json.dumps(BEGIN)} reasoning)?"
    return "ebnf_grammar", f"start: {block} answer\n{REASONING}\n{_answer(kind, guide, field)}"


def _answer(kind: str, guide: str, field: str) -> str:
    """Rules of Lark that define `answer`."""
    if kind == "json_schema":
        schema = _parsed(guide, field)
        if not isinstance(schema, dict):
            raise ApiError(400, f"{field}: must be a JSON object", field)
        return f"answer: %json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"
    if kind == "choice":
        return f"answer: TEXT\nTEXT: {' | '.join(map(lark_text, _parsed(guide, field)))}"
    if kind == "regex":
        escaped = ESCAPED_OR_SLASH.sub(lambda one: "\\/" if one[0] == "/" else one[0], guide)
        return f"answer: /{escaped}/"
    if field != "tools":
        raise ApiError(400, f"{field}: not for a model that writes reasoning first", field)
    return guide.replace("start: ", "answer: ", 1)


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field}: is not valid JSON: {error}", field) from None
