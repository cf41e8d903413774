"""The server without a network interface: checks requests, runs them, and answers through sinks.

The Triton model, the tests and the offline commands all use this class. It uses three threads: the
caller of `submit` (checks and enqueues), the loop, and the responder. Requests with a grammar pass
`Compiling` before the queue.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.constants import GRAMMAR, GUIDE_FIELDS
from smartspec_py.engines.drafts.grammar import GrammarProposer
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.structured.compiler import GrammarCompiler
from smartspec_py.engines.structured.trial import COMPILE_LIMITS, CompileLimits
from smartspec_py.faults import sentence
from smartspec_py.serving.compiling import Compiling
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.intake import Intake, cache_budget
from smartspec_py.serving.learned import restore_learned, store_learned
from smartspec_py.serving.liveness import ProgressWatch
from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.messages import SHUTTING_DOWN, Reply, ResponseState, Sink
from smartspec_py.serving.metrics import Meter, MetricSink, drop
from smartspec_py.serving.request import ErrorCode, InvalidField, Request, RequestError
from smartspec_py.serving.responder import HEALTHY, Responder
from smartspec_py.serving.step import StepRecord
from smartspec_py.serving.step_trace import StepLog

logger = logging.getLogger(__name__)

STOP_S = 10.0
"""Time that each thread gets to end when the server stops."""

EXPLAIN_OFF = (
    "left out: this server explains no steps; set explain to true in engine.json, or start it with "
    "`smartspec serve --explain`"
)

ENOUGH_STEPS = 500
"""Fewest recorded decoding steps after which the server stores what it has learned."""


class Server:
    """Serves one engine. `submit` may be called from any thread between `start` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        metrics: MetricSink = drop,
        on_failure: Callable[[str], None] = lambda reason: None,
        should_drain: Callable[[], bool] = lambda: False,
        compile_limits: CompileLimits = COMPILE_LIMITS,
    ) -> None:
        """metrics: receives metric values. Called only from the responder's thread.

        on_failure: called once with the reason if the loop fails, from the thread of the loop or
        the responder.
        should_drain: called regularly while requests are open. If True, the server drains.
        """
        self._engine = engine
        self._drain_s = config.limits.drain_s
        self._engine_timeout_s = config.limits.engine_timeout_s
        self._progress = ProgressWatch(self._engine_timeout_s)
        self._on_failure = on_failure
        self._should_drain = should_drain
        self.is_draining = False
        self.failure: str | None = None
        """Why the loop failed. None if it has not."""

        self._failing = threading.Lock()
        proposers = dict(engine.proposers)
        unsupported = engine.target.capabilities.unsupported
        self.has_grammars = bool(engine.end_tokens) and not unsupported & GUIDE_FIELDS
        if self.has_grammars:
            proposers[GRAMMAR] = GrammarProposer(config.limits.max_draft_len)
        with_grammar = replace(engine, proposers=proposers)
        self.intake = Intake(with_grammar, config.limits, config.policy, config.proposer)
        self._inbox = Inbox(config.limits.max_queue)
        self._responder = Responder(
            self._inbox.cancel,
            _meter(engine, config),
            metrics,
            watch=self._watch,
            on_step=self._note_step,
        )
        vocab_size = engine.target.capabilities.vocab_size
        self._compiling = Compiling(
            lambda: GrammarCompiler(
                engine.tokenizer, vocab_size, engine.end_tokens, compile_limits
            ),
            self._enqueue,
            self._responder,
            config.limits.max_queue,
            compile_limits,
        )
        budget = cache_budget(engine, config.limits)
        logger.info("%s", _describe(engine, budget.capacity))
        self.facts: Mapping[str, Any] = {
            "context_len": self.intake.max_context_len,
            "cache_bytes": budget.capacity,
            "proposers": list(engine.proposers),
            "policy": config.policy,
            **engine.facts,
            **({"model": config.served_model_name[0]} if config.served_model_name else {}),
        }
        """What is served. `context_len`: prompt and generated tokens of one request. `cache_bytes`:
        the most that keys and values of all requests may take."""
        new_loop = partial(
            StepLoop,
            target=engine.target,
            proposers=proposers,
            cost=engine.cost,
            budget=budget,
            inbox=self._inbox,
            prefill_chunk=engine.prefill_chunk(config.limits.prefill_chunk),
            post=self._responder.post,
            batch_table=config.planner.batch_table,
            engine_timeout_s=self._engine_timeout_s,
        )
        self.loop = new_loop()
        path = engine.profile_path
        if path is not None and not restore_learned(self.loop, path):
            self.loop = new_loop()  # the failed restore may have changed the first loop
        batch_table = self.loop.controller.settings.batch_table
        self._step_log = StepLog(engine.cost, batch_table) if config.explain else None
        self._thread = threading.Thread(target=self._run, name="smartspec-loop", daemon=True)

    def start(self) -> None:
        if self.has_grammars:
            self._compiling.start()
        # Objects of engines and libraries stay alive. Without the freeze, a full garbage collection
        # scans them every few minutes, which delays a token by 0.3 s.
        gc.freeze()
        self._responder.start()
        self._thread.start()

    def stop(self) -> None:
        """Fail unfinished requests, end the threads, close the engines."""
        self._inbox.close(SHUTTING_DOWN)
        self._compiling.stop()
        self._thread.join(STOP_S)
        self._responder.stop(STOP_S)
        gc.unfreeze()
        if self._thread.is_alive():
            logger.error("the loop did not end within %.0f s; its engines stay open", STOP_S)
            return
        self._keep_learned()
        self._engine.target.close()
        for proposer in self._engine.proposers.values():
            proposer.close()

    def _keep_learned(self) -> None:
        """Store what was learned while serving, if there were enough decoding steps.

        Steps without a pass time do not count: `Controller.observe` learns no costs from them.
        """
        path, records = self._engine.profile_path, self.loop.records
        if path is not None and sum(record.target_s > 0.0 for record in records) >= ENOUGH_STEPS:
            store_learned(self.loop, path)

    @property
    def num_steps(self) -> int:
        """How often the loop has looked for messages: at each step, and twice a second when
        idle."""
        return self._inbox.num_taken

    @property
    def num_open(self) -> int:
        """Requests whose last response has not been sent."""
        return self._responder.num_open

    def submit(self, params: GenerateParams, sink: Sink) -> None:
        """Enqueue a request; its answer goes to the sink.

        Raises RequestError: INVALID_ARGUMENT names the field, the value and the range;
        UNAVAILABLE when the queue is full or the server stops. The sink is then not used.

        Requests for explanations and health checks do not use the queue. They are answered at the
        next step, even if the queue is full.
        """
        if params.explain_steps is not None:
            self._explain(params.explain_steps, sink)
            return
        if params.health_check:
            self._answer(sink, lambda: HEALTHY)
            return
        self._inbox.check_open()  # before tokenizing, so that a refusal costs little
        request, response = self.intake.receive(params, sink)
        if params.guide_type is None:
            self._enqueue(request, response)
        else:
            self._compiling.put(request, response, params.guide_type, params.guide)

    def _enqueue(self, request: Request, response: ResponseState) -> None:
        self._inbox.put(request, lambda: self._responder.post(response))

    def refuse(self, sink: Sink, error: RequestError) -> None:
        """Send the error of a failed `submit`, from the responder's thread."""
        self._responder.refuse(sink, error.code, str(error))

    def drain(self) -> None:
        """Reject new requests, and give accepted requests `limits.drain_s` to finish.

        After that, each unfinished request ends with its last response. Returns at once. May be
        called several times and from any thread.
        """
        if self.is_draining:
            return
        self.is_draining = True
        logger.info("draining: requests in flight have %.0f s to finish", self._drain_s)
        self._inbox.refuse(SHUTTING_DOWN)
        self.loop.drain(self._drain_s)

    def _explain(self, num_steps: int, sink: Sink) -> None:
        log = self._step_log
        if log is None:
            raise InvalidField("explain_steps", num_steps, EXPLAIN_OFF)
        self._answer(sink, lambda: replace(HEALTHY, explanation=log.text(num_steps)))

    def _answer(self, sink: Sink, reply: Callable[[], Reply]) -> None:
        """Send a reply at the loop's next step, even if the queue is full."""

        def answer(refused: str | None) -> None:
            if refused is None:
                self._responder.answer(sink, reply)
            else:
                self._responder.refuse(sink, ErrorCode.UNAVAILABLE, refused)

        self._inbox.call(answer)

    def _note_step(self, step: StepRecord) -> None:
        if self._step_log is not None:
            self._step_log.add(step)

    def _watch(self) -> None:
        """Check for a hanging loop or an unload. Runs in the responder's thread while requests are
        open."""
        self._progress.look(self.num_steps, time.monotonic())
        if self._progress.is_hung:
            self._fail(
                f"a step takes longer than limits.engine_timeout_s, which is "
                f"{self._engine_timeout_s:g} s: an engine hangs"
            )
        elif not self.is_draining and self._should_drain():
            self.drain()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            logger.exception("the step loop ended")
            reason = f"the step loop ended: {sentence(error)}"
            self._inbox.close(reason)
            self.loop.lifecycle.fail_all(ErrorCode.INTERNAL, reason)
            self.loop.flush()
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        """Reject new requests, fail open ones, and call `on_failure`.

        The loop's requests are not changed: if the loop hangs, its thread may still use them later.
        """
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        logger.error("%s", reason)
        self._inbox.close(reason)
        self._responder.fail_all(ErrorCode.INTERNAL, reason)
        self._on_failure(reason)


def _meter(engine: Engine, config: ServerConfig) -> Meter:
    most = min(config.limits.max_draft_len, engine.target.capabilities.max_draft_len)
    auto = next(iter(engine.proposers), "none")
    method = auto if config.proposer == "auto" else config.proposer
    name = next(iter(config.served_model_name), "")
    return Meter(method, most if engine.proposers else 0, config.policy, name)


def _describe(engine: Engine, capacity: int) -> str:
    capabilities = engine.target.capabilities
    rows = f"{capabilities.max_sequences} rows of {capabilities.max_context_len} tokens"
    if capabilities.block_len > 1:
        rows = f"blocks of {capabilities.block_len} tokens"
    each = [f"target {capabilities.bytes_per_token}"]
    each += [f"{name} {p.capabilities.bytes_per_token}" for name, p in engine.proposers.items()]
    return f"cache: {rows}, {capacity / 2**20:.1f} MiB in total; bytes per token: {', '.join(each)}"
