"""Load on a server in this process: a constant number of requests, and the transport of
`open_loop`."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_bench.prompts import Prompt
from smartspec_bench.streams import StreamError
from smartspec_py.serving.messages import Reply
from smartspec_py.serving.request import ErrorCode, GenerateParams, RequestError
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import StepRecord
from smartspec_testing.local import LocalSink

WAIT_S = 60.0
"""Timeout for requests that were cancelled, or that only finish."""


class EndingSink(LocalSink):
    """Reports once, from the responder's thread, that its request has ended."""

    def __init__(self, ended: Callable[[EndingSink], object], number: int = 0) -> None:
        super().__init__()
        self.number = number
        self._ended = ended

    def send(self, reply: Reply, is_final: bool) -> None:
        super().send(reply, is_final)
        if is_final:
            self._ended(self)

    def fail(self, code: ErrorCode, message: str) -> None:
        super().fail(code, message)
        self._ended(self)


@dataclass(frozen=True)
class Rate:
    """tokens_tps: tokens over the time of all steps, including the prompts that were read in them.
    num_decoded: decoding steps, counted for each sequence."""

    tokens_tps: float
    num_drafted: int
    num_accepted: int
    num_decoded: int


@dataclass(frozen=True)
class HouseRun:
    """records: steps from the first in which every request decodes to the end of the last counted
    request. requests: all that were sent and have ended, including cancelled ones."""

    records: Sequence[StepRecord]
    requests: Sequence[LocalSink]

    @property
    def rate(self) -> Rate | None:
        """None without a step."""
        if not self.records:
            return None
        first, last = self.records[0], self.records[-1]
        duration_s = last.start_s + last.total_s - first.start_s
        events = [event for record in self.records for event in record.events]
        return Rate(
            tokens_tps=sum(record.num_generated for record in self.records) / duration_s,
            num_drafted=sum(record.num_drafted for record in self.records),
            num_accepted=sum(event.num_accepted for event in events),
            num_decoded=sum(record.batch_size for record in self.records),
        )


def full_house(
    server: Server,
    requests: Iterator[GenerateParams],
    num_out: int,
    num_counted: int,
    deadline_s: float,
    *,
    drains: bool = False,
) -> HouseRun:
    """Keep num_out requests in flight until num_counted have ended, or until the deadline
    (monotonic).

    The next request is sent when one has ended. drains: requests in flight at the end then generate
    to their end; otherwise they are cancelled. Rates are read from the loop's records. Nothing is
    streamed, so that this thread takes no time from the loop. Raises StreamError.
    """
    ended: queue.SimpleQueue[EndingSink] = queue.SimpleQueue()
    sinks: list[EndingSink] = []
    out: dict[int, int] = {}

    def send() -> None:
        sink = EndingSink(ended.put, len(sinks))
        sinks.append(sink)
        out[sink.number] = server.submit(next(requests), sink)

    server.loop.records.clear()
    begun_s = time.monotonic()
    for _ in range(num_out):
        send()
    num_ended = 0
    while num_ended < num_counted:
        try:
            sink = ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        if sink.error is not None:
            raise StreamError(sink.error[1])
        num_ended += 1
        del out[sink.number]
        if num_ended < num_counted:
            send()
    records = _within(tuple(server.loop.records), begun_s, time.monotonic(), num_out)
    for number, sequence in out.items():
        if not drains:
            server.cancel(sequence)
        sinks[number].wait(WAIT_S)
    return HouseRun(records, sinks)


def _within(
    records: Sequence[StepRecord], begun_s: float, ended_s: float, num_out: int
) -> Sequence[StepRecord]:
    """Steps in which all requests decode; all steps if there were none."""
    kept = [r for r in records if begun_s <= r.start_s and r.start_s + r.total_s <= ended_s]
    full = (index for index, record in enumerate(kept) if record.batch_size >= num_out)
    return kept[next(full, 0) :]


def params_of(prompt: Prompt, policy: str, max_tokens: int) -> GenerateParams:
    # Policies share their prompts: the first would pay for reading them, and no other.
    return GenerateParams(
        text=prompt.text, max_tokens=max_tokens, policy=policy, reuse_prefix=False
    )


class LocalStreams:
    """The `Transport` of `open_loop` to this process, with one response per request."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        sink = EndingSink(lambda _: loop.call_soon_threadsafe(over.set))
        prompt = Prompt(fields["text_input"])
        params = params_of(prompt, fields["speculation_policy"], fields["max_tokens"])
        try:
            sequence = self._server.submit(params, sink)
        except RequestError as error:
            raise StreamError(str(error)) from error
        try:
            await over.wait()
        finally:
            if not over.is_set():
                self._server.cancel(sequence)
        if sink.error is not None:
            raise StreamError(sink.error[1])
        yield {"num_output_tokens": sink.num_tokens, "finish_reason": str(sink.finish_reason)}
