"""Tokens to text, a piece at a time: no cut characters, no stop words.

Pure: no I/O, no clock, no thread. The responder keeps one for every request.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"
"""What a decoder shows for bytes that are not yet a character."""


class TextStream:
    """Text of one request. `push` takes a token, `take` hands out what may be sent.

    Text is held back while it may still become a stop word, and while its last bytes are not yet
    a whole character. Text of the first `min_tokens` tokens is no part of a stop word.
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
        # The prompt is the decoder's context: some tokenizers drop the space of a first token. An
        # unfinished character at its end would be taken for text that is still to come.
        is_whole = not tokenizer.decode(list(prompt)).endswith(UNFINISHED)
        self._decoder = DecodeStream(ids=list(prompt) if is_whole else [], skip_special_tokens=True)
        self._undecoded: list[int] = []
        self._text = ""
        self.is_stopped = False

    def push(self, token: int) -> None:
        """Add a token; sets `is_stopped` when it completes a stop word."""
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
        """The text that the token completes; None while its last character is unfinished.

        The library's decoder gives up where bytes that are no character are followed by text, as
        tokenizers with byte fallback can emit them. What it held is then decoded as it stands.
        """
        try:
            return self._decoder.step(self._tokenizer, token)
        except Exception:
            self._decoder = DecodeStream(ids=[token], skip_special_tokens=True)
            return self._tokenizer.decode(self._undecoded, skip_special_tokens=True)

    def take(self) -> str:
        """Text that can be sent now; it is handed out once."""
        keep = 0 if self.is_stopped else self._num_held_back()
        cut = len(self._text) - keep
        piece, self._text = self._cleared + self._text[:cut], self._text[cut:]
        self._cleared = ""
        return piece

    def finish(self) -> str:
        """All that is left when no more tokens come; an unfinished character becomes U+FFFD."""
        piece, self._text, self._cleared = self._cleared + self._text, "", ""
        if self._undecoded and not self.is_stopped:
            piece += self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
            self._undecoded.clear()
        return piece

    def _num_held_back(self) -> int:
        """Characters at the end that are a proper beginning of a stop word."""
        longest = max((len(word) for word in self._stop_words), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(word.startswith(tail) for word in self._stop_words):
                return length
        return 0
