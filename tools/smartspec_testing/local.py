"""A server in this process, without Triton: for tests, `smartspec check` and benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import FinishReason
from smartspec_py.serving.messages import Progress, Reply
from smartspec_py.serving.request import ErrorCode

if TYPE_CHECKING:
    from smartspec_py.config import ServerConfig
    from smartspec_py.engines.engine import Engine
    from smartspec_py.serving.server import Server


@dataclass
class LocalSink:
    """Collects the replies of one request; `wait` returns when the final one has come.

    times_s: when each reply came.
    """

    replies: list[Reply] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_finals: int = 0
    num_acceptances: int = 0
    error: tuple[ErrorCode, str] | None = None
    is_gone: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def last(self) -> Reply:
        """The latest reply; an empty one before the first."""
        return self.replies[-1] if self.replies else Reply(GenerateParams("", 1))

    @property
    def pieces(self) -> list[str]:
        return [reply.text for reply in self.replies]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for reply in self.replies for token in reply.tokens]

    @property
    def log_probs(self) -> list[float]:
        return [entry.log_prob for reply in self.replies for entry in reply.log_probs]

    @property
    def drawn(self) -> list[int]:
        """The tokens, and the end token if the text ended with one."""
        end_token = self.last.end_token
        return self.tokens if end_token is None else [*self.tokens, end_token]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason

    @property
    def progress(self) -> Progress:
        return self.last.progress

    @property
    def seed(self) -> int:
        return self.last.seed

    def accept(self) -> None:
        assert not self.replies, "a response came before the acceptance"
        self.num_acceptances += 1

    def send(self, reply: Reply) -> None:
        self.times_s.append(time.monotonic())
        self.replies.append(reply)
        if reply.finish_reason is not None:
            self._finish()

    def fail(self, code: ErrorCode, message: str) -> None:
        self.error = (code, message)
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


@contextmanager
def serving(engine: Engine, config: ServerConfig, **options: Any) -> Iterator[Server]:
    """A server that has been started. It is stopped at the end, and closes the engine. options: of
    `Server`."""
    from smartspec_py.serving.server import Server

    server = Server(engine, config, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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
