"""Passes bytes between clients and the server unchanged, and keeps them, to find what was refused.

`Tee.taken` gives the answers with a status of 400 or more. The bytes of each
connection are also written to a file.
"""

import asyncio
import json
import re
import threading
from contextlib import closing, suppress
from pathlib import Path

_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_ERROR = re.compile(rb'"message": ?"((?:[^"\\]|\\.)*)"')


class Tee:
    """Listens on `port` of loopback. folder: for the files."""

    def __init__(self, server_port: int, folder: Path) -> None:
        self._server_port, self._folder = server_port, folder
        self._num_connections, self._name = 0, ""
        self._refusals: list[str] = []
        self.port = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self._thread.start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._ended.wait()
        server.close()

    def begin(self, name: str) -> None:
        """From now on, the client of this name is asking."""
        self._name, self._refusals = name, []

    def taken(self) -> list[str]:
        """Status and message of each refusal since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        path = self._folder / f"{self._name}-{self._num_connections}.txt"
        with path.open("wb") as file, closing(writer), suppress(ConnectionError):
            theirs, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
            with closing(to_server):
                await asyncio.gather(
                    self._copy(reader, to_server, file), self._copy(theirs, writer, file)
                )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, file) -> None:
        answer = b""
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                file.write(data)
                file.flush()
                answer = self._note(data if _HEAD.match(data) else answer + data)
                writer.write(data)
                await writer.drain()
        with suppress(ConnectionError):
            writer.close()

    def _note(self, answer: bytes) -> bytes:
        """Returns what is left to look at: a refusal whose message has not come yet."""
        head, found = _HEAD.match(answer), _ERROR.search(answer)
        if not head or int(head[1]) < 400:
            return b""
        if not found:
            return answer
        text = json.loads(b'"' + found[1] + b'"')
        self._refusals.append(f"{int(head[1])} {text}")
        return b""
