"""Clients that drop streams at random times: before or during the answer, or without reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from urllib.parse import urlsplit

FIELDS = {"stream": True, "max_tokens": 300, "temperature": 1, "ignore_eos": True, "n": 2}
BODY = json.dumps({"prompt": "Hello!", **FIELDS}).encode()


async def drop_streams(url: str, num_streams: int, concurrency: int, seed: int) -> None:
    """Open and drop this many streams. url: of the endpoint, without path."""
    address = urlsplit(url)
    free = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with free:
            await _drop(str(address.hostname), int(address.port or 80), Random(f"{seed}/{number}"))

    await asyncio.gather(*map(one, range(num_streams)))


async def _drop(host: str, port: int, random: Random) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 12)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    try:
        await writer.drain()
        match random.randrange(4):
            case 0:  # at once, or a little later
                await asyncio.sleep(random.random() * 0.05)
            case 1:  # after some events
                await asyncio.wait_for(reader.readexactly(random.randrange(1, 8000)), 30)
            case 2:  # reads the head, then nothing for a while
                await asyncio.wait_for(reader.readline(), 30)
                await asyncio.sleep(random.random() * 0.3)
            case _:  # half-closes, which for a server is a disconnect or not
                writer.write_eof()
                await asyncio.sleep(random.random() * 0.1)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if random.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
