"""Grammars that restrict the text of a request, and the tokens that a grammar forces.

The library llguidance computes which tokens a grammar allows at a position. The target and the
draft model exclude all others before they apply anything else to the logits, so the text is the
same with and without drafts, and drafts never leave the grammar.

Each request has one `GrammarState`, which follows its text. All its users run in the loop's thread.
An error of the library, such as a limit that is reached or a panic, is final for the state: `error`
says why, and the target then fails this sequence alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from smartspec_py.engines.host_time import Cause, HostTime
from smartspec_py.engines.structured.guides import reason
from smartspec_py.faults import ENDS, sentence

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_TOKENS: tuple[int, ...] = ()

FORCED_BYTES = 128
"""Most bytes of a forced text that are tokenized at a time, at half a microsecond per byte. The
library would tokenize all of it again for each mask."""


class GrammarState:
    """Follows one text. Callers pass all tokens of the sequence, prompt included. In later calls
    they may only have grown."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        end_tokens: Sequence[int],
        num_prompt: int,
    ) -> None:
        """end_tokens: of the model. num_prompt: leading tokens that the grammar does not cover."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_tokens = list(end_tokens)  # NumPy takes a tuple for an index of each dimension
        self._num_read = num_prompt
        self._last: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], NDArray[np.bool_] | None] = {}
        self._forced: tuple[int, ...] | None = None
        self._fault = ""
        self.host_time = HostTime()
        """Where the time of the library's calls is counted."""

    @property
    def error(self) -> str:
        """Why the state cannot be used any more; empty if it can."""
        if self._fault or not self._matcher.is_error():
            return self._fault
        return reason(self._matcher)

    def forbidden(
        self, tokens: Sequence[int], drafts: tuple[int, ...], end_tokens: Sequence[int]
    ) -> NDArray[np.bool_] | None:
        """Which tokens may not follow the tokens and these drafts, [vocab_size]. None if the drafts
        themselves are not allowed, or if there is an error.

        end_tokens: of the request. They are allowed where the text may end, and nowhere else.
        """
        self._called(None, self._read, tokens)
        if drafts not in self._masks:
            self._masks[drafts] = self._called(None, self._mask, drafts, end_tokens)
        return self._masks[drafts]

    def num_allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of leading drafts that may follow the tokens."""
        self._called(None, self._read, tokens)
        return self._called(0, self._matcher.validate_tokens, list(drafts))

    def forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the text that must follow, if there is only one."""
        self._called(None, self._read, tokens)
        if self._forced is None:
            self._forced = self._called(NO_TOKENS, self._forced_tokens)
        return self._forced

    def _called(self, otherwise: T, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a call that uses the library; `otherwise` after one has raised."""
        if not self._fault:
            try:
                return self.host_time.of(Cause.GRAMMAR, call, *arguments)
            except ENDS:
                raise
            except BaseException as error:
                logger.exception("a grammar cannot be followed")
                self._fault = sentence(error)
        return otherwise

    def _forced_tokens(self) -> tuple[int, ...]:
        return tuple(self._long_run(()) or self._matcher.compute_ff_tokens())

    def _read(self, tokens: Sequence[int]) -> None:
        new = tokens[self._num_read :]
        if new:
            self._matcher.consume_tokens(list(new))
            self._num_read = len(tokens)
            self._last = (new[-1],)
            self._masks.clear()
            self._forced = None

    def _mask(self, drafts: tuple[int, ...], end_tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        mask = self._excluded(drafts)
        if mask is not None:
            may_not_end = bool(mask[self._end_tokens].all())
            mask[self._end_tokens] = True
            mask[list(end_tokens)] = may_not_end
        return None if self._matcher.is_error() else mask

    def _excluded(self, drafts: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Which tokens the grammar excludes behind these drafts. None if it excludes the drafts."""
        if run := self._long_run(drafts):
            return self._all_but(run[0])
        matcher = self._matcher
        num_read = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        mask = None
        if num_read == len(drafts):
            run = self._first_tokens(matcher.compute_ff_bytes(), drafts[-1:] or self._last)
            mask = self._all_but(run[0]) if run else self._library_mask()
        if num_read:
            matcher.rollback(num_read)
        return mask

    def _library_mask(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(~bits, bitorder="little").view(np.bool_)

    def _all_but(self, token: int) -> NDArray[np.bool_]:
        mask = np.ones(self._tokenizer.vocab_size, np.bool_)
        mask[token] = False
        return mask

    def _long_run(self, drafts: tuple[int, ...]) -> list[int]:
        """The tokens that follow these drafts in a long forced text; empty if there is none.

        The drafts are not given to the matcher: after a rollback, it would compute the forced text
        again.
        """
        forced = self._matcher.compute_ff_bytes()
        if drafts and len(forced) > FORCED_BYTES:
            drafted = self._tokenizer.decode_bytes(list(drafts))
            forced = forced[len(drafted) :] if forced.startswith(drafted) else b""
        return self._first_tokens(forced, drafts[-1:] or self._last)

    def _first_tokens(self, forced: bytes, last: tuple[int, ...]) -> list[int]:
        """The first tokens of a forced text if it is long. As in the library's masks, they are
        those that the tokenizer gives it.

        last: the token before, which may change how the text is tokenized; empty if there is none.
        """
        if len(forced) <= FORCED_BYTES:
            return []
        return self._tokenizer.tokenize_partial(forced[:FORCED_BYTES], list(last))[0]
