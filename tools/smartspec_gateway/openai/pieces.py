"""Generates the choices of a request together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType

from smartspec_gateway.openai.apis.choices import FINISH_REASONS
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.model import Arrival, Fields, Model, Piece

logger = logging.getLogger("smartspec_gateway.openai")

MAX_PENDING = 64
"""Pieces that are kept for a client that reads slowly. Then the request is read no further."""

MAX_AT_ONCE = 16
"""Choices of one request that are generated at once. The others wait here."""

GUIDE = "guided_decoding_guide"

END_S = 1.0
"""Time for the streams to end after their last pieces."""


async def pieces_of(
    model: Model,
    choices: Sequence[Fields],
    grammar_field: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Arrival]:
    """The pieces of all choices as they arrive, with the number of the choice. None comes first,
    when all choices that begin at once are accepted, and later at times when nothing else comes.

    For errors: grammar_field is the field of the client's request that has the grammar. names are
    fields of chats that have another name in its API.
    Closing the iterator cancels all requests. Raises ApiError.
    """
    queue: asyncio.Queue[tuple[int, Piece | ApiError | None]] = asyncio.Queue(MAX_PENDING)
    slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(number: int, fields: Fields) -> None:
        try:
            async with slots, aclosing(model.generate(fields)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if piece and piece.finish_reason and piece.finish_reason not in FINISH_REASONS:
                        raise ApiError(503, "the server ended the request: send it again later")
                    await queue.put((number, piece))
        except ApiError as error:
            of_client = error.about(grammar_field) if error.param == GUIDE else error
            await queue.put((number, of_client.renamed(names)))
        except Exception:
            logger.exception("A choice could not be generated.")
            await queue.put((number, ApiError(500, "the endpoint failed: see its log")))

    tasks = [asyncio.create_task(run(number, one)) for number, one in enumerate(choices)]
    num_left = len(tasks)
    unaccepted = set(range(min(num_left, MAX_AT_ONCE)))
    try:
        while num_left:
            number, found = await queue.get()
            if isinstance(found, ApiError):
                raise found
            is_new = bool(unaccepted)
            unaccepted = unaccepted - {number} if found is None else set()
            if not unaccepted and (is_new or found is None):
                yield None
            if found is None:
                continue
            num_left -= bool(found.finish_reason)
            yield number, found
            if found.log_probs:
                await asyncio.sleep(0)  # pieces with many of them may wait already
        await asyncio.wait(tasks, timeout=END_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
