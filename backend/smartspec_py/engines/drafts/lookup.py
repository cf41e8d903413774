"""Drafts the tokens that followed an earlier occurrence of the last tokens, in prompt or output.

Prompt lookup uses no model, so a draft costs microseconds. It helps if the text repeats itself or
its prompt: edited code, quoted passages, tables.

The rule: take the longest tail, from max_ngram down to min_ngram tokens, that occurred earlier, and
use its latest occurrence. The drafts are the tokens that followed it. If these run out at the end
of the text, the drafts continue with themselves. An occurrence that ended p tokens before the end
is continued with period p, as in "a b a b" followed by "a b ...".

With `history_tokens`, texts that sequences of the same scope have generated are searched too
(`history.py`), and a longer match there is used instead.

The quality of drafts depends on the match. Longer matches are better. If earlier occurrences were
followed by different tokens, drafts are rarely accepted. So drafts are divided into acceptance
groups by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.history import MAX_MATCH, History, Match, Text
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities

NOT_FOUND = 0
"""Means that there is no earlier occurrence. No occurrence ends at position 0."""

AGREED = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 16: 0.85}
"""Minimum tokens of a match, and the initial acceptance rate for such a match. On the four
workloads, the first draft was right in 0.81, 0.86, 0.50, 0.87 and 0.89 of the cases. The initial
rates are lower, because few texts repeat themselves that much."""

DISAGREED = "disagreed"
"""The acceptance group of matches whose earlier occurrences were followed by different tokens."""

GROUPS = {**{f"{n} tokens": prob for n, prob in AGREED.items()}, DISAGREED: 0.15}
"""The initial acceptance rate of each group. On the workloads it was 0.05 for DISAGREED."""

FOUND_ONCE = {2: 0.3, 3: 0.5, 4: 0.6, 5: 0.7, 16: 0.85}
FOUND_OFTEN = {2: 0.7, 16: 0.9}
"""As `AGREED`, for matches in the history that occurred once, or several times and were always
followed by the same token. After 2 tokens, the first draft was right in 0.27 and 0.74 of the cases,
and in 0.1 where the matches disagreed."""

HISTORY = "history, "
"""Begins the names of their acceptance groups."""

HISTORY_GROUPS = {
    **{f"{HISTORY}{n} tokens once": prob for n, prob in FOUND_ONCE.items()},
    **{f"{HISTORY}{n} tokens often": prob for n, prob in FOUND_OFTEN.items()},
    HISTORY + DISAGREED: 0.15,
}

MOST_ADDED = 4096
"""Tokens of a sequence that are indexed at once, which takes 5 to 10 ms. Behind a longer prompt, it
has no drafts in its first steps, so that other requests do not wait for the index of the whole."""

MAX_SCOPES = 16
"""Scopes whose texts are kept. Another one replaces the least recently joined of those without
running sequences, if there is one."""


@dataclass(slots=True)
class _Index:
    """Where the n-grams of one sequence occurred last.

    num_known: tokens that are indexed. match_end: position of the token that followed the earlier
        occurrence of the tail; NOT_FOUND if there is none. length: of the match, at most 16.
    acceptance_group: of that match, see GROUPS.
    text: what it has generated, in the history of its scope; None if it has none.
    found: a longer match in the history, which is used instead; None if there is none.
    ends: for each n, shortest first, the position after the latest occurrence of each n-gram.
        It is negative if occurrences were followed by different tokens. N-grams that end at the
        last known token are not included, so the tail does not find itself.
    """

    ends: tuple[tuple[int, dict[tuple[int, ...], int]], ...]
    num_known: int = 0
    match_end: int = NOT_FOUND
    length: int = 0
    acceptance_group: str = DISAGREED
    text: Text | None = None
    found: Match | None = None


class PromptLookupProposer(Proposer):
    """N-gram lookup.

    Each token is indexed once, so a step costs the same at any context length. An index holds at
    most one entry per token and n.
    """

    def __init__(
        self, max_draft_len: int, max_ngram: int = 4, min_ngram: int = 2, history_tokens: int = 0
    ) -> None:
        """history_tokens: size of the history of each scope; 0 for none. Raises ValueError unless
        max_draft_len >= 0 and 1 <= min_ngram <= max_ngram."""
        if max_draft_len < 0 or not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"{max_draft_len} drafts after {min_ngram} to {max_ngram} tokens")
        self._ngrams = range(min_ngram, max_ngram + 1)
        groups = GROUPS | HISTORY_GROUPS if history_tokens else GROUPS
        self.capabilities = ProposerCapabilities(
            max_draft_len,
            has_passes=False,
            learns_texts=history_tokens > 0,
            acceptance_groups=groups,
        )
        self._indexes: dict[SequenceId, _Index] = {}
        self._history_tokens = history_tokens
        self._histories: dict[str, History] = {}
        """By scope, the least recently joined first."""

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        """max_draft_len if the tail occurred before, less if it was near the end of another text;
        0 if it did not occur.

        Since the last call, `tokens` may only have grown. The result is cached: `propose` with the
        same tokens does not search again.
        """
        index = self._searched(sequence, tokens)
        return len(_drafts(index, tokens, self.capabilities.max_draft_len))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """As many drafts as requested, fewer if they contain an end token, none without a match.

        Drafts end after an end token, because later tokens are never used. Drafts depend only on
        the known text: a longer draft begins with the shorter one.
        """
        return [self._draft(task) for task in tasks]

    def counterfactual(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """See `Proposer`. The result of the last lookup of these tokens is reused."""
        num = min(len(generated), self.capabilities.max_draft_len)
        following = _drafts(self._searched(sequence, tokens), tokens, num)
        pairs = zip(following, generated, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return len(following), num_right

    def acceptance_group(self, sequence: SequenceId) -> str:
        """The acceptance group of the match of the last lookup. There must have been a match."""
        return self._indexes[sequence].acceptance_group

    def learn(
        self, sequence: SequenceId, tokens: Sequence[int], num_prompt: int, scope: str
    ) -> None:
        if len(tokens) == num_prompt:
            return
        index = self._index(sequence)
        if index.text is None and (history := self._joined(scope)):
            index.text = Text(history, num_prompt, num_prompt)
        if index.text:
            index.text.history.extend(index.text, tokens)

    def release(self, sequence: SequenceId) -> None:
        index = self._indexes.pop(sequence, None)
        if index and index.text:
            index.text.history.num_open -= 1

    def close(self) -> None:
        self._indexes.clear()
        self._histories.clear()

    def _draft(self, task: DraftTask) -> Draft:
        assert 0 <= task.draft_len <= self.capabilities.max_draft_len, "more than max_draft_len"
        if task.draft_len == 0:
            return Draft()
        following = _drafts(self._searched(task.sequence, task.tokens), task.tokens, task.draft_len)
        del following[task.start.sampling.num_before_end(following) + 1 :]
        return Draft(tuple(following))

    def _index(self, sequence: SequenceId) -> _Index:
        if sequence not in self._indexes:
            ends = tuple((n, dict[tuple[int, ...], int]()) for n in self._ngrams)
            self._indexes[sequence] = _Index(ends)
        return self._indexes[sequence]

    def _searched(self, sequence: SequenceId, tokens: Sequence[int]) -> _Index:
        """The index of these tokens, with the match of the tail."""
        index = self._index(sequence)
        if index.num_known != len(tokens):
            assert index.num_known < len(tokens), f"sequence {sequence} lost tokens"
            _add(index, tokens, min(len(tokens), index.num_known + MOST_ADDED))
            if index.num_known == len(tokens):
                _match(index, tokens)
                self._match_history(index, tokens)
            else:
                index.match_end, index.found = NOT_FOUND, None
        return index

    def _match_history(self, index: _Index, tokens: Sequence[int]) -> None:
        """Use the history where it has a longer match."""
        if index.text is None:
            return
        found = index.text.history.find(tokens[-MAX_MATCH:], self.capabilities.max_draft_len)
        index.found = found if found and found.length > index.length else None
        if index.found:
            index.acceptance_group = HISTORY + _history_group(index.found)

    def _joined(self, scope: str) -> History | None:
        """The history of a scope, for one more sequence; None if all others have running ones."""
        history = self._histories.pop(scope, None)
        if history is None:
            if len(self._histories) >= MAX_SCOPES:
                idle = next((s for s, h in self._histories.items() if not h.num_open), None)
                if idle is None:
                    return None
                del self._histories[idle]
            history = History(self._history_tokens, self._ngrams[0])
        history.num_open += 1
        self._histories[scope] = history
        return history


def _drafts(index: _Index, tokens: Sequence[int], num: int) -> list[int]:
    """Up to `num` tokens after the match; none without a match."""
    if index.found:
        return index.found.tokens[:num]
    return _following(tokens, index.match_end, num) if index.match_end else []


def _following(tokens: Sequence[int], match_end: int, num: int) -> list[int]:
    following = list(tokens[match_end : match_end + num])
    period = len(tokens) - match_end
    while len(following) < num:
        following.append(following[-period])
    return following


def _add(index: _Index, tokens: Sequence[int], num_known: int) -> None:
    """Index the n-grams that end from the previous last token up to the token before the last of
    the first `num_known`."""
    for n, ends in index.ends:
        for end in range(max(index.num_known, n), num_known):
            ngram = tuple(tokens[end - n : end])
            before = ends.get(ngram)
            is_alike = before is None or (before > 0 and tokens[before] == tokens[end])
            ends[ngram] = end if is_alike else -end
    index.num_known = num_known


def _match(index: _Index, tokens: Sequence[int]) -> None:
    """Find the longest match. Short tails come first: if one never occurred, no longer one did."""
    match_end, length = NOT_FOUND, 0
    for n, ends in index.ends:
        end = ends.get(tuple(tokens[-n:]))
        if end is None:
            break
        match_end, length = end, n
    index.match_end = abs(match_end)
    index.length = _length(tokens, abs(match_end), length)
    index.acceptance_group = _group(index.length) if match_end > 0 else DISAGREED


def _length(tokens: Sequence[int], match_end: int, length: int) -> int:
    """The length of a match of at least `length` tokens, at most MAX_MATCH."""
    while length < min(MAX_MATCH, match_end) and tokens[match_end - length - 1] == tokens[~length]:
        length += 1
    return length


def _group(length: int) -> str:
    return f"{_least(AGREED, length)} tokens"


def _history_group(match: Match) -> str:
    if not match.is_agreed:
        return DISAGREED
    if match.num == 1:
        return f"{_least(FOUND_ONCE, match.length)} tokens once"
    return f"{_least(FOUND_OFTEN, match.length)} tokens often"


def _least(rates: Mapping[int, float], length: int) -> int:
    """The key for matches of this length."""
    return max((n for n in rates if n <= length), default=min(rates))
