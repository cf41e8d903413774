"""A server in this process, without Triton: for tests, `smartspec check` and benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smartspec_py.core.types import FinishReason
from smartspec_py.serving.messages import Progress, Reply, Summary
from smartspec_py.serving.request import ErrorCode, GenerateParams

if TYPE_CHECKING:
    from smartspec_py.serving.server import Server


@dataclass
class LocalSink:
    """Collects the replies of one request; `wait` returns when the final one has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    summary: Summary | None = None
    num_finals: int = 0
    finish_reason: FinishReason | None = None
    progress: Progress = field(default_factory=Progress)
    seed: int = 0
    error: tuple[ErrorCode, str] | None = None
    pieces: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    is_gone: bool = False
    trace: str = ""
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def drawn(self) -> list[int]:
        """The tokens, and the end token if the text ended with one."""
        end_token = None if self.summary is None else self.summary.end_token
        return self.tokens if end_token is None else [*self.tokens, end_token]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def send(self, reply: Reply, is_final: bool) -> None:
        self.times_s.append(time.monotonic())
        self.text += reply.text
        self.pieces.append(reply.text)
        self.tokens.extend(reply.tokens)
        self.log_probs.extend(reply.log_probs or ())
        self.output_ids.extend(reply.output_ids or ())
        self.documents += [reply.token_log_probs] if reply.token_log_probs else []
        self.summary = reply.summary
        self.progress, self.seed = reply.progress, reply.seed
        if is_final:
            self.finish_reason = reply.finish_reason
            self._finish()

    def fail(self, code: ErrorCode, message: str) -> None:
        self.error = (code, message)
        self._finish()

    def explain(self, trace: str) -> None:
        self.trace = trace
        self._finish()

    def is_cancelled(self) -> bool:
        return self.is_gone

    def wait(self, timeout_s: float) -> None:
        """Raises TimeoutError if no final response comes in time."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no final response within {timeout_s} s")

    def _finish(self) -> None:
        self.num_finals += 1
        self._done.set()


def generate(
    server: Server, requests: Sequence[GenerateParams], timeout_s: float = 600.0
) -> list[LocalSink]:
    """Serve the requests together; returns their sinks in order, all final."""
    sinks = [LocalSink() for _ in requests]
    for params, sink in zip(requests, sinks, strict=True):
        server.submit(params, sink)
    for sink in sinks:
        sink.wait(timeout_s)
    return sinks
