"""Tokens to text: characters are never cut, stop words never shown, and nothing is lost."""

import pytest
from harness import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from smartspec_py.serving.text import MAX_UNDECODED, TextStream

END = 0
"""The tokenizer's special token, which is no text."""


def pieces(
    tokens: list[int], prompt: str = "x", stop_words: tuple[str, ...] = (), min_tokens: int = 0
) -> list[str]:
    """What is handed out after each token up to a stop word, and at the end."""
    stream = TextStream(TOKENIZER, TOKENIZER.encode(prompt).ids, stop_words, min_tokens)
    found = []
    for token in tokens:
        stream.push(token)
        found.append(stream.take())
        if stream.is_stopped:
            break
    return [*found, stream.finish()]


def letters(text: str) -> list[int]:
    """One token a byte: the vocabulary begins with the special token and the bytes."""
    vocab = TOKENIZER.get_vocab()
    return [vocab[char] for char in text]


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


EURO = tokens_of("€")
"""Three tokens, one for each byte."""


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # a character comes whole; a part of one becomes one replacement
        ([*letters("a"), *EURO, *letters("b")], ["a", "", "", "€", "b", ""]),
        ([*letters("a"), *EURO[:2]], ["a", "", "", "\ufffd"]),
        # special tokens are no text
        ([*letters("a"), END, *letters("b"), END], ["a", "", "b", "", ""]),
    ],
)
def test_characters_come_whole(tokens: list[int], expected: list[str]) -> None:
    assert pieces(tokens) == expected


def test_bytes_that_are_no_character_are_replaced_and_the_rest_goes_on() -> None:
    assert "".join(pieces([*EURO[:2], *letters("ab")])) == "\ufffdab"


def test_a_special_token_written_out_is_a_stop_word() -> None:
    """Its characters as tokens of ordinary text."""
    assert "".join(pieces(letters("a<|end|>"), stop_words=("<|end|>",))) == "a"


@pytest.mark.parametrize("token", [END, 129])
def test_tokens_without_text_are_not_decoded_again_and_again(token: int) -> None:
    """A special token, and a byte that is no character. The library decodes all pending tokens at
    each step, so there may be only a few."""
    stream = TextStream(TOKENIZER, tokens_of("x"))
    most = 0
    for _ in range(300):
        stream.push(token)
        most = max(most, len(stream._undecoded))
    assert most <= MAX_UNDECODED
    stream.push(letters("a")[0])
    assert (stream.take() + stream.finish()).strip("\ufffd") == "a"


@pytest.mark.parametrize("prompt", ["plain", "ends with a space ", "ends with \ufffd", "€", "\n"])
def test_the_prompt_is_context_and_no_text(prompt: str) -> None:
    """Also where the prompt itself ends with U+FFFD, which looks like half a character."""
    assert "".join(pieces(tokens_of(" hello"), prompt)) == " hello"


@pytest.mark.parametrize(
    ("text", "stop_words", "min_tokens", "handed_out"),
    [
        # `b` may begin `bc`: held back until `x` decides
        ("abx", ("bc",), 0, ["a", "", "bx", ""]),
        # the stop word across two tokens is never shown
        ("abcd", ("bc",), 0, ["a", "", "", ""]),
        # the longest possible beginning is held back: in `aab`, `aa` and not only `a`
        ("aaab", ("aab",), 0, ["", "", "a", "", ""]),
        # held back text comes when no more tokens do
        ("ab", ("bc",), 0, ["a", "", "b"]),
        # the one that is complete first wins, also over a longer one that has begun
        ("abcd", ("abcd", "bc"), 0, ["", "", "a", ""]),
        # a stop word at once leaves no text
        ("ab", ("a",), 0, ["", ""]),
        # of two of the same stop word, the second counts: the first ends within the first 2 tokens
        ("abcab", ("ab",), 2, ["", "ab", "c", "", "", ""]),
        # a stop word may begin there, if it ends after them
        ("abcabc", ("abc",), 1, ["", "", "", ""]),
        ("abcabc", ("bc",), 2, ["a", "", "", ""]),
        ("aab", ("aab",), 3, ["", "", "aab", ""]),
        ("aabaab", ("aab",), 3, ["", "", "aab", "", "", "", ""]),
        # the last of several that overlap
        ("aaa", ("aa",), 2, ["", "a", "", ""]),
        # exactly behind them
        ("xab", ("ab",), 1, ["x", "", "", ""]),
        # more than there will ever be
        ("abab", ("ab",), 9, ["", "ab", "", "ab", ""]),
        ("ab", ("ab",), 0, ["", "", ""]),
    ],
)
def test_a_stop_word_that_ends_within_the_first_min_tokens_is_ignored(
    text: str, stop_words: tuple[str, ...], min_tokens: int, handed_out: list[str]
) -> None:
    assert pieces(letters(text), stop_words=stop_words, min_tokens=min_tokens) == handed_out


