"""The answer to a request that the end of the gateway finds without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from smartspec_gateway.guard import RETRY_AFTER, BoundedApp, Message, Send
from smartspec_gateway.limits import Limits

SCOPE: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def received() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def sent_when_cancelled(starts: bool) -> list[Message]:
    """What is sent when uvicorn cancels a request, before or after its status."""
    sent: list[Message] = []
    is_begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if starts:
            await send(dict(START))
        is_begun.set()
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    limits = Limits(512)
    task = asyncio.create_task(BoundedApp(app, limits)(SCOPE, received, send))
    await is_begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() == starts  # uvicorn then closes the connection of a part of an answer
    assert limits.held_bytes == 0
    return sent


def test_a_request_without_an_answer_is_refused() -> None:
    status, body = asyncio.run(sent_when_cancelled(starts=False))
    assert status["status"] == 503
    assert RETRY_AFTER in status["headers"]
    assert "the server ended" in json.loads(body["body"])["error"]


def test_a_begun_answer_gets_no_second_one() -> None:
    (status,) = asyncio.run(sent_when_cancelled(starts=True))
    assert status["status"] == 200


@pytest.mark.parametrize(
    ("limits", "headers", "status"),
    [
        (Limits(), [], 503),
        (Limits(512, is_draining=True), [], 503),
        (Limits(512), [(b"content-encoding", b"gzip")], 415),
    ],
    ids=["starting", "draining", "wrong"],
)
def test_a_refusal_says_if_it_ends_by_itself(limits: Limits, headers: Any, status: int) -> None:
    sent: list[Message] = []

    async def app(*_: Any) -> None:
        raise AssertionError

    async def body() -> Message:
        return await received() | {"more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(BoundedApp(app, limits)({**SCOPE, "headers": headers}, body, send))
    assert sent[0]["status"] == status
    assert (RETRY_AFTER in sent[0]["headers"]) == (status == 503)
