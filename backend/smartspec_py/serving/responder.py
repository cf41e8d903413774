"""The responder thread: tokens to text, text to the client, and the question whether it is there.

Sending and asking are calls into another process, too slow for the loop. This thread owns every
`Conversation` and is the only one that talks to a sink, so that exactly one final response leaves
for each request, whatever happens.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from smartspec_py.core.types import FinishReason, SequenceId
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.text import TextStream

logger = logging.getLogger(__name__)

CANCEL_CHECK_S = 0.03
"""A client that has gone is noticed within this time; each question costs a call to the server."""


REFUSAL_DELAY_S = 0.02
"""Triton 2.51 dies (signal 11, about once in 150) of an error that meets a gRPC stream with the
header `triton_grpc_error` before its own thread has done with the request; so late, never seen."""

SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a request so far; see `Request`."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """One response. num_input_tokens is 0 on all but the last; num_output_tokens is of this one."""

    text: str
    num_output_tokens: int
    progress: Progress
    seed: int
    num_input_tokens: int = 0
    finish_reason: FinishReason | None = None


class Sink(Protocol):
    """The client's end of a request. Any call may raise when the client is gone."""

    def send(self, reply: Reply, is_final: bool) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send an error as the final response."""
        ...

    def is_cancelled(self) -> bool: ...


@dataclass(slots=True)
class Conversation:
    """What the responder knows of one request. num_unsent: tokens whose text was not sent yet."""

    sequence: SequenceId
    sink: Sink
    text: TextStream
    seed: int
    num_input_tokens: int
    is_streaming: bool
    echo: str = ""
    num_unsent: int = 0
    progress: Progress = field(default_factory=Progress)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """News of a request from the loop. finish_reason or error: this is the last of it."""

    conversation: Conversation
    tokens: Sequence[int] = ()
    progress: Progress | None = None
    finish_reason: FinishReason | None = None
    error: tuple[ErrorCode, str] | None = None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error for a request that never came to be, due at `due_s` of the clock."""

    sink: Sink
    code: ErrorCode
    message: str
    due_s: float


