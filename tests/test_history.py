"""Drafts from texts of the same scope: the ring and its chains, and what may never be drafted."""

from __future__ import annotations

import random

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.drafts import lookup
from smartspec_py.engines.drafts.history import MAX_CANDIDATES, History, Text
from smartspec_py.engines.drafts.lookup import DISAGREED, HISTORY, PromptLookupProposer
from smartspec_py.engines.proposer import DraftTask

NGRAM = 3


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def add(history: History, text: list[int]) -> None:
    history.extend(Text(history, 0, 0), text)


def history_of(*texts: str, num_tokens: int = 1000) -> History:
    history = History(num_tokens, NGRAM)
    for text in texts:
        add(history, letters(text))
    return history


def found(history: History, tail: str, num: int = 4) -> tuple[str, int, bool] | None:
    """What follows the match, its length, and whether all followed it."""
    match = history.find(letters(tail), num)
    if match is None:
        return None
    return "".join(map(chr, match.tokens)), match.length, match.is_agreed


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


def test_the_oldest_tokens_are_overwritten_first() -> None:
    """A ring of 16 tokens: "abcdefg", then "ABCDEFG". The next 7 take the last 2 cells and 5 of the
    first text, so its "fg" are left, without an n-gram that a token follows."""
    history = history_of("abcdefg", "ABCDEFG", num_tokens=16)
    assert found(history, "abc") == ("defg", 3, True)
    add(history, letters("1234567"))
    assert found(history, "abc") is None
    assert found(history, "ABC") == ("DEFG", 3, True)
    assert found(history, "123") == ("4567", 3, True)
    add(history, letters("abcdefghijklmnopqrstuvwxyz"))
    assert found(history, "abc") is None
    assert found(history, "rst") == ("uvwx", 3, True)


def test_texts_that_grow_at_the_same_time() -> None:
    """Each grows by one token in turn; a match and its continuation stay in one text."""
    history = History(1000, NGRAM)
    texts = {text: Text(history, 2, 2) for text in ("ppabcdefgh", "ppABCDEFGH")}
    for end in range(3, 11):
        for text, of_text in texts.items():
            history.extend(of_text, letters(text[:end]))
    assert found(history, "XABC") == ("DEFG", 3, True)
    assert found(history, "Xabcde") == ("fgh", 5, True)
    assert found(history, "ppa") is None  # prompts are not in it


def test_equals_a_search_over_all_texts() -> None:
    """Random texts of three letters, four of which grow in turns, in a ring that is overwritten
    many times. What the latest tokens of a text have is found, and match and continuation stand in
    one of the texts."""
    rng = random.Random(5)
    history = History(400, NGRAM)
    texts = [[rng.randrange(3) for _ in range(60)] for _ in range(40)]
    num_matches = 0
    for first in range(0, 40, 4):
        group = [(text, Text(history, 0, 0)) for text in texts[first : first + 4]]
        for end in range(1, 61):
            for text, of_text in group:
                history.extend(of_text, text[:end])
        for text, _ in group:
            tail = rng.choices(range(3), k=rng.randrange(NGRAM, 12))
            match = history.find(tail, 4)
            ends = [end for end in range(NGRAM, 60) if text[end - NGRAM : end] == tail[-NGRAM:]]
            assert match is not None or not any(end > 40 for end in ends)
            if match is not None:
                num_matches += 1
                shown = [*tail[len(tail) - match.length :], *match.tokens]
                assert any(shown in windows(one, len(shown)) for one in texts[: first + 4])
    assert num_matches > 20


def windows(text: list[int], size: int) -> list[list[int]]:
    return [text[start : start + size] for start in range(len(text) - size + 1)]


def test_a_search_compares_few_cells() -> None:
    class Counted(History):
        num_compared = 0

        def _length(self, cell, tail):
            self.num_compared += 1
            return super()._length(cell, tail)

    history = Counted(1000, NGRAM)
    for _ in range(100):
        add(history, letters("abcd"))
    match = history.find(letters("abc"), 4)
    assert match is not None
    assert (match.length, match.num, match.is_agreed) == (3, MAX_CANDIDATES, True)
    assert history.num_compared == MAX_CANDIDATES


def test_a_token_takes_at_most_24_bytes() -> None:
    """Four arrays with a cell for each token, and up to two heads of chains for each."""
    for num_tokens in (1000, 1024, 1025, 1_000_000):
        assert 20 <= History(num_tokens, 2).num_bytes / num_tokens <= 24.1


