"""Prompt lookup: cases worked by hand, and the same answers as a search over the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.lookup import DISAGREED, MOST_ADDED, PromptLookupProposer
from smartspec_py.engines.proposer import DraftTask

SEQUENCE = 7


def task(
    tokens: Sequence[int],
    draft_len: int,
    end_tokens: tuple[int, ...] = (),
    sequence: int = SEQUENCE,
) -> DraftTask:
    return DraftTask(
        SequenceStart(sequence, tokens, 1, SamplingParams(end_tokens=end_tokens)), draft_len
    )


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def propose(proposer: PromptLookupProposer, text: str, draft_len: int = 6, end: str = "") -> str:
    """Drafts of one task, letters for tokens."""
    (draft,) = proposer.propose([task(letters(text), draft_len, tuple(letters(end)))])
    assert draft.probs is None
    return "".join(map(chr, draft.tokens))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa", ""),  # the tail is not an earlier occurrence of itself
        ("abcab", "cabcab"),  # "ab" ended 3 tokens ago: its period is 3
        ("abcdefghijab", "cdefgh"),
        ("aaa", "aaaaaa"),  # "aa" at 0 overlaps the tail at 1
        ("abcxbcyabc", "xbcyab"),  # "abc" at 0, not "bc" at 4
        ("abxabyab", "yabyab"),  # two of "ab": the later, at 3
        ("abcdexbcdeyabcde", "yabcde"),  # 4 tokens at most: "bcde" at 6, not "abcde" at 0
        ("axbxa", ""),  # one token is no match
    ],
)
def test_drafts(text: str, expected: str) -> None:
    proposer = PromptLookupProposer(max_draft_len=6)
    assert proposer.num_available(SEQUENCE, letters(text), SamplingParams()) == (
        6 if expected else 0
    )
    assert propose(proposer, text) == expected


def test_nothing_behind_the_end_token() -> None:
    """After "ab" came "c.xab": nothing is generated behind the full stop."""
    proposer = PromptLookupProposer(max_draft_len=6)
    assert propose(proposer, "abc.xab", end=".") == "c."
    assert propose(proposer, "abc.xab", end="!x.") == "c."
    assert propose(proposer, "abc.xab") == "c.xabc"


@pytest.mark.parametrize(("most", "largest", "least"), [(-1, 4, 2), (4, 2, 3), (4, 2, 0)])
def test_bad_limits(most: int, largest: int, least: int) -> None:
    with pytest.raises(ValueError, match="drafts after"):
        PromptLookupProposer(most, largest, least)


def test_many_tasks_answer_in_order() -> None:
    proposer = PromptLookupProposer(max_draft_len=2)
    tasks = [
        task(letters("abcab"), 2, sequence=1),
        task(letters("abcde"), 2, sequence=2),
        task(letters("xyxy"), 0, sequence=3),
        task(letters("xyxy"), 1, sequence=4),
    ]
    assert proposer.propose(tasks) == [
        Draft((ord("c"), ord("a"))),
        Draft(),
        Draft(),
        Draft((ord("x"),)),
    ]


def test_release_frees_and_a_sequence_may_come_back() -> None:
    """A sequence that was preempted comes back with all its tokens."""
    proposer = PromptLookupProposer(max_draft_len=6)
    proposer.release(SEQUENCE)
    assert propose(proposer, "abcab") == "cabcab"
    assert len(proposer._indexes) == 1
    proposer.release(SEQUENCE)
    assert len(proposer._indexes) == 0
    assert propose(proposer, "abcabcd") == ""
    assert propose(proposer, "abcabcdbc") == "dbcdbc"
    proposer.close()
    assert len(proposer._indexes) == 0


def test_tokens_may_only_grow() -> None:
    proposer = PromptLookupProposer(max_draft_len=6)
    proposer.num_available(SEQUENCE, letters("abcab"), SamplingParams())
    with pytest.raises(AssertionError, match="lost tokens"):
        proposer.num_available(SEQUENCE, letters("abca"), SamplingParams())


class CountedTokens(list[int]):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, key):
        self.num_reads += 1
        return super().__getitem__(key)


def test_each_token_is_indexed_once() -> None:
    """One more token: an n-gram of each of 3 lengths to add, with 2 tokens to compare; 3 tails to
    look up; and a match that is followed back for 14 tokens at most. However long the text is."""
    proposer = PromptLookupProposer(max_draft_len=3)
    tokens = CountedTokens(letters("abcdef" * 100))
    proposer.num_available(SEQUENCE, tokens, SamplingParams())
    tokens.num_reads = 0
    tokens.append(ord("a"))
    proposer.num_available(SEQUENCE, tokens, SamplingParams())
    assert tokens.num_reads <= 3 * 3 + 3 + 2 * 14


def search(tokens: Sequence[int], num_drafts: int, largest: int, least: int) -> tuple[int, ...]:
    """The rule of the module, by trying every place."""
    for n in range(largest, least - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for source in range(start + n, start + n + num_drafts):
                    text.append(text[source])
                return tuple(text[len(tokens) :])
    return ()


@given(
    chunks=st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12),
    asks=st.lists(st.booleans(), min_size=12, max_size=12),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_equals_a_search_however_the_text_grew(
    chunks: list[list[int]], asks: list[bool], least: int, more: int
) -> None:
    """Three different tokens, so that most tails occurred before; some steps do not ask."""
    proposer = PromptLookupProposer(5, least + more, least)
    tokens: list[int] = []
    for chunk, is_asked in zip(chunks, asks, strict=False):
        tokens.extend(chunk)
        expected = search(tokens, 5, least + more, least)
        if is_asked:
            assert proposer.num_available(SEQUENCE, tokens, SamplingParams()) == len(expected)
        (draft,) = proposer.propose([task(tokens, 5)])
        assert draft.tokens == expected


def test_the_counterfactual_is_what_a_verification_would_have_said() -> None:
    """Texts of two letters repeat themselves often, and seldom for long."""
    rng = random.Random(3)
    num_right = num_wrong = 0
    for sequence in range(300):
        proposer = PromptLookupProposer(max_draft_len=5)
        tokens = rng.choices(range(2), k=rng.randrange(1, 20))
        generated = rng.choices(range(2), k=rng.randrange(1, 9))
        (draft,) = proposer.propose([task(tokens, 5, sequence=sequence)])
        drafts = draft.tokens[: len(generated)]
        right = next(
            (
                n
                for n, pair in enumerate(zip(drafts, generated, strict=False))
                if len(set(pair)) > 1
            ),
            len(drafts),
        )
        assert proposer.counterfactual(sequence, tokens, generated) == (len(drafts), right)
        num_right += right > 0
        num_wrong += right < len(drafts)
    assert num_right > 50
    assert num_wrong > 50


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("abcdXab", "2 tokens"),
        ("abcdXabc", "3 tokens"),
        ("YabcdXabcd", "4 tokens"),
        ("abcdefXabcdef", "5 tokens"),
        ("abcdefghijklmnop" * 2, "16 tokens"),
        ("abXabYab", DISAGREED),
        ("ZabXYabXab", "2 tokens"),  # twice alike; before the latest is a Y
    ],
)
def test_matches_are_told_apart(text: str, group: str) -> None:
    """Where two occurrences were followed by different tokens the latest is still taken."""
    proposer = PromptLookupProposer(max_draft_len=3)
    assert proposer.num_available(SEQUENCE, letters(text), SamplingParams()) == 3
    found = proposer.acceptance_group(SEQUENCE)
    assert found == group
    assert found in proposer.capabilities.acceptance_groups


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    """Until then nothing is drafted, also of a match that was found before."""
    proposer = PromptLookupProposer(4)
    tokens = [*letters("abcab"), *range(1000, 1000 + 2 * MOST_ADDED), *letters("abc")]
    assert proposer.num_available(SEQUENCE, tokens[:5]) == 4
    assert proposer.num_available(SEQUENCE, tokens) == 0
    assert proposer.num_available(SEQUENCE, tokens) == 0
    assert proposer.num_available(SEQUENCE, tokens) == 4
    (draft,) = proposer.propose([task(tokens, 2)])
    assert draft.tokens == tuple(letters("ab"))
