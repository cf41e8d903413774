"""Work on requests beside the event loop: in a thread, or for a large body in a process.

A thread does not suffice for a large body. A call of a library can hold Python's lock from its
beginning to its end, and then nothing else runs. A process can also be ended.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from smartspec_gateway.limits import Limits, Refused

Work = Callable[[str, bytes, int], Any]
"""From its kind, a body and the context length to the result, which can be pickled."""

SHORT = 4096
"""Bytes of a body that is processed at once. A thread would cost more than the work."""

LONG = 64 * 1024
"""Bytes of a body that a thread processes: no call takes more than about 20 ms."""

MAX_PROCESSES = 2
"""They start when they are needed. Other large bodies wait."""

WORK_S = 60
"""Time limit of a process for one body."""

END_S = 5
"""Time in which a process that has closed its pipes ends by itself."""

MAX_PROCESS_BYTES = 4 << 30
SLICE = 256 * 1024
"""Bytes that are written to a process, or read from it, at once."""

READY = b"r"
"""What a process writes when it has started, before its results."""

SIZE_BYTES = 8
_TOO_LONG = f"the request takes more than {WORK_S} s or too much memory: send a shorter one"

_FAILED = "the process for large requests failed: see the gateway's log"


class Workers:
    """At most MAX_PROCESSES processes. Use within one event loop, and `close` it."""

    def __init__(self, limits: Limits, argument: str | None = None) -> None:
        """argument: of the processes, see `worker`; None uses threads in their place."""
        self._limits, self._argument = limits, argument
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._all = [_Process(argument) for _ in range(MAX_PROCESSES)] if argument else []
        for process in self._all:
            self._idle.put_nowait(process)
        self._working: dict[asyncio.Task[Any], _Process] = {}

    async def run(self, work: Work, kind: str, body: bytes) -> Any:
        """The result of the work. Raises what it raises, and Refused if it takes too long or no
        process starts. Work of a process goes on if the caller is cancelled: a new process would
        need seconds to start."""
        context_len = self._limits.context_len
        if len(body) <= SHORT:
            return work(kind, body, context_len)
        if len(body) <= LONG or self._argument is None:
            return await asyncio.to_thread(work, kind, body, context_len)
        process = await self._idle.get()
        working = asyncio.create_task(process.run(kind, body, context_len))
        self._working[working] = process
        working.add_done_callback(self._end)
        return await asyncio.shield(working)

    def _end(self, working: asyncio.Task[Any]) -> None:
        self._idle.put_nowait(self._working.pop(working))
        if not working.cancelled():
            working.exception()  # asyncio would log that of a caller that has left

    async def close(self) -> None:
        for working in self._working:
            working.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        for process in self._all:
            await process.kill()


class _Process:
    """A process that is started again if it has ended."""

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._running: asyncio.subprocess.Process | None = None

    async def run(self, kind: str, body: bytes, context_len: int) -> Any:
        header = {"kind": kind, "size": len(body), "context_len": context_len}
        try:
            if self._running is None or self._running.returncode is not None:
                await self._start()
            is_good, result = pickle.loads(await self._answer(header, body))
        except (OSError, asyncio.IncompleteReadError):
            raise await self._why_ended() from None
        except BaseException:  # its next answer would be that to this request
            await self.kill()
            raise
        if isinstance(result, MemoryError):
            raise Refused(400, _TOO_LONG)
        if not is_good:
            raise result
        return result

    async def _why_ended(self) -> Refused:
        """Its time limit, or the system when memory is short, ends the process by a signal. An
        error of Python ends it with a code, and is in the log."""
        assert self._running is not None
        try:
            code = await asyncio.wait_for(self._running.wait(), END_S)
        except TimeoutError:
            code = 1
        await self.kill()
        return Refused(500, _FAILED) if code > 0 else Refused(400, _TOO_LONG)

    async def _start(self) -> None:
        """Raises Refused if it does not start. What it says of this is in the log."""
        cannot = "a process for large requests does not start"
        try:
            running = self._running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "smartspec_gateway.worker", self._argument),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise Refused(500, f"{cannot}: {error.strerror}") from None
        assert running.stdout is not None
        try:
            await running.stdout.readexactly(len(READY))
        except asyncio.IncompleteReadError:
            code = await running.wait()
            raise Refused(500, f"{cannot}: it ended with code {code}") from None

    async def _answer(self, header: dict[str, Any], body: bytes) -> bytes:
        running = self._running
        assert running is not None
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps(header).encode() + b"\n")
        for at in range(0, len(body), SLICE):
            running.stdin.write(body[at : at + SLICE])
            await running.stdin.drain()
        num_left = int.from_bytes(await running.stdout.readexactly(SIZE_BYTES))
        parts = []
        while num_left:
            parts.append(await running.stdout.readexactly(min(num_left, SLICE)))
            num_left -= len(parts[-1])
        return b"".join(parts)

    async def kill(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            with suppress(ProcessLookupError):
                running.kill()
            await running.communicate()  # also closes its pipes
            assert running.stdin is not None
            with suppress(OSError):  # of what it had not read
                await running.stdin.wait_closed()
