"""From the guide of a request to a compiled grammar of the library llguidance.

Compiling can take any time and memory, so `trial` does it first in a process of its own.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any, assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from smartspec_py.constants import JSON_STYLE, LOOK_AROUND, lark_text
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.token_names import LARK_JSON, AddedTokens, regexes_in
from smartspec_py.faults import cut, shown

MAX_REASON = 300
"""Characters of an error. The library quotes whole lines of a grammar, and a status over gRPC has a
limit of some thousand bytes."""

LIMITS = LLParserLimits(
    max_items_in_row=5_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=8_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Lower than the library's, because a client chooses the grammar: a mask takes at most about 20 ms,
and a state 40 MB. Ordinary schemas need at most 4 ms."""

LOOK_AHEAD = 16
"""Tokens or forced runs of a text that are tried after compiling. Some limits are reached only
there: a row of an object's properties is counted when its first token is read."""

NO_ROLLBACK = re.compile(r"(?m)^\s*\w+\s*\[[^\]\n]*\b(max_tokens|stop)\s*=")
"""Attributes of Lark rules after which the library cannot take tokens back."""

MAX_MULTIPLE = 10_000
"""Largest least common multiple of all values of `multipleOf`, without the zeros at their ends. The
library makes a state for each remainder, and its limits do not count them: a value of 123456789
took minutes and 9 GB."""

VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""

ANY_JSON = '{"type": ["object", "array"]}'


class GrammarError(ValueError):
    """The grammar cannot be used. The message says why."""


def grammar_text(kind: GuideType, guide: str, added: AddedTokens) -> str:
    """The grammar in llguidance's own format. added: of the tokenizer. Raises GrammarError, and
    plain exceptions."""
    if kind is GuideType.REGEX:
        _check_pattern("", guide)
        return LLMatcher.grammar_from_regex(guide)
    if kind is GuideType.EBNF_GRAMMAR:
        # The library looks for blank lines in quadratic time, and holds Python's lock.
        guide = "\n".join(line for line in guide.splitlines() if line.strip())
        if match := NO_ROLLBACK.search(guide):
            raise GrammarError(f"rules with {match[1]} are not supported")
        lark = added.in_lark(any_to_lark(guide))
        for match in LARK_JSON.finditer(lark):
            _check_schema(lark, match.end())
        for pattern in regexes_in(lark):
            _check_pattern("", pattern)
        return LLMatcher.grammar_from_lark(lark)
    if kind is GuideType.CHOICE:
        texts = json.loads(guide)
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise GrammarError("a JSON list of texts, at least one, is needed")
        # One terminal: as alternatives of a rule, each text takes an item of each row.
        return LLMatcher.grammar_from_lark(
            f"start: TEXT\nTEXT: {' | '.join(map(lark_text, texts))}"
        )
    if kind not in (GuideType.JSON, GuideType.JSON_SCHEMA):
        assert_never(kind)
    schema = ANY_JSON if kind is GuideType.JSON else guide
    _check_schema(schema, len(schema) - len(schema.lstrip()))
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)


def compiled(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the begin of the text. Raises GrammarError."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars without any text, or that are too large
    _check(matcher)
    return matcher


def look_ahead(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Follow a text for some tokens. Raises GrammarError if a limit is reached there."""
    quotes = tokenizer.tokenize_str('"')
    for _ in range(LOOK_AHEAD):
        if matcher.is_stopped():
            break
        tokens = matcher.compute_ff_tokens() or _next(matcher, tokenizer, quotes)
        if not tokens:
            break
        matcher.consume_tokens(tokens)
    _check(matcher)


def _next(matcher: LLMatcher, tokenizer: LLTokenizer, wanted: list[int]) -> list[int]:
    """A token that may follow: one of these if possible. Empty if the text must end."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    may_follow = np.unpackbits(bits, bitorder="little")
    may_follow[tokenizer.eos_tokens] = 0
    found = [token for token in wanted if may_follow[token]]
    token = found[0] if found else int(may_follow.argmax())
    return [token] if may_follow[token] else []


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(reason(matcher))


def reason(matcher: LLMatcher) -> str:
    """Why this matcher cannot be used any more."""
    return short(matcher.get_error().replace("<non-verbose/>", ""))


def short(text: str) -> str:
    """On one line, and not too long. For some grammars the library has a code and no sentence."""
    text = " ".join(text.split())
    if " " not in text:
        text = f"the grammar cannot be followed ({text})"
    return cut(text, MAX_REASON)


def _check_schema(text: str, start: int) -> None:
    """Raises GrammarError for a schema at this place that cannot be used. The library says what is
    wrong with text that is not JSON."""
    _check_multiples(text, start)
    try:
        schema, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return
    parts = [("", schema)]
    for place, part in parts:
        if isinstance(part, dict):
            parts += [(f"{place}{name}.", part[name]) for name in part if name not in VALUES]
            if isinstance(pattern := part.get("pattern"), str):
                _check_pattern(f"{place}pattern: ", pattern)
            for pattern in part.get("patternProperties") or ():
                _check_pattern(f"{place}patternProperties: ", str(pattern))
        elif isinstance(part, list):
            parts += [(f"{place}{number}.", each) for number, each in enumerate(part)]


def _check_pattern(place: str, pattern: str) -> None:
    if LOOK_AROUND.match(pattern):
        raise GrammarError(
            f"{place}got {shown(pattern)}, must have no look-around: it is not supported"
        )


def _check_multiples(text: str, start: int) -> None:
    """Raises GrammarError if the JSON at this place is too expensive."""
    multiples = [1]

    def note(members: list[tuple[str, Any]]) -> None:
        multiples.extend(_digits(value) for name, value in members if name == "multipleOf")

    try:
        json.JSONDecoder(object_pairs_hook=note).raw_decode(text, start)
    except ValueError:
        return
    if math.lcm(*multiples) > MAX_MULTIPLE:
        raise GrammarError(
            "the least common multiple of all values of multipleOf must be at most "
            f"{MAX_MULTIPLE}, without the zeros at the ends of each value"
        )


def _digits(value: Any) -> int:
    """The digits of a number as an integer: 25 for 0.25 and for 2500. 1 for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    number = Decimal(str(value))
    digits = number.normalize().as_tuple().digits if number.is_finite() else ()
    return int("".join(map(str, digits)) or 1) or 1
