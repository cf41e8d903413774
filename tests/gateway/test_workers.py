"""Work on large bodies: in processes that can be ended, while others have their turn."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from smartspec_gateway import grpc_front, workers
from smartspec_gateway.limits import Limits, Refused
from smartspec_gateway.openai.apis.choices import Prepared
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.workers import LONG, SHORT, Workers
from smartspec_launch.address import free_address
from smartspec_launch.gateway import OpenAi, as_json

pytestmark = pytest.mark.slow

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
CONTEXT_LEN = 131_072
TEXT = "so it goes, " * 6000


def here(kind: str, body: bytes, context_len: int) -> Any:
    pytest.fail("a large body is not processed in this process")


@asynccontextmanager
async def made() -> AsyncIterator[Workers]:
    found = Workers(Limits(CONTEXT_LEN), as_json(free_address(), OpenAi(1, TOKENIZER)))
    try:
        yield found
    finally:
        await found.close()


MESSAGES = [{"role": "user", "content": TEXT}]
TOKENS = [300 + i % 50 for i in range(20_000)]
LARGE: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 128, "max_tokens": 9}, "choices"),
    ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 9}, "own"),
    ("/v1/completions", {"prompt": TOKENS, "n": 128, "max_tokens": 9}, "choices"),
    ("/v1/responses", {"input": TEXT, "metadata": {"a": TEXT}, "max_output_tokens": 9}, "own"),
    ("/v1/responses/input_tokens", {"input": TEXT}, "input_tokens"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "stop_sequences": ["a"]}, "own"),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}, "input_tokens"),
    ("/tokenize", {"prompt": TEXT, "return_token_strs": True}, "token_strs"),
    ("/tokenize", {"messages": MESSAGES}, "tokens"),
    ("/detokenize", {"tokens": TOKENS}, "prompt"),
    ("generate", {"text_input": TEXT, "max_tokens": 1}, "text_input"),
    ("generate_stream", {"text_input": "", "input_ids": TOKENS, "max_tokens": 1}, "input_ids"),
]


def test_large_bodies_of_all_routes_are_processed_elsewhere() -> None:
    """Meanwhile, the event loop has turns. What comes back is what a short body would give."""

    async def run() -> None:
        async with made() as found:
            for kind, body, name in LARGE:
                num_turns = 0
                sent = json.dumps(body).encode()
                assert len(sent) > LONG
                asked = asyncio.create_task(found.run(here, kind, sent))
                while not asked.done():
                    num_turns += 1
                    await asyncio.sleep(0)
                assert num_turns > len(sent) // workers.SLICE
                result = asked.result()
                if isinstance(result, Prepared):
                    assert getattr(result, name)
                    tokens = result.choices[0]["input_ids"]
                    assert json.loads(tokens.json) == tokens
                    assert all(one["input_ids"] is tokens for one in result.choices)
                else:
                    assert json.loads(result)[name]

    asyncio.run(run())


WRONG: list[tuple[str, bytes, type[Exception], str]] = [
    (
        "/v1/chat/completions",
        json.dumps({"messages": MESSAGES, "n": 0}).encode(),
        ApiError,
        "n: got 0",
    ),
    ("/v1/chat/completions", b'{"messages":' + b"[" * LONG, ApiError, "not valid JSON"),
    ("generate", b'{"a":' * LONG, Refused, "nested so deep"),
    (
        "generate",
        json.dumps({"text_input": TEXT, "x": 1}).encode(),
        Refused,
        "unknown parameter 'x'",
    ),
    ("grpc", b"\xff" * (LONG + 1), Refused, "must be a ModelInferRequest"),
]


def test_errors_come_back_as_they_are() -> None:
    async def run() -> None:
        async with made() as found:
            for kind, body, error, message in WRONG:
                with pytest.raises(error, match=message) as raised:
                    await found.run(here, kind, body)
                assert raised.value.status == 400  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_process_that_ends_is_an_error_of_one_request() -> None:
    """As one does that works for too long. The next request has a new one."""
    body = json.dumps({"text_input": TEXT, "max_tokens": 1}).encode()

    async def run() -> None:
        async with made() as found:
            await found.run(here, "generate", body)
            used = next(each for each in found._all if each._running is not None)
            assert used._running is not None
            os.kill(used._running.pid, signal.SIGSTOP)
            asked = asyncio.create_task(found.run(here, "generate", body))
            await asyncio.sleep(0)  # it has the process
            other = await found.run(here, "generate", body)
            os.kill(used._running.pid, signal.SIGKILL)
            with pytest.raises(Refused, match="takes more than 60 s or too much memory"):
                await asked
            for _ in range(workers.MAX_PROCESSES):
                assert await found.run(here, "generate", body) == other

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "reason"),
    [("/bin/false", "it ended with code 1"), ("/nowhere", "No such file or directory")],
)
def test_a_process_that_does_not_start_is_an_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    """The next request tries again."""

    async def run() -> None:
        async with made() as found:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "executable", program)
                for _ in range(workers.MAX_PROCESSES):
                    with pytest.raises(Refused, match=f"does not start: {reason}") as raised:
                        await found.run(here, grpc_front.KIND, b"\xff" * (LONG + 1))
                    assert raised.value.status in grpc_front.CODES
                    assert raised.value.status == 500
            with pytest.raises(Refused, match="must be a ModelInferRequest"):
                await found.run(here, grpc_front.KIND, b"\xff" * (LONG + 1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("exit 1", 500, "the process for large requests failed"),
        ("exec sleep 60 <&- >&-", 500, "the process for large requests failed"),
        ("kill -s ALRM $$", 400, "takes more than 60 s or too much memory"),
        ("cat {}; cat > /dev/null", 400, "takes more than 60 s or too much memory"),
    ],
)
def test_an_error_of_a_process_is_not_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, status: int, message: str
) -> None:
    """The second program goes on without its pipes, the last one returns a MemoryError."""
    if "sleep" in program:
        monkeypatch.setattr(workers, "END_S", 0.1)
    error = pickle.dumps((False, MemoryError()))
    result, script = tmp_path / "result", tmp_path / "worker"
    result.write_bytes(len(error).to_bytes(workers.SIZE_BYTES) + error)
    script.write_text(f"#!/bin/sh\nprintf r; read line; {program.format(result)}")
    script.chmod(0o700)

    async def run() -> None:
        async with made() as found:
            monkeypatch.setattr(sys, "executable", str(script))
            with pytest.raises(Refused, match=message) as raised:
                await found.run(here, "generate", b" " * (LONG + 1))
            assert raised.value.status == status

    asyncio.run(run())


def test_a_process_that_ends_between_requests_is_started_again() -> None:
    """As the system ends one when memory is short."""
    body = json.dumps({"text_input": TEXT, "max_tokens": 1}).encode()

    async def run() -> None:
        async with made() as found:
            first = await found.run(here, "generate", body)
            used = next(each for each in found._all if each._running is not None)
            assert used._running is not None
            used._running.kill()
            await used._running.wait()
            for _ in range(workers.MAX_PROCESSES):
                assert await found.run(here, "generate", body) == first

    asyncio.run(run())


def test_an_error_after_its_caller_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with made() as found:
            asked = asyncio.create_task(found.run(here, "generate", b" " * (LONG + 1)))
            while not found._working:
                await asyncio.sleep(0)
            (working,) = found._working
            asked.cancel()
            await asyncio.wait([asked, working])

    asyncio.run(run())
    gc.collect()
    assert not caplog.records


def test_a_caller_that_leaves_keeps_its_process() -> None:
    """It may leave while the process starts: one that asks again and again would otherwise never
    get one."""
    body = json.dumps({"text_input": TEXT, "max_tokens": 1}).encode()

    async def run() -> None:
        async with made() as found:
            asked = [asyncio.create_task(found.run(here, "generate", body)) for _ in range(3)]
            while not all(each._running for each in found._all):
                await asyncio.sleep(0.01)
            used = [each._running for each in found._all]
            for one in asked:
                one.cancel()
            await asyncio.wait(asked)
            await asyncio.gather(*(found.run(here, "generate", body) for _ in used))
            assert [each._running for each in found._all] == used

    asyncio.run(run())


def test_a_process_ends_with_the_gateway() -> None:
    async def run() -> int:
        async with made() as found:
            await found.run(here, "generate", b" " * LONG + b'{"text_input": "a", "max_tokens": 1}')
            used = next(each for each in found._all if each._running is not None)
            assert used._running is not None
            assert used._running.stdin is not None
            used._running.stdin.close()
            return await used._running.wait()

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("size", [1, SHORT, SHORT + 1, LONG])
def test_short_bodies_stay_here(size: int) -> None:
    async def run() -> Any:
        async with made() as found:
            return await found.run(lambda kind, body, context_len: len(body), "x", b" " * size)

    assert asyncio.run(run()) == size


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_many_tensors_are_counted_before_they_are_read(name: str) -> None:
    request = service_pb2.ModelInferRequest()
    for _ in range(grpc_front.MAX_TENSORS + 1):
        getattr(request, name).add()
    with pytest.raises(Refused, match="got 257 tensors, must have at most 256"):
        grpc_front.checked(grpc_front.KIND, request.SerializeToString(), 512)
