"""Decodes tokens to text in pieces, without partial characters or stop words.

Pure: no I/O, no clock, no thread. The responder has one `TextStream` per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"
"""A decoder's replacement for bytes that are not yet a complete character."""

NUM_CONTEXT = 64
"""Last tokens of the prompt that the decoder knows."""

MAX_UNDECODED = 32
"""More tokens without a complete character are decoded as they are. The library would decode all of
them again with each new token."""


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that are no text, such as end tokens, with their names."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token: entry.content for token, entry in added if entry.special}


class TextStream:
    """Text of one request. `push` adds a token, `take` returns text that may be sent.

    Text is held back while it may be the start of a stop word, or while its last bytes are not a
    complete character. Special tokens are no text. A stop word that ends within the first
    `min_tokens` tokens is ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_words: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._stop_words = stop_words
        self._num_unwatched = min_tokens
        # The prompt is the decoder's context, because some tokenizers drop the space of a first
        # token. It is left out if it ends with an unfinished character, because the decoder would
        # return that character as generated text.
        context = [token for token in prompt[-NUM_CONTEXT:] if token not in self._special]
        is_whole = not tokenizer.decode(context).endswith(UNFINISHED)
        self._decoder = DecodeStream(ids=context if is_whole else [], skip_special_tokens=True)
        self._undecoded: list[int] = []
        self._text = ""
        self.is_stopped = False

    def push(self, token: int) -> None:
        """Add a token. Sets `is_stopped` if it completes a stop word."""
        assert not self.is_stopped, "nothing follows a stop word"
        is_watched = self._num_unwatched == 0
        self._num_unwatched = max(0, self._num_unwatched - 1)
        piece = "" if token in self._special else self._decode(token)
        num_before = len(self._text)
        self._text += piece
        if not is_watched or not piece:
            return
        starts = [
            self._text.find(word, max(0, num_before - len(word) + 1)) for word in self._stop_words
        ]
        if cuts := [start for start in starts if start >= 0]:
            self._text = self._text[: min(cuts)]
            self.is_stopped = True

    def _decode(self, token: int) -> str:
        """The text that the token completes; empty while its last character is unfinished.

        The library's decoder raises an error if text follows bytes that are not a valid character.
        Models with byte fallback can generate such tokens. They are then decoded directly.
        """
        self._undecoded.append(token)
        is_valid = len(self._undecoded) <= MAX_UNDECODED
        piece = None
        if is_valid:
            try:
                piece = self._decoder.step(self._tokenizer, token)
            except BaseException:  # panics of the library too
                is_valid = False
        if not is_valid:
            self._decoder = DecodeStream(ids=[token], skip_special_tokens=True)
            piece = self._tokenizer.decode(self._undecoded)
        if piece is None:
            return ""
        self._undecoded.clear()
        return str(piece)

    def take(self) -> str:
        """Text that can be sent now. Each part is returned only once."""
        keep = 0 if self.is_stopped else self._num_held_back()
        cut = len(self._text) - keep
        piece, self._text = self._text[:cut], self._text[cut:]
        return piece

    def finish(self) -> str:
        """All remaining text after the last token. An unfinished character becomes U+FFFD."""
        piece, self._text = self._text, ""
        if self._undecoded and not self.is_stopped:
            piece += self._tokenizer.decode(self._undecoded)
            self._undecoded.clear()
        return piece

    def _num_held_back(self) -> int:
        """Number of characters at the end that may be the start of a stop word."""
        longest = max((len(word) for word in self._stop_words), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(word.startswith(tail) for word in self._stop_words):
                return length
        return 0