def learn(proposer: PromptLookupProposer, sequence: int, text: str, scope: str) -> None:
    """As a sequence that has ended."""
    proposer.learn(sequence, letters(text), 0, scope)
    proposer.release(sequence)


def drafts(
    proposer: PromptLookupProposer, sequence: int, text: str, scope: str | None, num: int = 4
) -> str:
    """Of a running sequence with a prompt of one token."""
    tokens = letters(text)
    if scope is not None:
        proposer.learn(sequence, tokens, 1, scope)
    available = proposer.num_available(sequence, tokens)
    (draft,) = proposer.propose(
        [DraftTask(SequenceStart(sequence, tokens, 1, SamplingParams()), num)]
    )
    assert len(draft.tokens) <= available
    return "".join(map(chr, draft.tokens))


def test_a_longer_match_in_the_history_is_used() -> None:
    proposer = PromptLookupProposer(4, history_tokens=100)
    learn(proposer, 0, "abcdefgh", "s")
    assert drafts(proposer, 1, "Xabcd", "s") == "efgh"
    assert proposer.acceptance_group(1) == HISTORY + "4 tokens once"
    assert proposer.counterfactual(1, letters("Xabcd"), letters("efX")) == (3, 2)
    assert drafts(proposer, 2, "cdQcd", "s") == "QcdQ"  # 2 tokens in both: its own text
    assert drafts(proposer, 3, "bcdQbcd", "s") == "Qbcd"  # 3 in both: its own text
    assert proposer.acceptance_group(3) == "3 tokens"
    learn(proposer, 4, "Zabcde", "s")
    assert drafts(proposer, 5, "Yabcd", "s") == "e"  # no token after the end of the text
    assert proposer.acceptance_group(5) == HISTORY + "2 tokens often"
    learn(proposer, 6, "Xabcdz", "s")
    assert drafts(proposer, 7, "Yabcd", "s") == "z"
    assert proposer.acceptance_group(7) == HISTORY + DISAGREED
    assert {proposer.acceptance_group(n) for n in (1, 3, 5, 7)} <= set(
        proposer.capabilities.acceptance_groups
    )


def test_running_sequences_see_each_other() -> None:
    proposer = PromptLookupProposer(4, history_tokens=100)
    assert drafts(proposer, 1, "Pabcdef", "s") == ""
    assert drafts(proposer, 2, "Qabc", "s") == "def"
    assert drafts(proposer, 1, "Pabcdefghi", "s") == ""
    assert drafts(proposer, 2, "Qabcd", "s") == "efgh"


def test_scopes_do_not_see_each_other() -> None:
    proposer = PromptLookupProposer(4, history_tokens=100)
    learn(proposer, 0, "abcdefgh", "/anna")
    assert drafts(proposer, 6, "Xabcdefgh", "/anna") == ""  # it still runs
    assert drafts(proposer, 1, "Xabcd", "/ben") == ""
    assert drafts(proposer, 2, "Xabcd", "adapter/anna") == ""
    assert drafts(proposer, 3, "Xabcd", "/") == ""
    assert drafts(proposer, 4, "Xabcd", None) == ""
    assert drafts(proposer, 5, "Xabcd", "/anna") == "efgh"


def test_without_history_nothing_is_kept() -> None:
    proposer = PromptLookupProposer(4)
    assert not proposer.capabilities.learns_texts
    assert not any(name.startswith(HISTORY) for name in proposer.capabilities.acceptance_groups)


def test_a_new_scope_replaces_one_without_running_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two places, the one of `a` was joined last but `b` still runs. When both run, `d` gets
    none."""
    monkeypatch.setattr(lookup, "MAX_SCOPES", 2)
    proposer = PromptLookupProposer(4, history_tokens=100)
    drafts(proposer, 1, "Xabcdefgh", "b")
    learn(proposer, 2, "abcdefgh", "a")
    assert drafts(proposer, 3, "Xabcdefgh", "c") == ""
    assert drafts(proposer, 4, "Xabcd", "a") == ""
    assert drafts(proposer, 5, "Xabcdefgh", "d") == ""
    assert drafts(proposer, 6, "Xabcd", "d") == ""
    assert drafts(proposer, 7, "Xabcd", "b") == "efgh"
    assert drafts(proposer, 8, "Xabcd", "c") == "efgh"
    for sequence in range(1, 9):
        proposer.release(sequence)
    drafts(proposer, 9, "Xabcdefgh", "d")
    assert drafts(proposer, 10, "Xabcd", "d") == "efgh"
