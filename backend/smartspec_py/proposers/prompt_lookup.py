"""Proposes what followed the last few tokens when they occurred before, in prompt or output.

No model is asked, so a draft costs microseconds. It pays where the text repeats itself or its
prompt: code that is edited, passages that are cited, tables.

The rule: the longest tail of max_ngram down to min_ngram tokens that occurred earlier, there its
latest occurrence. The drafts are the tokens that followed. How good they are depends on the match:
the longer it is the better, and where earlier occurrences were followed by different tokens they
are hardly ever right. So drafts are told apart by both. Where those run out at the end of the
text, they go on with the drafts themselves: an occurrence that ended p tokens before the end is
continued with period p, as "a b a b" is with "a b a b ...".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Draft, DraftTask, ProposerCapabilities

NOT_FOUND = 0
"""Stands for `no earlier occurrence`; none ends before it has begun."""

AGREED = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 16: 0.85}
"""By the tokens of a match, at least: acceptance that is assumed at first. On the four workloads
the first draft is right in 0.81, 0.86, 0.50, 0.87 and 0.89 of the cases; assumed is less, since
texts that repeat themselves so much are rare."""

DISAGREED = "disagreed"
"""The cohort of matches whose earlier occurrences were followed by different tokens."""

COHORTS = {**{f"{n} tokens": prob for n, prob in AGREED.items()}, DISAGREED: 0.15}
"""For DISAGREED it was 0.05 on the workloads."""


@dataclass(slots=True)
class _Index:
    """Where the n-grams of one sequence were last seen.

    num_known: tokens at the last call. found: the match of the tail of these tokens, a position
    such that tokens[found] followed the earlier occurrence; NOT_FOUND where there is none.
    cohort: of that match, see COHORTS.
    ends: for each n, shortest first, the position after the latest occurrence of each n-gram that
        ends before the last known token, negative where occurrences were followed by different
        tokens. The tail itself is not in it, so it cannot find itself.
    """

    ends: tuple[tuple[int, dict[tuple[int, ...], int]], ...]
    num_known: int = 0
    found: int = NOT_FOUND
    cohort: str = DISAGREED


class PromptLookupProposer:
    """N-gram lookup as a `Proposer`. Each token is indexed once, so that a step costs the same at
    any context length; an index holds at most one entry for each token and n."""

    def __init__(self, max_draft_len: int, max_ngram: int = 4, min_ngram: int = 2) -> None:
        """Raises ValueError unless max_draft_len >= 0 and 1 <= min_ngram <= max_ngram."""
        if max_draft_len < 0 or not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"{max_draft_len} drafts after {min_ngram} to {max_ngram} tokens")
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._capabilities = ProposerCapabilities(
            max_draft_len, has_passes=False, has_hindsight=True, cohorts=COHORTS
        )
        self._indexes: dict[SequenceId, _Index] = {}

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    def num_available(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        """max_draft_len where the tail occurred before, else 0.

        `tokens` may only have grown since the last call. The answer is kept: `propose` with the
        same tokens does not search again.
        """
        return self._capabilities.max_draft_len if self._find(sequence, tokens) else 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """As many drafts as asked, fewer where an end token is among them, none without a match.

        Nothing after an end token is worth verifying. What was known of the text decides alone:
        a longer draft begins with the shorter one.
        """
        return [self._draft(task) for task in tasks]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Nothing to learn: what was accepted comes back among the known tokens."""

    def hindsight(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """See `HindsightProposer`. Not searched again where these tokens were looked up before."""
        found = self._find(sequence, tokens)
        if found == NOT_FOUND:
            return 0, 0
        num = min(len(generated), self._capabilities.max_draft_len)
        pairs = zip(_following(tokens, found, num), generated, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return num, num_right

    def cohort(self, sequence: SequenceId) -> str:
        """Of the match at the last look; there must have been one."""
        return self._indexes[sequence].cohort

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        """Always 0: no pass reads what was missed."""
        return 0

    def release(self, sequence: SequenceId) -> None:
        self._indexes.pop(sequence, None)

    def close(self) -> None:
        self._indexes.clear()

    def _draft(self, task: DraftTask) -> Draft:
        assert 0 <= task.draft_len <= self._capabilities.max_draft_len, "more than it ever drafts"
        if task.draft_len == 0:
            return Draft()
        found = self._find(task.sequence, task.tokens)
        if found == NOT_FOUND:
            return Draft()
        following = _following(task.tokens, found, task.draft_len)
        del following[task.sampling.num_before_end(following) + 1 :]
        return Draft(tuple(following))

    def _find(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        """The position of the token that followed an earlier occurrence of the tail."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index(tuple((n, {}) for n in self._ngrams))
        if index.num_known != len(tokens):
            assert index.num_known < len(tokens), f"sequence {sequence} lost tokens"
            _add(index, tokens)
            _match(index, tokens)
        return index.found


def _following(tokens: Sequence[int], found: int, num: int) -> list[int]:
    following = list(tokens[found : found + num])
    period = len(tokens) - found
    while len(following) < num:
        following.append(following[-period])
    return following


def _add(index: _Index, tokens: Sequence[int]) -> None:
    """Index the n-grams that end at the token that was last, up to the one before the new last."""
    for n, ends in index.ends:
        for end in range(max(index.num_known, n), len(tokens)):
            ngram = tuple(tokens[end - n : end])
            before = ends.get(ngram)
            is_alike = before is None or (before > 0 and tokens[before] == tokens[end])
            ends[ngram] = end if is_alike else -end
    index.num_known = len(tokens)


def _match(index: _Index, tokens: Sequence[int]) -> None:
    """Shortest tail first: where it never occurred, no longer one did."""
    found, length = NOT_FOUND, 0
    for n, ends in index.ends:
        end = ends.get(tuple(tokens[-n:]))
        if end is None:
            break
        found, length = end, n
    index.found = abs(found)
    index.cohort = _agreed(tokens, found, length) if found > 0 else DISAGREED


def _agreed(tokens: Sequence[int], found: int, length: int) -> str:
    """The cohort of a match of `length` tokens or more."""
    while length < min(max(AGREED), found) and tokens[found - length - 1] == tokens[~length]:
        length += 1
    return f"{max((n for n in AGREED if n <= length), default=min(AGREED))} tokens"
