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
        ([*EURO[:2], *letters("ab")], ["", "", "\ufffda", "b", ""]),
        # special tokens are no text
        ([*letters("a"), END, *letters("b"), END], ["a", "", "b", "", ""]),
    ],
)
def test_characters_come_whole(tokens: list[int], expected: list[str]) -> None:
    assert pieces(tokens) == expected


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
        # a special token written out in ordinary text
        ("a<|end|>", ("<|end|>",), 0, ["a", *[""] * 8]),
        # the one that is complete first wins, also over a longer one that has begun
        ("abcd", ("abcd", "bc"), 0, ["", "", "a", ""]),
        # a stop word at once leaves no text
        ("ab", ("a",), 0, ["", ""]),
        # of two of the same stop word, the second counts: the first ends within the first 2 tokens
        ("abcab", ("ab",), 2, ["", "ab", "c", "", "", ""]),
        # a stop word may begin there, if it ends after them
        ("abcabc", ("abc",), 1, ["", "", "", ""]),
        # the last of several that overlap
        ("aaa", ("aa",), 2, ["", "a", "", ""]),
        # more than there will ever be
        ("abab", ("ab",), 9, ["", "ab", "", "ab", ""]),
    ],
)
def test_a_stop_word_that_ends_within_the_first_min_tokens_is_ignored(
    text: str, stop_words: tuple[str, ...], min_tokens: int, handed_out: list[str]
) -> None:
    assert pieces(letters(text), stop_words=stop_words, min_tokens=min_tokens) == handed_out


any_tokens = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30)
byte_tokens = st.lists(st.integers(1, 256), max_size=12)


@settings(max_examples=30, deadline=None)
@given(
    any_tokens | byte_tokens, st.text(min_size=1, max_size=8).filter(lambda t: t[-1] != "\ufffd")
)
def test_the_pieces_are_the_text(tokens: list[int], prompt: str) -> None:
    """Whatever the tokens, invalid UTF-8 included: streaming shows what decoding at once shows."""
    assert "".join(pieces(tokens, prompt)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(max_examples=30, deadline=None)
@given(
    st.text("abc€", max_size=20),
    st.lists(st.text("abc€", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_stop_words_of_any_text(text: str, stop_words: list[str], min_tokens: int) -> None:
    """The text is cut before the longest of the stop words that end first, and after min_tokens
    tokens. Each byte is a token."""
    ends = [e for e in range(1, len(text) + 1) if len(text[:e].encode()) > min_tokens]
    found = [(e, e - len(word)) for e in ends for word in stop_words if text[:e].endswith(word)]
    tokens = [token for char in text for token in tokens_of(char)]
    whole = "".join(pieces(tokens, stop_words=tuple(stop_words), min_tokens=min_tokens))
    assert whole == text[: min(found, default=(0, len(text)))[1]]


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
