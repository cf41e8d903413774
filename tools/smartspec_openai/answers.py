"""Generates the choices of a request, and writes answers and chunks in OpenAI's formats."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from smartspec_openai.errors import ApiError
from smartspec_openai.triton import Model, Piece

logger = logging.getLogger("smartspec_openai")

MAX_PENDING = 64
"""Pieces that are kept for a client that reads slowly. Then the request is read no further."""

END_S = 1.0
"""Time for the streams to end after their last pieces."""

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}
"""OpenAI has no name for a deadline."""

Tensors = Mapping[str, tuple[str, Any]]


async def pieces_of(model: Model, choices: Sequence[Tensors]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all choices as they arrive, with the number of the choice.

    Closing the iterator cancels all requests. Raises ApiError.
    """
    queue: asyncio.Queue[tuple[int, Piece | ApiError]] = asyncio.Queue(MAX_PENDING)

    async def run(number: int, tensors: Tensors) -> None:
        try:
            async with aclosing(model.generate(tensors)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    await queue.put((number, piece))
        except ApiError as error:
            await queue.put((number, error))
        except Exception:
            logger.exception("A choice could not be generated.")
            await queue.put((number, ApiError(500, "the endpoint failed: see its log")))

    tasks = [asyncio.create_task(run(number, one)) for number, one in enumerate(choices)]
    num_left = len(tasks)
    try:
        while num_left:
            number, found = await queue.get()
            if isinstance(found, ApiError):
                raise found
            if found.finish_reason and found.finish_reason not in FINISH_REASONS:
                raise ApiError(503, "the server ended the request: send it again later")
            num_left -= bool(found.finish_reason)
            yield number, found
        await asyncio.wait(tasks, timeout=END_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Answer:
    """An answer in progress.

    num_texts: choices of each prompt; choice i belongs to prompt i // num_texts. echoes: text
    before each choice. shows_steps: whether chunks have counts of tokens, steps and drafts.
    """

    model: str
    is_chat: bool
    num_choices: int
    num_texts: int = 1
    echoes: Sequence[str] = ()
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    metrics: str | None = None
    shows_steps: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * self.num_choices
        self.finish_reasons = [None] * self.num_choices
        self._id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def add(self, number: int, piece: Piece) -> None:
        self.texts[number] += piece.text
        self.num_tokens += piece.num_tokens
        if piece.finish_reason:
            self.finish_reasons[number] = FINISH_REASONS[piece.finish_reason]
            if number % self.num_texts == 0:
                self.num_prompt_tokens += piece.num_prompt
            if number == 0:
                self.metrics = piece.metrics

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def whole(self) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [
            self._choice(number, self._content(number, text, "message"))
            for number, text in enumerate(self.texts)
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._document(kind, choices) | {"usage": self.usage} | self._statistics

    def chunk(self, number: int, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece that was added."""
        content = self._content(number, piece.text, "delta")
        self._begun.add(number)
        choice = self._choice(number, content)
        if self.shows_steps:
            choice["speculation"] = {
                "num_tokens": piece.num_tokens,
                "num_steps": piece.num_steps,
                "num_drafted": piece.num_drafted,
                "num_accepted": piece.num_accepted,
            }
        return self._document(self._chunk_kind, [choice])

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the token counts."""
        return self._document(self._chunk_kind, []) | {"usage": self.usage} | self._statistics

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    @property
    def _statistics(self) -> dict[str, Any]:
        """vLLM's document `speculative_decoding`, if the model sent one."""
        found: dict[str, Any] = json.loads(self.metrics or "{}")
        return found

    def _content(self, number: int, text: str, key: str) -> dict[str, Any]:
        is_first = number not in self._begun
        if not self.is_chat:
            return {"text": self.echoes[number] + text if self.echoes and is_first else text}
        role = {"role": "assistant"} if is_first else {}
        return {key: {**role, "content": text}}

    def _choice(self, number: int, content: Mapping[str, Any]) -> dict[str, Any]:
        reason = self.finish_reasons[number]
        return {"index": number, **content, "logprobs": None, "finish_reason": reason}

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }


async def events(
    answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], first: tuple[int, Piece], usage: bool
) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer. first: a piece that was already read."""
    async with aclosing(pieces):  # type: ignore[type-var]
        try:
            yield _event(_added(answer, *first))
            async for number, piece in pieces:
                yield _event(_added(answer, number, piece))
            if usage or answer.metrics is not None:
                yield _event(answer.last_chunk())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)


def _added(answer: Answer, number: int, piece: Piece) -> dict[str, Any]:
    answer.add(number, piece)
    return answer.chunk(number, piece)


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
