"""Requests whose grammars are compiled, before they enter the loop's queue.

Requests with the same grammar share a job. Jobs with a lower rank are compiled first. A job that
takes longer than `CompileLimits.quick_s` is put back and compiled again in one of the few places
for slow ones, so that others need not wait for it. A job whose requests have all been answered
(deadline, disconnect) is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from smartspec_py.constants import GUIDE_FIELD
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.compiler import CompiledGrammar, GrammarCompiler
from smartspec_py.engines.structured.guides import GrammarError
from smartspec_py.engines.structured.trial import CompileLimits, TooSlowError, TrialEnded, Unwanted
from smartspec_py.faults import ENDS
from smartspec_py.serving.messages import SHUTTING_DOWN, ResponseState
from smartspec_py.serving.request import ErrorCode, FieldError, Request, RequestError
from smartspec_py.serving.responder import Claim, Responder

logger = logging.getLogger(__name__)

JOIN_S = 1.0
"""Time that all threads get to end. A thread that still compiles then ends without an effect."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request without its grammar, and the right to answer it."""

    request: Request
    response: ResponseState
    claim: Claim


@dataclass(eq=False)
class _Job:
    """A grammar, and the requests that wait for it."""

    kind: GuideType
    guide: str
    waiting: list[_Waiting] = field(default_factory=list)
    is_slow: bool = False
    is_running: bool = False

    def is_wanted(self) -> bool:
        return any(not one.claim.is_taken for one in self.waiting)

    @property
    def rank(self) -> tuple[float, int]:
        return min(one.request.rank for one in self.waiting)


