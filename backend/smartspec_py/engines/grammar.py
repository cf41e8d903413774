"""Grammars that restrict the text of a request, and the tokens that a grammar forces.

The library llguidance computes which tokens a grammar allows at a position. The target and the
draft model exclude all others before they apply anything else to the logits, so the text is the
same with and without drafts, and drafts never leave the grammar.

Each request has one `GrammarState`, which follows its text. All its users run in the loop's thread.
An error of the library, such as a limit that is reached, is final for the state: `error` says why,
and the target then fails this sequence alone.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smartspec_py.core.types import GuideType
from smartspec_py.defaults import JSON_STYLE, lark_text

MAX_COMPILED = 64
"""Compiled grammars that are kept, because clients often send the same one."""

MAX_REASON = 300
"""Characters of an error. The library quotes whole lines of a grammar, and a status over gRPC has a
limit of some thousand bytes."""

NO_ROLLBACK = re.compile(r"(?m)^\s*\w+\s*\[[^\]\n]*\b(max_tokens|stop)\s*=")
"""Attributes of Lark rules after which the library cannot take tokens back."""

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

MAX_MULTIPLE = 10_000
"""Largest least common multiple of all values of `multipleOf`, without the zeros at their ends. The
library makes a state for each remainder, and its limits do not count them: a value of 123456789
took minutes and 9 GB."""

LARK_JSON = re.compile(r"%json\s*")
"""What is before a JSON schema in a Lark grammar."""

ANY_JSON = '{"type": ["object", "array"]}'


class GrammarError(ValueError):
    """The grammar cannot be used. The message says why."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """vocab_size: width of the logits. end_tokens: the model's own, at least one. Raises
        GrammarError for a tokenizer that the library does not know."""
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.to_str(),
                n_vocab=vocab_size,
                eos_token=list(end_tokens),
                slices=LLTokenizer.json_slices(),
            )
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer is not supported: {error}") from error
        self._end_tokens = list(end_tokens)
        self._compiled: OrderedDict[tuple[GuideType, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, kind: GuideType, guide: str, num_prompt: int) -> GrammarState:
        """The state of a new request with this grammar. Raises GrammarError."""
        key = kind, guide
        with self._lock:
            matcher = self._compiled.get(key) or self._compile(kind, guide)
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self._end_tokens, num_prompt)

    def _compile(self, kind: GuideType, guide: str) -> LLMatcher:
        try:
            text = _grammar_text(kind, guide)
        except Exception as error:  # the library's parsers raise plain exceptions
            raise GrammarError(_short(str(error))) from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds grammars without any text, or that are too large
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return matcher


def _reason(matcher: LLMatcher) -> str:
    return _short(matcher.get_error().replace("<non-verbose/>", ""))


def _short(reason: str) -> str:
    """On one line, and not too long. For some grammars the library has a code and no sentence."""
    reason = " ".join(reason.split())
    if " " not in reason:
        reason = f"the grammar cannot be followed ({reason})"
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}.."


def _grammar_text(kind: GuideType, guide: str) -> str:
    """The grammar in llguidance's own format."""
    if kind is GuideType.REGEX:
        return LLMatcher.grammar_from_regex(guide)
    if kind is GuideType.EBNF_GRAMMAR:
        # The library looks for blank lines in quadratic time, and holds Python's lock.
        guide = "\n".join(line for line in guide.splitlines() if line.strip())
        if match := NO_ROLLBACK.search(guide):
            raise GrammarError(f"rules with {match[1]} are not supported")
        lark = any_to_lark(guide)
        for match in LARK_JSON.finditer(lark):
            _check_multiples(lark, match.end())
        return LLMatcher.grammar_from_lark(lark)
    if kind is GuideType.CHOICE:
        texts = json.loads(guide)
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise GrammarError("a JSON list of texts, at least one, is needed")
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(lark_text, texts))}")
    if kind not in (GuideType.JSON, GuideType.JSON_SCHEMA):
        assert_never(kind)
    schema = ANY_JSON if kind is GuideType.JSON else guide
    _check_multiples(schema, len(schema) - len(schema.lstrip()))
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)


def _check_multiples(text: str, start: int) -> None:
    """Raises GrammarError if the JSON at this place is too expensive. The library says what is
    wrong with text that is not JSON."""
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


class GrammarState:
    """Follows one text. Callers pass all tokens of the sequence, prompt included. In later calls
    they may only have grown."""

    def __init__(self, matcher: LLMatcher, end_tokens: Sequence[int], num_prompt: int) -> None:
        """num_prompt: leading tokens that the grammar does not cover."""
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._num_read = num_prompt
        self._masks: dict[tuple[int, ...], NDArray[np.bool_] | None] = {}
        self._forced: tuple[int, ...] | None = None

    @property
    def error(self) -> str:
        """Why the state cannot be used any more; empty if it can."""
        return _reason(self._matcher) if self._matcher.is_error() else ""

    def forbidden(
        self, tokens: Sequence[int], drafts: tuple[int, ...], end_tokens: Sequence[int]
    ) -> NDArray[np.bool_] | None:
        """Which tokens may not follow the tokens and these drafts, [vocab_size]. None if the drafts
        themselves are not allowed, or if there is an error.

        end_tokens: of the request. They are allowed where the text may end, and nowhere else.
        """
        self._read(tokens)
        if drafts not in self._masks:
            self._masks[drafts] = self._mask(drafts, end_tokens)
        return self._masks[drafts]

    def num_allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of leading drafts that may follow the tokens."""
        self._read(tokens)
        return self._matcher.validate_tokens(list(drafts))

    def forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the text that must follow, if there is only one."""
        self._read(tokens)
        if self._forced is None:
            self._forced = tuple(self._matcher.compute_ff_tokens())
        return self._forced

    def _read(self, tokens: Sequence[int]) -> None:
        new = tokens[self._num_read :]
        if new:
            self._matcher.consume_tokens(list(new))
            self._num_read = len(tokens)
            self._masks.clear()
            self._forced = None

    def _mask(self, drafts: tuple[int, ...], end_tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        matcher = self._matcher
        num_read = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        mask = None
        if num_read == len(drafts):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(~bits, bitorder="little").view(np.bool_)
            may_not_end = bool(mask[self._end_tokens].all())
            mask[self._end_tokens] = True
            mask[list(end_tokens)] = may_not_end
        if num_read:
            matcher.rollback(num_read)
        return None if matcher.is_error() else mask