class Responder:
    """Runs in its own thread between `start` and `stop`. `post` may be called from any thread."""

    def __init__(
        self, cancel: Callable[[SequenceId], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """cancel: told the sequence of a client that has gone."""
        self._cancel = cancel
        self._clock = clock
        self._queue: queue.SimpleQueue[Update | _Refusal | None] = queue.SimpleQueue()
        self._refusals: deque[_Refusal] = deque()
        self._open: dict[SequenceId, Conversation] = {}
        self._next_check_s = 0.0
        self._thread = threading.Thread(target=self._run, name="smartspec-responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what is queued, end the thread, then fail what is still open."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("a client held the responder up for more than %.0f s", timeout_s)
            return
        for conversation in list(self._open.values()):
            self._fail(conversation, ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        self._refuse_due(math.inf)

    def post(self, update: Update) -> None:
        self._queue.put(update)

    def refuse(self, sink: Sink, code: ErrorCode, message: str) -> None:
        """Answer a request that is not served, REFUSAL_DELAY_S from now."""
        self._queue.put(_Refusal(sink, code, message, self._clock() + REFUSAL_DELAY_S))

    def _run(self) -> None:
        is_running = True
        while is_running:
            news = self._take()
            is_running = None not in news
            self._refusals.extend(item for item in news if isinstance(item, _Refusal))
            self._handle([item for item in news if isinstance(item, Update)])
            self._refuse_due(self._clock())
            self._check_cancelled()

    def _take(self) -> list[Update | _Refusal | None]:
        """Everything queued; waits for the first, or until something has to be done anyway."""
        news: list[Update | _Refusal | None] = []
        try:
            news.append(self._queue.get(timeout=self._wait_s()))
            while True:
                news.append(self._queue.get_nowait())
        except queue.Empty:
            return news

    def _wait_s(self) -> float | None:
        due_s = [self._next_check_s] if self._open else []
        due_s += [refusal.due_s for refusal in self._refusals]
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    def _refuse_due(self, now_s: float) -> None:
        while self._refusals and self._refusals[0].due_s <= now_s:
            refusal = self._refusals.popleft()
            try:
                refusal.sink.fail(refusal.code, refusal.message)
            except Exception:
                logger.exception("a refusal could not be sent")

    def _handle(self, updates: Iterable[Update]) -> None:
        """Take in all news first, then send: when sending lags, steps of a request are merged."""
        touched: dict[SequenceId, Conversation] = {}
        for update in updates:
            conversation = update.conversation
            if conversation.is_over:
                continue
            self._open[conversation.sequence] = conversation
            touched[conversation.sequence] = conversation
            if not self._absorb(update):
                continue
            if update.error is not None:
                self._fail(conversation, *update.error)
            elif update.finish_reason is not None:
                self._finish(conversation, update.finish_reason)
        for conversation in touched.values():
            if conversation.is_streaming and not conversation.is_over:
                self._send_piece(conversation)

    def _absorb(self, update: Update) -> bool:
        """Take news in; False where its tokens are no text, and the request is failed for it."""
        conversation = update.conversation
        conversation.num_unsent += len(update.tokens)
        conversation.progress = update.progress or conversation.progress
        try:
            for token in update.tokens:
                conversation.text.push(token)
        except Exception as error:
            logger.exception("request %d: its tokens are no text", conversation.sequence)
            self._fail(conversation, ErrorCode.INTERNAL, f"its tokens are no text: {error}")
            self._cancel(conversation.sequence)
        return not conversation.is_over

    def _send_piece(self, conversation: Conversation) -> None:
        text = conversation.text.take()
        if text:
            self._send(conversation, text, None)

    def _finish(self, conversation: Conversation, reason: FinishReason) -> None:
        self._close(conversation)
        text = conversation.text.take() + conversation.text.finish()
        if not self._send(conversation, text, reason):
            self._fail(conversation, ErrorCode.INTERNAL, "the last response could not be sent")

    def _fail(self, conversation: Conversation, code: ErrorCode, message: str) -> None:
        self._close(conversation)
        self._guard(conversation, lambda: conversation.sink.fail(code, message))

    def _close(self, conversation: Conversation) -> None:
        conversation.is_over = True
        self._open.pop(conversation.sequence, None)

    def _send(self, conversation: Conversation, text: str, reason: FinishReason | None) -> bool:
        reply = Reply(
            text=conversation.echo + text,
            num_output_tokens=conversation.num_unsent,
            progress=conversation.progress,
            seed=conversation.seed,
            num_input_tokens=conversation.num_input_tokens if reason else 0,
            finish_reason=reason,
        )
        conversation.echo = ""
        conversation.num_unsent = 0
        return self._guard(conversation, lambda: conversation.sink.send(reply, reason is not None))

    def _guard(self, conversation: Conversation, call: Callable[[], None]) -> bool:
        """Whether the call got through. A client that cannot be reached must not take the others
        down: its request is cancelled, unless this was its last response."""
        try:
            call()
        except Exception:
            logger.exception("request %d: the response could not be sent", conversation.sequence)
            if not conversation.is_over:
                self._cancel(conversation.sequence)
            return False
        return True

    def _check_cancelled(self) -> None:
        now = self._clock()
        if now < self._next_check_s:
            return
        self._next_check_s = now + CANCEL_CHECK_S
        for conversation in self._open.values():
            if self._has_left(conversation):
                self._cancel(conversation.sequence)

    def _has_left(self, conversation: Conversation) -> bool:
        """A client that cannot even be asked has left."""
        try:
            return conversation.sink.is_cancelled()
        except Exception:
            logger.exception("request %d: the client cannot be reached", conversation.sequence)
            return True
