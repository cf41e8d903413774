"""Compiled grammars, which requests with the same guide share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.grammar import GrammarState
from smartspec_py.engines.structured.guides import GrammarError, compiled
from smartspec_py.engines.structured.token_names import AddedTokens
from smartspec_py.engines.structured.trial import (
    COMPILE_LIMITS,
    CompileLimits,
    CrashError,
    TooSlowError,
    Trials,
    new_tokenizer,
)

MAX_KEPT = 64
"""Compiled grammars that are kept, because clients often send the same one. Refusals count too."""

MAX_KEPT_BYTES = 512 * 2**20
"""Memory of all that are kept. Ordinary ones take 1 MB."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar. num_bytes: memory that it takes."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    end_tokens: tuple[int, ...]
    num_bytes: int

    def start(self, num_prompt: int) -> GrammarState:
        """The state of a new request, whose first tokens are the prompt."""
        copy = self.matcher.deep_copy()
        return GrammarState(copy, self.tokenizer, self.end_tokens, num_prompt)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used by several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_tokens: Sequence[int],
        limits: CompileLimits = COMPILE_LIMITS,
    ) -> None:
        """vocab_size: width of the logits. end_tokens: the model's own, at least one. Raises
        GrammarError for a tokenizer that the library does not know."""
        try:
            self._tokenizer = new_tokenizer(AddedTokens(tokenizer.to_str()), vocab_size, end_tokens)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer is not supported: {error}") from error
        self._end_tokens = tuple(end_tokens)
        self._limits = limits
        self._trials = Trials(tokenizer, vocab_size, end_tokens, limits.most_bytes)
        self._kept: OrderedDict[tuple[GuideType, str], CompiledGrammar | str]
        self._kept = OrderedDict()
        self._lock = threading.Lock()

    def find(self, kind: GuideType, guide: str) -> CompiledGrammar | None:
        """The grammar if it was compiled before. Raises GrammarError if it was refused before."""
        key = kind, guide
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if isinstance(kept, str):
            raise GrammarError(kept)
        return kept

    def compile(
        self,
        kind: GuideType,
        guide: str,
        most_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> CompiledGrammar:
        """Compile a grammar within most_s of computing time; None is the limit of the server.

        Raises GrammarError if it cannot be used, TooSlowError after most_s, and TrialEnded if there
        is no result, for example because is_wanted returned False.
        """
        most_s = self._limits.most_s if most_s is None else most_s
        try:
            passed = self._trials.run(kind, guide, most_s, is_wanted)
            matcher = compiled(self._tokenizer, passed.text)
        except GrammarError as error:
            is_final = most_s >= self._limits.most_s or not isinstance(error, TooSlowError)
            if is_final and not isinstance(error, CrashError):  # it may have been killed
                self._keep(kind, guide, str(error))
            raise
        grammar = CompiledGrammar(matcher, self._tokenizer, self._end_tokens, passed.num_bytes)
        self._keep(kind, guide, grammar)
        return grammar

    def close(self) -> None:
        self._trials.close()

    def _keep(self, kind: GuideType, guide: str, result: CompiledGrammar | str) -> None:
        with self._lock:
            self._kept[kind, guide] = result
            while len(self._kept) > MAX_KEPT or self._kept_bytes() > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(g.num_bytes for g in self._kept.values() if isinstance(g, CompiledGrammar))
