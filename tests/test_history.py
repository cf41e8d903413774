"""Drafts from earlier texts: the ring and its chains, and what may never be drafted."""

from __future__ import annotations

import random

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.drafts import lookup
from smartspec_py.engines.drafts.history import MAX_CANDIDATES, History, Match
from smartspec_py.engines.drafts.lookup import DISAGREED, EARLIER, PromptLookupProposer
from smartspec_py.engines.proposer import DraftTask

NGRAM = 3


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def history_of(*texts: str, num_tokens: int = 1000) -> History:
    history = History(num_tokens, NGRAM)
    for text in texts:
        history.add(letters(text))
    return history


def found(history: History, tail: str, num: int = 4) -> tuple[str, int, bool] | None:
    """What follows the match, its length, and whether all followed it."""
    match = history.find(letters(tail))
    if match is None:
        return None
    following = "".join(map(chr, history.following(match.position, num)))
    return following, match.length, match.is_agreed


@pytest.mark.parametrize(
    ("texts", "tail", "expected"),
    [
        (["abcdef"], "abc", ("def", 3, True)),
        (["abcdef"], "Xabc", ("def", 3, True)),
        (["abcdef"], "abcd", ("ef", 4, True)),
        (["abcdef"], "def", None),  # nothing follows
        (["abcdef"], "bc", None),  # shorter than an n-gram
        (["abc", "def"], "bcd", None),  # no match crosses the end of a text
        (["abcde", "fgh"], "abcd", ("e", 4, True)),  # nor do drafts
        (["Yabcd", "Zabce"], "Yabc", ("d", 4, True)),  # the longer match, not the later
        (["abcd", "abce"], "abc", ("e", 3, False)),  # the later of two
        (["abcd", "abcd"], "abc", ("d", 3, True)),
        (["abcXabcY"], "abc", ("Y", 3, False)),  # both in one text
        (["q" * 40], "q" * 30, ("q", 16, True)),  # the latest, near the end
    ],
)
def test_matches(texts: list[str], tail: str, expected: tuple[str, int, bool] | None) -> None:
    assert found(history_of(*texts), tail) == expected


def test_the_oldest_text_is_overwritten_first() -> None:
    """A ring of 16: two texts of 7 tokens fit, each with its end. The third takes the first one's
    place."""
    history = history_of("abcdefg", "ABCDEFG", num_tokens=16)
    assert found(history, "abc") == ("defg", 3, True)
    history.add(letters("1234567"))
    assert found(history, "abc") is None
    assert found(history, "ABC") == ("DEFG", 3, True)
    assert found(history, "123") == ("4567", 3, True)


def test_of_a_long_text_the_end_is_kept() -> None:
    history = history_of("abcdefghijklmnopqrstuvwxyz", num_tokens=10)
    assert found(history, "abc") is None
    assert found(history, "rst") == ("uvwx", 3, True)


def test_equals_a_search_over_the_kept_texts() -> None:
    """Random texts of three letters in a ring that is overwritten many times. A match is a real
    one; and there is one if the latest text has the n-gram before its end."""
    rng = random.Random(5)
    history = History(200, NGRAM)
    num_matches = 0
    for _ in range(300):
        text = rng.choices(range(3), k=rng.randrange(1, 40))
        history.add(text)
        tail = rng.choices(range(3), k=rng.randrange(NGRAM, 12))
        match = history.find(tail)
        ngrams = [text[start : start + NGRAM] for start in range(len(text) - NGRAM)]
        if tail[-NGRAM:] in ngrams:
            assert match is not None
        if match is not None:
            num_matches += 1
            start = match.position - match.length
            assert history.following(start, match.length) == tail[-match.length :]
            assert history.following(match.position, 1)
    assert num_matches > 200


def test_a_search_compares_few_positions() -> None:
    class Counted(History):
        num_compared = 0

        def _length(self, position, tail):
            self.num_compared += 1
            return super()._length(position, tail)

    history = Counted(1000, NGRAM)
    for _ in range(100):
        history.add(letters("abcd"))
    assert history.find(letters("abc")) == Match(history._next - 2, 3, True)
    assert history.num_compared == MAX_CANDIDATES


def drafts(
    proposer: PromptLookupProposer, sequence: int, text: str, scope: str | None, num: int = 4
) -> str:
    tokens = letters(text)
    available = proposer.num_available(sequence, tokens, scope=scope)
    task = DraftTask(sequence, tokens, 1, num, SamplingParams(), scope=scope)
    (draft,) = proposer.propose([task])
    assert len(draft.tokens) <= available
    return "".join(map(chr, draft.tokens))


def test_a_longer_match_of_earlier_texts_is_used() -> None:
    proposer = PromptLookupProposer(4, history_tokens=100)
    proposer.learn(letters("abcdefgh"), "s")
    assert drafts(proposer, 1, "Xabcd", "s") == "efgh"
    assert proposer.cohort(1) == EARLIER + "4 tokens"
    assert proposer.hindsight(1, letters("Xabcd"), letters("efX")) == (3, 2)
    assert drafts(proposer, 2, "cdQcd", "s") == "QcdQ"  # 2 tokens in both: its own text
    assert drafts(proposer, 3, "bcdQbcd", "s") == "Qbcd"  # 3 in both: its own text
    assert proposer.cohort(3) == "3 tokens"
    proposer.learn(letters("Xabcdz"), "s")
    assert drafts(proposer, 4, "Yabcd", "s") == "z"  # no token after the end of the text
    assert proposer.cohort(4) == EARLIER + DISAGREED
    assert {proposer.cohort(n) for n in (1, 3, 4)} <= set(proposer.capabilities.cohorts)


def test_scopes_do_not_see_each_other() -> None:
    proposer = PromptLookupProposer(4, history_tokens=100)
    proposer.learn(letters("abcdefgh"), "/anna")
    assert drafts(proposer, 1, "abcd", "/ben") == ""
    assert drafts(proposer, 2, "abcd", "adapter/anna") == ""
    assert drafts(proposer, 3, "abcd", "/") == ""
    assert drafts(proposer, 4, "abcd", None) == ""
    assert drafts(proposer, 5, "abcd", "/anna") == "efgh"


def test_without_history_nothing_is_kept() -> None:
    proposer = PromptLookupProposer(4)
    proposer.learn(letters("abcdefgh"), "s")
    assert drafts(proposer, 1, "abcd", "s") == ""
    assert not any(name.startswith(EARLIER) for name in proposer.capabilities.cohorts)


def test_the_scope_whose_last_text_is_oldest_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_SCOPES", 2)
    proposer = PromptLookupProposer(4, history_tokens=100)
    for scope in ("a", "b", "a", "c"):
        proposer.learn(letters("abcdefgh"), scope)
    sequences = {"a": 1, "b": 2, "c": 3}
    seen = {scope: drafts(proposer, n, "abcd", scope) for scope, n in sequences.items()}
    assert seen == {"a": "efgh", "b": "", "c": "efgh"}