def test_a_character_begun_among_the_first_tokens_is_watched_when_it_is_whole() -> None:
    """The euro sign has three tokens, two of them among the first two: the third completes it, and
    is watched. So with `€` as a stop word it stops there; with all three among them it does not."""
    for min_tokens, shown in ((2, "a"), (3, "a"), (4, "a€b")):
        tokens = [*letters("a"), *tokens_of("€"), *letters("b")]
        found = pieces(tokens, stop_words=("€",), min_tokens=min_tokens)
        assert "".join(found) == shown


def test_a_stop_word_within_one_token_cuts_it() -> None:
    """`hel` is one token: with the stop word `e` the text is `h`."""
    assert tokens_of("hello")[0] == TOKENIZER.get_vocab()["hel"]
    assert pieces(tokens_of("hello"), stop_words=("e",)) == ["h", ""]


any_tokens = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30)
byte_tokens = st.lists(st.integers(1, 256), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    any_tokens | byte_tokens, st.text(min_size=1, max_size=8).filter(lambda t: t[-1] != "\ufffd")
)
def test_the_pieces_are_the_text(tokens: list[int], prompt: str) -> None:
    """Whatever the tokens, invalid UTF-8 included: streaming shows what decoding at once shows."""
    assert "".join(pieces(tokens, prompt)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(max_examples=60, deadline=None)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_min_tokens_of_any_text(text: str, stop_words: list[str], min_tokens: int) -> None:
    """A token per letter: the text is cut before the longest of the stop words that end first."""
    ends = range(min_tokens + 1, len(text) + 1)
    found = [(e, e - len(word)) for e in ends for word in stop_words if text[:e].endswith(word)]
    whole = "".join(pieces(letters(text), stop_words=tuple(stop_words), min_tokens=min_tokens))
    assert whole == text[: min(found, default=(0, len(text)))[1]]


@settings(max_examples=60, deadline=None)
@given(
    st.text("abc€", max_size=20),
    st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_stop_word_is_ever_shown(text: str, stop_words: list[str]) -> None:
    """Byte by byte: the text before whatever stop word is complete first, however it is cut."""
    ends = [text.find(word) + len(word) for word in stop_words if word in text]
    stop = min(ends, default=len(text))
    starts = [text[:stop].find(word) for word in stop_words if word in text[:stop]]
    tokens = [token for char in text for token in tokens_of(char)]
    found = pieces(tokens, stop_words=tuple(stop_words))
    assert "".join(found) == text[: min(starts, default=stop)]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama-2's: bytes without a word of their own are tokens <0xNN>; ids 0..255, then words."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"▁hello": 256, "▁there": 257}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([257, 0x0A, 256], " there\n hello"),
        # A newline, the first byte of a longer character, and then a word: the byte is nothing.
        ([0x0A, 0xF0, 256], "\n\ufffd hello"),
        ([257, 0xC3, 257, 257], " there\ufffd there there"),
        ([0xC3, 0xA9, 256], "é hello"),
    ],
)
def test_bytes_that_are_no_character_do_not_end_the_text(tokens: list[int], text: str) -> None:
    """Text goes on behind them; nothing raises, as the library's own decoder does there."""
    stream = TextStream(byte_fallback_tokenizer(), [256], ["never"])
    for token in tokens:
        stream.push(token)
    found = stream.take() + stream.finish()
    assert found.replace("\ufffd", "").split() == text.replace("\ufffd", "").split()
    assert "hello" in found or "there" in found
