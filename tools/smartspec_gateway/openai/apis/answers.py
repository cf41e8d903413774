"""What the writers of chats and of completions share: answers of choices, in OpenAI's format."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from smartspec_gateway.openai.apis.choices import Choice, Prepared
from smartspec_gateway.openai.apis.writer import DONE, Count, Event, Writer, new_id
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import TokenBytes
from smartspec_gateway.openai.model import Piece


class ChoicesWriter(Writer):
    """An answer of choices in progress."""

    after_last = DONE
    id_prefix: ClassVar[str]
    type: ClassVar[str]
    chunk_type: ClassVar[str]
    """The field `object` of a whole answer, and of a chunk."""

    def __init__(self, found: Prepared, token_bytes: TokenBytes, count: Count) -> None:
        """token_bytes: of a token in the middle of a text. Choice i belongs to prompt i // n."""
        self._asked, self._token_bytes = found.wanted, token_bytes
        choices = [
            self._new_choice(found, prompt)
            for prompt in range(len(found.num_prompt))
            for _ in range(found.wanted.n)
        ]
        super().__init__(found, choices, count)
        self._head = {
            "id": new_id(self.id_prefix),
            "object": self.type,
            "created": int(time.time()),
            "model": found.model,
        }
        chunk = self._head | {"object": self.chunk_type}
        self._chunk_head = f"data: {json.dumps(chunk)[:-1]}, "

    @abstractmethod
    def _new_choice(self, found: Prepared, prompt: int) -> Choice:
        """prompt: its number."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The choice of an answer that is not streamed, without its index."""

    @abstractmethod
    def _chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """What is new in the choice."""

    def _hold(self, number: int, piece: Piece) -> None:
        self._add(number, piece)

    async def _document(self) -> dict[str, Any]:
        choices = [
            {"index": number, **self._whole(choice)} for number, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, **await self._totals()}

    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]:
        chunks = self._chunks(self._add(number, piece))
        if chunks and self._asked.shows_steps:
            chunks[-1]["speculation"] = self._step(piece)
        for chunk in chunks:
            yield {"choices": [{"index": number, **chunk}], **self._usage_so_far()}

    def _beginning(self, event: Event) -> str:
        """What all chunks have is made once."""
        return self._chunk_head if "choices" in event else "data: {"

    async def _last_events(self) -> list[Event]:
        """The token counts and statistics, if they are wanted."""
        is_wanted = self._asked.includes_usage or self._metrics
        return [{"choices": [], **await self._totals()}] if is_wanted else []

    def _failed(self, error: ApiError) -> list[Event]:
        return [error.body]

    def _usage_so_far(self) -> dict[str, Any]:
        """As far as a chunk has them. Where only the last one does, the others have null."""
        if self._asked.streams_usage:
            return {"usage": self._counts("prompt", "completion")}
        return {"usage": None} if self._asked.includes_usage else {}

    async def _totals(self) -> dict[str, Any]:
        return {"usage": await self._usage("prompt", "completion"), **self._statistics()}

    def _step(self, piece: Piece) -> dict[str, Any]:
        texts = [self._token_bytes(token).decode(errors="replace") for token in piece.output_ids]
        return {
            "num_tokens": piece.num_output_tokens,
            "num_steps": piece.num_steps,
            "num_drafted": piece.total_draft_tokens,
            "num_accepted": piece.total_accepted_draft_tokens,
            "proposer": piece.proposer or None,
            "tokens": texts,
        }
