"""Constants, for modules that must import without pydantic."""

from __future__ import annotations

import json
import re
from typing import Any

DRAFT_MODEL = "draft_model"
PROMPT_LOOKUP = "prompt_lookup"
HEADS = "heads"
GRAMMAR = "grammar"
"""Names of proposers in requests and engine.json."""

GUIDE_FIELD = "guided_decoding_guide"
GUIDE_FIELDS = frozenset({f"{GUIDE_FIELD}_type", GUIDE_FIELD})
"""Fields of requests whose text has a grammar."""

JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""How JSON is written that follows a schema, for llguidance: on one line, as Python writes it.
Where a grammar allows other whitespace, little is forced, and some models write spaces until
`max_tokens`. What cannot be followed exactly is refused."""

LOOK_AROUND = re.compile(
    r"(?:[^\\\[(]|\\.|\[(?:\\.|[^\]\\])*\]|\((?!\?<?[=!]))*\(\?<?[=!]", re.DOTALL
)
"""Matches a regular expression with look-around, which grammars do not have: outside of escapes and
of sets of characters."""

DEFAULT_CONTEXT_LEN = 512
"""Context length of benchmarks, and of engines whose models define none."""

LEAST_CHUNK = 128
"""Prompt tokens per step if they were not measured, or if a larger chunk brings no benefit."""

PRIORITY_WORTH_S = 10.0
"""One level of priority counts as an arrival this many seconds earlier. So a waiting request is
always served eventually, even if requests with higher priority keep arriving."""


def lark_text(text: str) -> str:
    """A text in a Lark grammar. It is written as in JSON, but without raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
