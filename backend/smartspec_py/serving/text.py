"""Decodes tokens to text in pieces, without partial characters or stop words.

Pure: no I/O, no clock, no thread. The responder has one `TextStream` per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"
"""A decoder's replacement for bytes that are not yet a complete character."""


class TextStream:
    """Text of one request. `push` adds a token, `take` returns text that may be sent.

    Text is held back while it may be the start of a stop word, or while its last bytes are not a
    complete character. Stop words are not searched in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_words: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_words = tuple(stop_words)
        self._num_unwatched = min_tokens
        self._cleared = ""
        # The prompt is the decoder's context, because some tokenizers drop the space of a first
        # token. It is left out if it ends with an unfinished character, because the decoder would
        # return that character as generated text.
        is_whole = not tokenizer.decode(list(prompt)).endswith(UNFINISHED)
        self._decoder = DecodeStream(ids=list(prompt) if is_whole else [], skip_special_tokens=True)
        self._undecoded: list[int] = []
        self._text = ""
        self.is_stopped = False

    def push(self, token: int) -> None:
        """Add a token. Sets `is_stopped` if it completes a stop word."""
        assert not self.is_stopped, "nothing follows a stop word"
        is_watched = self._num_unwatched == 0
        self._num_unwatched = max(0, self._num_unwatched - 1)
        self._undecoded.append(token)
        piece = self._decode(token)
        if piece is None:
            return
        self._undecoded.clear()
        if not is_watched:
            self._cleared += piece
            return
        self._text += piece
        found = [self._text.find(word) for word in self._stop_words if word in self._text]
        if found:
            self._text = self._text[: min(found)]
            self.is_stopped = True

    def _decode(self, token: int) -> str | None:
        """The text that the token completes. None while its last character is unfinished.

        The library's decoder raises an error if text follows bytes that are not a valid character.
        Models with byte fallback can generate such tokens. They are then decoded directly.
        """
        try:
            return self._decoder.step(self._tokenizer, token)
        except Exception:
            self._decoder = DecodeStream(ids=[token], skip_special_tokens=True)
            return self._tokenizer.decode(self._undecoded, skip_special_tokens=True)

    def take(self) -> str:
        """Text that can be sent now. Each part is returned only once."""
        keep = 0 if self.is_stopped else self._num_held_back()
        cut = len(self._text) - keep
        piece, self._text = self._cleared + self._text[:cut], self._text[cut:]
        self._cleared = ""
        return piece

    def finish(self) -> str:
        """All remaining text after the last token. An unfinished character becomes U+FFFD."""
        piece, self._text, self._cleared = self._cleared + self._text, "", ""
        if self._undecoded and not self.is_stopped:
            piece += self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
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
