"""The responder thread: decodes tokens, sends text to clients, and detects cancelled requests.

Sending and checking for cancellation are calls to another process, too slow for the loop. This
thread owns every `ResponseState` and is the only one that calls a sink. Therefore each request gets
exactly one final response, even after errors. No exception ends this thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import FinishReason, SequenceId
from smartspec_py.serving.messages import (
    SHUTTING_DOWN,
    LoopState,
    Reply,
    ResponseState,
    Sink,
    Update,
)
from smartspec_py.serving.metrics import Meter, MetricSink, drop
from smartspec_py.serving.request import ErrorCode, Request, late_message
from smartspec_py.serving.step import StepRecord

logger = logging.getLogger(__name__)

CANCEL_CHECK_S = 0.03
"""Time between checks for cancelled requests, and between calls of `watch`."""

CHECK_BUDGET_S = 0.003
"""Longest duration of these checks at a time. Each costs a call to the server, about 0.2 ms. So if
many requests are open, they are checked in turn. Otherwise a full queue would delay streams."""

REFUSAL_DELAY_S = 0.02
"""Delay before an error response.

Triton 2.51 can crash (signal 11, about once in 150 times) if an error reaches a gRPC stream with
the header `triton_grpc_error` before its own thread has finished with the request. With this delay,
the crash was never observed.
"""

_Message = ResponseState | Update | StepRecord | LoopState | Callable[[], object]

UNSENT = "a response could not be sent"
UNUSED = "a message could not be used"
UNCOUNTED = "a request is missing in the metrics"
NO_METRICS = "metrics could not be updated; metrics are disabled from now on"

HEALTHY = Reply(GenerateParams("", 1), finish_reason=FinishReason.STOP)
"""The answer to a health check."""


LEFT = "the client has disconnected"


@dataclass(slots=True, eq=False)
class Refusal:
    """An error response that is sent at due_s."""

    due_s: float
    sink: Sink
    code: ErrorCode
    message: str


@dataclass(slots=True, eq=False)
class Claim:
    """The right to answer a request that the loop does not have yet. Whoever wants to answer it
    takes the right first, so it gets exactly one answer.

    due_s: when the responder refuses it with the message `late`; infinite without a deadline.
    """

    sink: Sink
    due_s: float = math.inf
    late: str = ""
    is_taken: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, request: Request, sink: Sink) -> Claim:
        if request.deadline_s is None:
            return cls(sink)
        late = late_message((request.deadline_s - request.arrival_s) * 1e3)
        return cls(sink, request.deadline_s, late)

    def take(self) -> bool:
        """True for the first call."""
        with self._lock:
            was_taken, self.is_taken = self.is_taken, True
        return not was_taken


class Responder:
    """Runs in its own thread between `start` and `stop`. `post` may be called from any thread."""

    def __init__(
        self,
        cancel: Callable[[SequenceId], None],
        meter: Meter,
        metrics: MetricSink,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[], None] = lambda: None,
        on_step: Callable[[StepRecord], None] = lambda step: None,
    ) -> None:
        """cancel: called with the sequence of a request whose client has disconnected.

        meter: counts events. metrics: receives the values. Both are used only by the responder's
        thread. watch: called every CANCEL_CHECK_S while requests are open. on_step: called with
        each step.
        """
        self._cancel = cancel
        self._meter = meter
        self._metrics = metrics
        self._clock = clock
        self._watch = watch
        self._on_step = on_step
        self._queue: queue.SimpleQueue[Sequence[_Message | None]] = queue.SimpleQueue()
        self._refusals: list[Refusal] = []
        self._held: list[Claim] = []
        self._refusing = threading.Lock()
        self._open: dict[SequenceId, ResponseState] = {}
        self._num_coming = 0
        """Posted requests that are not in `_open` yet."""

        self._failure: tuple[ErrorCode, str] | None = None
        self._next_check_s = 0.0
        self._unchecked: list[SequenceId | Claim] = []
        self._thread = threading.Thread(target=self._run, name="smartspec-responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what is queued, end the thread, then fail what is still open."""
        self._queue.put([None])
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("a client blocked the responder for more than %.0f s", timeout_s)
            return
        self._fail_open(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        self._refuse_due(math.inf)

    @property
    def num_open(self) -> int:
        """Requests whose last response was not sent yet. May be read by any thread."""
        num_held = sum(not claim.is_taken for claim in self._held)
        return self._num_coming + len(self._open) + num_held

    def post(self, *messages: ResponseState | Update | StepRecord | LoopState) -> None:
        """A `ResponseState` comes before the updates of its sequence. Messages that are posted
        together wake the thread once."""
        if num := sum(isinstance(item, ResponseState) for item in messages):
            self._count_coming(num)
        self._queue.put(messages)

    def _count_coming(self, num: int) -> None:
        with self._refusing:
            self._num_coming += num

    def refuse(self, sink: Sink, code: ErrorCode, message: str) -> None:
        """Answer a request that is not served, REFUSAL_DELAY_S from now."""
        with self._refusing:
            due_s = self._clock() + REFUSAL_DELAY_S
            self._refusals.append(Refusal(due_s, sink, code, message))
        self._queue.put([])  # wakes the thread

    def hold(self, claim: Claim) -> None:
        """Refuse this request at its deadline, if its client disconnects, and when all requests are
        failed, unless its claim is taken before."""
        claim.due_s = max(claim.due_s, self._clock() + REFUSAL_DELAY_S)
        with self._refusing:
            self._held.append(claim)
        self._queue.put([])  # wakes the thread

    def answer(self, sink: Sink, reply: Callable[[], Reply]) -> None:
        """Answer a request that the loop never had. reply: called in the responder's thread."""
        self._queue.put([lambda: _has_run(UNSENT, lambda: sink.send(reply()))])

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Fail all open requests and all requests posted later. Used if the loop cannot do it."""
        self._failure = code, message
        self._queue.put([])  # wakes the thread

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Wait for messages and process them; False after the last message.

        This is a separate call so that its local variables do not outlive it. Triton does not
        unload a model while a sender of its responses is still referenced.
        """
        messages = self._take()
        is_running = None not in messages
        self._sort(messages)
        self._handle([item for item in messages if isinstance(item, Update)])
        if self._failure is not None:
            self._fail_open(*self._failure)
        self._refuse_due(self._clock())
        if is_running:
            # Not while stopping: after Triton starts to finalize a model, it answers none of the
            # model's calls, and this thread would wait forever.
            self._check_cancelled()
            flush = self._meter.flush_if_due
            if not _has_run(NO_METRICS, flush, self._metrics, self._clock()):
                self._metrics = drop
        return is_running

    def _sort(self, messages: Iterable[_Message | None]) -> None:
        for item in messages:
            if isinstance(item, ResponseState):
                self._open[item.sequence] = item
                self._count_coming(-1)
                _has_run(UNSENT, item.sink.accept)
            elif item is not None and not isinstance(item, Update):
                _has_run(UNUSED, self._use, item)

    def _use(self, item: StepRecord | LoopState | Callable[[], object]) -> None:
        if isinstance(item, StepRecord):
            self._meter.add_step(item)
            self._on_step(item)
        elif isinstance(item, LoopState):
            self._meter.set_state(item)
        else:
            item()

    def _fail_open(self, code: ErrorCode, message: str) -> None:
        for response in list(self._open.values()):
            self._fail(response, code, message)
        for claim in self._held:
            self._refuse_held(claim, code, message)

    def _take(self) -> list[_Message | None]:
        """All queued messages. Waits for the first one, or until the next timed task is due."""
        messages: list[_Message | None] = []
        with contextlib.suppress(queue.Empty):
            messages += self._queue.get(timeout=self._wait_s())
            while True:
                messages += self._queue.get_nowait()
        return messages

    def _wait_s(self) -> float | None:
        due_s = [self._next_check_s] if self._open or self._held else []
        with self._refusing:
            due_s += [refusal.due_s for refusal in self._refusals]
            due_s += [claim.due_s for claim in self._held if claim.due_s < math.inf]
        if self._meter.due_s is not None:
            due_s.append(self._meter.due_s)
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    def _refuse_due(self, now_s: float) -> None:
        with self._refusing:
            due = [refusal for refusal in self._refusals if refusal.due_s <= now_s]
            self._refusals = [refusal for refusal in self._refusals if refusal.due_s > now_s]
            self._held = [claim for claim in self._held if not claim.is_taken]
        for refusal in due:
            self._reject(refusal.sink, refusal.code, refusal.message)
        for claim in self._held:
            if claim.due_s <= now_s:
                self._refuse_held(claim, ErrorCode.UNAVAILABLE, claim.late)

    def _refuse_held(self, claim: Claim, code: ErrorCode, message: str) -> None:
        if claim.take():
            self._reject(claim.sink, code, message)

    def _reject(self, sink: Sink, code: ErrorCode, message: str) -> None:
        _has_run(UNCOUNTED, self._meter.add_rejection, code)
        _has_run(UNSENT, sink.fail, code, message)

    def _handle(self, updates: Iterable[Update]) -> None:
        """Process all updates first, then send.

        If sending is slow, the tokens of several steps of a request are sent together.
        """
        touched: dict[SequenceId, ResponseState] = {}
        for update in updates:
            response = self._open.get(update.sequence)
            if response is not None:  # else it already got its final response
                touched[update.sequence] = response
                self._alone(response, self._follow, update)
        for sequence, response in touched.items():
            if response.common.params.stream and sequence in self._open:
                self._alone(response, self._send_new)

    def _alone(
        self, response: ResponseState, act: Callable[..., object], *arguments: object
    ) -> None:
        """Do something for one response. After an exception, this response fails."""
        try:
            act(response, *arguments)
        except BaseException as error:
            logger.exception("request %d: its tokens cannot be decoded", response.sequence)
            if response.sequence in self._open:
                self._fail(response, ErrorCode.INTERNAL, f"its tokens cannot be decoded: {error}")
            self._cancel(response.sequence)

    def _follow(self, response: ResponseState, update: Update) -> None:
        if response.add(update):
            self._finish(response, FinishReason.STOP)
            if not update.is_last:
                self._cancel(update.sequence)
        elif update.error is not None:
            self._fail(response, *update.error)
        elif update.finish_reason is not None:
            self._finish(response, update.finish_reason, update.end_token)

    def _send_new(self, response: ResponseState) -> None:
        text = response.text.take()
        if text and not _has_run(UNSENT, response.sink.send, response.take_reply(text)):
            self._cancel(response.sequence)

    def _finish(
        self, response: ResponseState, reason: FinishReason, end_token: int | None = None
    ) -> None:
        text = response.text.take() + response.text.finish()
        reply = response.take_reply(text, reason, end_token)
        self._close(response, reason)
        if not _has_run(UNSENT, response.sink.send, reply):
            _has_run(UNSENT, response.sink.fail, ErrorCode.INTERNAL, UNSENT)

    def _fail(self, response: ResponseState, code: ErrorCode, message: str) -> None:
        self._close(response, None)
        _has_run(UNSENT, response.sink.fail, code, message)

    def _close(self, response: ResponseState, reason: FinishReason | None) -> None:
        """reason: None if the request ended with an error."""
        del self._open[response.sequence]
        end_s, num_tokens = self._clock(), response.num_tokens
        count = self._meter.add_request
        _has_run(UNCOUNTED, count, response.progress, end_s, num_tokens, reason)

    def _check_cancelled(self) -> None:
        now = self._clock()
        if now < self._next_check_s:
            return
        self._next_check_s = now + CANCEL_CHECK_S
        if self._open:
            _has_run("the watch failed", self._watch)
        self._unchecked = self._unchecked or [*self._open, *self._held]
        while self._unchecked and self._clock() < now + CHECK_BUDGET_S:
            unchecked = self._unchecked.pop()
            if isinstance(unchecked, Claim):
                if not unchecked.is_taken and _has_left(unchecked.sink):
                    self._refuse_held(unchecked, ErrorCode.UNAVAILABLE, LEFT)
                continue
            response = self._open.get(unchecked)
            if response is not None and _has_left(response.sink):
                self._cancel(response.sequence)


def _has_left(sink: Sink) -> bool:
    """Whether the client has disconnected. An error of this check counts as disconnected."""
    try:
        return sink.is_cancelled()
    except BaseException:
        logger.exception("a client cannot be reached")
        return True


def _has_run(otherwise: str, call: Callable[..., object], *arguments: object) -> bool:
    """Whether the call succeeded. otherwise: logged with its error, which goes no further."""
    try:
        call(*arguments)
    except BaseException:
        logger.exception("%s", otherwise)
        return False
    return True