class Compiling:
    """Compiles in its own threads between `start` and `stop`. `put` may be called from any."""

    def __init__(
        self,
        new_compiler: Callable[[], GrammarCompiler],
        enqueue: Callable[[Request, ResponseState], None],
        responder: Responder,
        max_waiting: int,
        limits: CompileLimits,
    ) -> None:
        """enqueue: takes a request with its grammar; may raise RequestError. Called by any thread.
        max_waiting: most requests that may wait for a grammar."""
        self._new_compiler = new_compiler
        self._enqueue = enqueue
        self._responder = responder
        self._max_waiting = max_waiting
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._unusable = ""
        self._jobs: dict[tuple[GuideType, str], _Job] = {}
        self._is_stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=[slow], name="smartspec-grammar", daemon=True)
            for slow in [False] * limits.num_quick + [True] * limits.num_slow
        ]

    def start(self) -> None:
        """Make the compiler and start the threads. It holds Python's lock, for 0.3 s with 49,000
        tokens and for more than 1.5 s with 152,000, and all streams would wait. So call it before
        the server is ready. If the tokenizer does not work, requests with a grammar fail."""
        try:
            self._compiler = self._new_compiler()
        except ENDS:
            raise
        except BaseException as error:
            logger.warning("requests with a grammar will be refused: %s", error)
            self._unusable = str(error)
            return
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Give up all jobs. The responder answers their requests when it stops."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._compiler is not None:
            self._compiler.close()
            end_s = time.monotonic() + JOIN_S
            for thread in self._threads:
                thread.join(max(0.0, end_s - time.monotonic()))

    def put(self, request: Request, response: ResponseState, kind: GuideType, guide: str) -> None:
        """Enqueue a request when it has its grammar: now if that was compiled before.

        Raises RequestError if the grammar was refused before, or too many requests wait.
        """
        if self._unusable:
            raise _refusal(GrammarError(self._unusable))
        try:
            grammar = self._compiler.find(kind, guide) if self._compiler is not None else None
        except GrammarError as error:
            raise _refusal(error) from None
        if grammar is not None:
            _begin(request, grammar)
            self._enqueue(request, response)
            return
        claim = Claim.of(request, response.sink)
        self._responder.hold(claim)
        refused = self._add(_Waiting(request, response, claim), kind, guide)
        if refused and claim.take():
            raise RequestError(ErrorCode.UNAVAILABLE, refused)

    def _add(self, one: _Waiting, kind: GuideType, guide: str) -> str:
        """Returns why the request cannot wait; empty if it can."""
        with self._changed:
            if self._is_stopped:
                return SHUTTING_DOWN
            self._drop_answered()
            if sum(len(job.waiting) for job in self._jobs.values()) >= self._max_waiting:
                return "too many requests wait for their grammars: try again later"
            job = self._jobs.setdefault((kind, guide), _Job(kind, guide))
            job.waiting.append(one)
            self._changed.notify_all()
        return ""

    def _run(self, is_slow: bool) -> None:
        while self._turn(is_slow):
            pass

    def _turn(self, is_slow: bool) -> bool:
        """Compile one grammar. False after `stop`.

        This is a separate call so that its local variables do not outlive it. Triton does not
        unload a model while a sender of its responses is still referenced.
        """
        job = self._next(is_slow)
        if job is None:
            return False
        outcome = self._outcome(job)
        for one in self._end(job, outcome):
            self._deliver(one, outcome)
        return True

    def _next(self, is_slow: bool) -> _Job | None:
        with self._changed:
            while not self._is_stopped:
                self._drop_answered()
                jobs = [job for job in self._jobs.values() if not job.is_running]
                jobs = [job for job in jobs if is_slow or not job.is_slow]
                if jobs:
                    job = min(jobs, key=lambda job: job.rank)
                    job.is_running = True
                    return job
                self._changed.wait()
        return None

    def _drop_answered(self) -> None:
        for key, job in list(self._jobs.items()):
            job.waiting = [one for one in job.waiting if not one.claim.is_taken]
            if not job.waiting and not job.is_running:
                del self._jobs[key]

    def _outcome(self, job: _Job) -> CompiledGrammar | BaseException:
        assert self._compiler is not None
        limits = self._limits
        most_s = limits.most_s if job.is_slow else limits.quick_s
        try:
            return self._compiler.compile(job.kind, job.guide, most_s, job.is_wanted)
        except BaseException as error:  # also a panic of the library: every request gets an answer
            return error

    def _end(self, job: _Job, outcome: CompiledGrammar | BaseException) -> list[_Waiting]:
        """The requests that get this outcome. None if the job is put back or was given up."""
        with self._changed:
            job.is_running = False
            is_too_slow = isinstance(outcome, TooSlowError) and not job.is_slow
            if self._is_stopped:
                return []
            if is_too_slow or isinstance(outcome, Unwanted):
                job.is_slow = job.is_slow or is_too_slow
                self._changed.notify_all()
                return []
            del self._jobs[job.kind, job.guide]
            return job.waiting

    def _deliver(self, one: _Waiting, outcome: CompiledGrammar | BaseException) -> None:
        if one.claim.take() and (refusal := self._refused(one, outcome)):
            self._responder.refuse(one.claim.sink, refusal.code, str(refusal))

    def _refused(
        self, one: _Waiting, outcome: CompiledGrammar | BaseException
    ) -> RequestError | None:
        """Enqueue the request if it has its grammar. Otherwise returns why not."""
        if not isinstance(outcome, CompiledGrammar):
            return _refusal(outcome)
        try:
            _begin(one.request, outcome)
            self._enqueue(one.request, one.response)
        except BaseException as error:
            return _refusal(error)
        return None


def _begin(request: Request, grammar: CompiledGrammar) -> None:
    state = grammar.start(request.num_prompt)
    state.host_time = request.host_time
    request.grammar = state


def _refusal(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TrialEnded):
        return RequestError(ErrorCode.UNAVAILABLE, f"{GUIDE_FIELD}: {error}")
    if isinstance(error, GrammarError):
        # Without the value, which another program may have written for the client.
        return FieldError(GUIDE_FIELD, f"must be a grammar that works: {error}")
    logger.error("a request was not accepted", exc_info=error)
    return RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
