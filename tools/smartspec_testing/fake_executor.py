"""A fake of TensorRT-LLM's executor (`tensorrt_llm.bindings.executor`, version 1.2.1).

It stands where that module stands, with the same names, so that the adapter can be tested and the
traffic it makes can be simulated without a GPU. It does what the documentation and the sources
of the executor say of requests, iterations and responses (`smartspec_trtllm/signatures.json` has
the sources of the names):

- Requests run by iterations and finish at different times. Who runs: `fake_executor_scheduler`.
  Who does not fit, and everyone behind, waits; who can never fit gets a response with an error.
- A request with drafts is one context step and ends after it with 1 to k+1 tokens, `is_final`, and
  the finish reason NOT_FINISHED, unless the end token or max_tokens was really reached. Those past
  `max_input_len` are dropped. With all drafts dropped, it is a request without drafts.
- A request without drafts generates up to max_tokens, which is cut to what `max_seq_len` leaves
  beside the drafts (without drafts: beside `max_draft_len`). With `streaming` each iteration
  responds with its token, otherwise one response brings all.
- The end token is not among the tokens; a stop word is.
- A cancel takes effect after the next iteration: one more response may come before the final one.
- Iteration statistics lag as `executionLoop` of executorImpl.cpp makes them: an entry's latency is
  that of the iteration before, and counts from the end of the one before that, idle time included.
  Where an iteration ends all requests, an entry with latency 0.0 is there before its responses.
- Requests are validated in `fetchNewRequests`. One that asks for what cannot be, such as more
  drafts than the engine was built for, is a response with `has_error()`, as any failure of one is.
  After `shutdown` every call raises, but `can_enqueue_requests`, which says False.
- Blocks of the KV cache are stored when a request ends, found by later prompts, and lower the time
  of a context step, not its charge: `fake_executor_blocks`.
- Log-probabilities are 0.0 with an engine for external drafts, whose decoding layer writes none,
  and where they are normalized over the one token of greedy text. They are always of all tokens
  that the request generated. Generation logits are the model's, of the new tokens.
- Fields that would change the text and are not doubled are refused on enqueueing, by name.

Tokens follow the rule of `fake_engine`: `fake_executor_text`. There are no threads: iterations
run inside `await_responses` and take the time of a cost model.

What it cannot know: numbers (near-ties, low precision), GPU memory, the real executor's latency,
and any behaviour that its documentation leaves out; for the points of which we know that we do not
know them there is a switch in `Behaviour`. That stop words are part of the text, and that nothing
of a cancelled request is kept, are assumptions. The real executor has never been run by this
project; where the two differ, the fake is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_testing.clock import Clock, RealClock
from smartspec_testing.fake_executor_graphs import make_graphs
from smartspec_testing.fake_executor_jobs import Behaviour, EngineLimits, Job
from smartspec_testing.fake_executor_limits import (
    check_doubled,
    limits_of,
    make_blocks,
    permissive_config,
    problem_of,
)
from smartspec_testing.fake_executor_plain import plain
from smartspec_testing.fake_executor_scheduler import Scheduled, Scheduler
from smartspec_testing.fake_executor_stats import (
    Counts,
    IterationStats,
    RequestStats,
    RequestStatsPerIteration,
    StatsLog,
    drafts_of,
    perf_metrics,
)
from smartspec_testing.fake_executor_text import TextRule, make_result
from smartspec_testing.fake_executor_values import (
    ExternalDraftTokensConfig,
    FinishReason,
    OutputConfig,
    Request,
    RequestType,
    Response,
    Result,
    SamplingConfig,
)

NOTHING = Scheduled((), (), 0, 0)

__all__ = [
    "Behaviour",
    "DoubleBindings",
    "EngineLimits",
    "Executor",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "IterationStats",
    "OutputConfig",
    "Request",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "SamplingConfig",
]


def __getattr__(name: str) -> Any:
    """The classes of the bindings that only carry values. A test pins that all names are here."""
    try:
        return plain(name)
    except KeyError:
        raise AttributeError(f"the fake has no {name}") from None


class Executor:
    """Made from an engine directory's `config.json`, or from its limits.

    executor_config: without one, nothing is limited beyond the engine, and all logits are kept.
    cost, clock: an iteration lasts `cost.target_s` of its rows and of the tokens it computes, that
    is, those it is charged for less the cached ones; without a cost model it takes no time.
    launch_s: seconds that an iteration takes beyond that where it replays no CUDA graph.
    hold_back_prob: probability, drawn from `seed`, that an iteration passes a waiting request over
    though it would fit; less than 1. error_prob: that a request ends with an error instead of its
    first step; less than 1 or 1.
    """

    def __init__(
        self,
        model_path: EngineLimits | str | PathLike[str],
        model_type: Any = None,
        executor_config: Any = None,
        *,
        cost: CostModel | None = None,
        launch_s: float = 0.0,
        clock: Clock | None = None,
        hold_back_prob: float = 0.0,
        error_prob: float = 0.0,
        seed: int = 1,
        behaviour: Behaviour = Behaviour(),  # noqa: B008 - it is frozen
    ) -> None:
        if not 0.0 <= hold_back_prob < 1.0:
            raise ValueError(f"hold_back_prob must be in [0, 1), got {hold_back_prob}")
        if not 0.0 <= error_prob <= 1.0:
            raise ValueError(f"error_prob must be in [0, 1], got {error_prob}")
        config = executor_config or permissive_config()
        limits = limits_of(model_path, config)
        self._limits, self._config = limits, config
        self._cost, self._launch_s = cost, launch_s
        self._graphs = make_graphs(config, limits.max_batch_size)
        self._clock = clock or RealClock()
        self._error_prob = error_prob
        self._random = random.Random(seed)
        self._behaviour = behaviour
        self._rule = TextRule(limits.vocab_size, behaviour)
        self._blocks = make_blocks(limits, config.kv_cache_config)
        self._scheduler = Scheduler(
            limits,
            self._blocks,
            behaviour,
            config.enable_chunked_context,
            hold_back_prob,
            self._random,
        )
        self._stats = StatsLog(
            self._blocks,
            limits.max_batch_size,
            behaviour.fills_specdec_stats,
            config.iter_stats_max_iterations,
            config.request_stats_max_iterations,
        )
        self._latency_s, self._latency_since_s = 0.0, self._clock.now()
        self._num_iterations = self._num_ended = self._num_accepted = 0
        self._next_id = 1
        self._cancelled: set[int] = set()
        self._ready: list[Response] = []
        self._is_shut_down = False

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def num_free_blocks(self) -> int:
        """Not of the bindings, for tests: see `BlockPool`."""
        return self._blocks.num_free_blocks

    @property
    def num_replayed(self) -> int:
        """Not of the bindings, for tests: iterations that replayed a CUDA graph."""
        return self._graphs.num_replayed

    @property
    def num_held_blocks(self) -> int:
        """Not of the bindings, for tests: 0 where nothing is in flight."""
        return self._blocks.num_held_blocks

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut_down

    def enqueue_request(self, request: Request) -> int:
        (request_id,) = self.enqueue_requests([request])
        return request_id

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Raises RuntimeError, and takes none of them, where the fake cannot do what one asks."""
        self._require_running()
        for request in requests:
            check_doubled(request)
        return [self._enqueue(request) for request in requests]

    def _enqueue(self, request: Request) -> int:
        request_id = self._next_id
        self._next_id += 1
        error, limit = problem_of(request, self._limits, self._config), self._config.max_queue_size
        if error is None and limit is not None and len(self._scheduler.waiting) >= limit:
            error = f"the queue is full: max_queue_size is {limit}"
        if error is None:
            job = self._make_job(request_id, request)
            error = self._scheduler.refusal(job)
        if error is None:
            self._scheduler.add(job)
        else:
            self._ready.append(Response(request_id, error, request.client_id))
        return request_id

    def _make_job(self, request_id: int, request: Request) -> Job:
        limits, num_input = self._limits, len(request.input_token_ids)
        drafts = request.drafts
        reserve = len(drafts) or limits.max_draft_len
        return Job(
            request_id,
            request,
            drafts[: max(limits.max_input_len - num_input, 0)],
            min(request.max_tokens, limits.max_seq_len - num_input - reserve),
            self._rule.key_of(request),
            list(request.input_token_ids),
            self._clock.now(),
        )

    def await_responses(
        self,
        first: timedelta | int | list[int] | None = None,
        timeout: timedelta | None = None,
        *,
        id: int | None = None,
        ids: list[int] | None = None,
    ) -> list[Any]:
        """Called as (timeout), (id, timeout) or (ids, timeout); the last has a list for each id.

        Iterates until there are responses or `timeout` has passed on the clock; all of them.
        At least one iteration is run where none are ready, however short the timeout. Where nothing
        can ever come, no timeout raises RuntimeError instead of blocking for good.
        """
        self._require_running()
        match first:
            case timedelta():
                timeout = first
            case int():
                id = first
            case list():
                ids = first
        if ids is not None:
            return [self._await(number, timeout) for number in ids]
        return self._await(id, timeout)

    def _await(self, id: int | None, timeout: timedelta | None) -> list[Response]:
        deadline_s = None if timeout is None else self._clock.now() + timeout.total_seconds()
        while not self._num_ready(id) and self._scheduler.jobs:
            self._iterate()
            if deadline_s is not None and self._clock.now() >= deadline_s:
                break
        if not self._num_ready(id):
            if deadline_s is None:
                raise RuntimeError("nothing is in flight: would wait for ever")
            self._clock.sleep(max(deadline_s - self._clock.now(), 0.0))
        taken = [response for response in self._ready if id in (None, response.request_id)]
        others = [response for response in self._ready if id not in (None, response.request_id)]
        self._ready = others
        return taken

    def _num_ready(self, id: int | None) -> int:
        return sum(1 for response in self._ready if id in (None, response.request_id))

    def get_num_responses_ready(self, id: int | None = None) -> int:
        self._require_running()
        return self._num_ready(id)

    def cancel_request(self, id: int) -> None:
        """An unknown or finished request is ignored."""
        self._require_running()
        if any(job.request_id == id for job in self._scheduler.jobs):
            self._cancelled.add(id)

    def get_latest_iteration_stats(self) -> list[Any]:
        """Of the iterations since the last call."""
        self._require_running()
        return self._stats.take_iterations()

    def get_latest_request_stats(self) -> list[Any]:
        """Empty unless request_stats_max_iterations is set."""
        self._require_running()
        return self._stats.take_requests()

    def get_latest_debug_tensors(self) -> list[Any]:
        self._require_running()
        return []

    def get_kv_cache_event_manager(self) -> None:
        """The fake keeps no events, as the real one with event_buffer_max_size 0."""
        self._require_running()

    def shutdown(self) -> None:
        self._require_running()
        self._is_shut_down = True

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the executor was shut down")

    def _iterate(self) -> None:
        start_s = self._clock.now()
        scheduled = self._scheduler.schedule()
        self._num_iterations += 1
        for job in scheduled.context:
            job.mark_scheduled(self._num_iterations, start_s)
        if self._behaviour.lags_latency:
            self._log(scheduled, self._latency_s)
        self._spend(scheduled)
        num_ready = len(self._ready)
        for job in scheduled.jobs:
            job.num_iterations += 1
            if job.has_read_all:
                self._step(job)
        self._end_cancelled()
        ended = [r for r in self._ready[num_ready:] if r.has_error() or r.result.is_final]
        self._num_ended = len(ended)
        self._num_accepted = sum(job.num_accepted for job in scheduled.context)
        now_s = self._clock.now()
        if not self._behaviour.lags_latency:
            self._log(scheduled, now_s - start_s)
        elif not self._scheduler.jobs:
            self._log(NOTHING, 0.0)
        self._latency_s, self._latency_since_s = now_s - self._latency_since_s, now_s

    def _log(self, scheduled: Scheduled, latency_s: float) -> None:
        """An entry: who runs in the iteration that begins, and what the one before brought."""
        num_drafting, num_drafted = drafts_of(scheduled.context)
        counts = Counts(
            iteration=self._num_iterations,
            now_s=self._clock.now(),
            latency_s=latency_s,
            num_queued=len(self._scheduler.waiting),
            num_active=len(self._scheduler.jobs),
            num_completed=self._num_ended,
            num_drafting=num_drafting,
            num_drafted=num_drafted,
            num_accepted=self._num_accepted,
        )
        self._stats.add(scheduled, counts)

    def _spend(self, scheduled: Scheduled) -> None:
        jobs = scheduled.jobs
        launch_s = 0.0 if self._graphs.replays(scheduled) else self._launch_s
        if self._cost is None or not jobs:
            return
        num_tokens = len(scheduled.generating) + scheduled.num_computed
        context_len = sum(len(job.tokens) for job in jobs) / len(jobs)
        self._clock.sleep(launch_s + self._cost.target_s(len(jobs), num_tokens, context_len))

    def _step(self, job: Job) -> None:
        """Draw the tokens of one iteration and respond."""
        if job.num_generated == 0 and self._error_prob and self._random.random() < self._error_prob:
            self._fail(job)
            return
        draws, finish = self._rule.draw_step(job)
        if job.num_generated == 0:
            job.first_token_s = self._clock.now()
        position = len(job.tokens)
        new_tokens = [draw.token for draw in draws]
        job.log_probs += [self._log_prob(position + i) for i in range(len(new_tokens))]
        job.tokens += new_tokens
        job.num_accepted += sum(draw.is_accepted for draw in draws)
        is_final = bool(job.drafts) or finish != FinishReason.NOT_FINISHED
        if is_final or job.request.streaming:
            self._respond(job, new_tokens, finish, is_final)
        if is_final:
            self._scheduler.remove(job, stores=True)

    def _log_prob(self, position: int) -> float:
        if self._limits.max_draft_len or self._config.normalize_log_probs:
            return 0.0
        return self._rule.log_prob(position)

    def _fail(self, job: Job) -> None:
        error = "failed as asked, by error_prob"
        self._ready.append(Response(job.request_id, error, job.request.client_id))
        self._scheduler.remove(job, stores=False)

    def _respond(
        self, job: Job, new_tokens: list[int], finish: FinishReason, is_final: bool
    ) -> None:
        result = make_result(job, self._rule, new_tokens, finish, is_final)
        if job.request.output_config.return_perf_metrics and is_final:
            number, now_s = self._num_iterations, self._clock.now()
            result.request_perf_metrics = perf_metrics(job, self._blocks, number, now_s)
        self._ready.append(Response(job.request_id, result, job.request.client_id))

    def _end_cancelled(self) -> None:
        """Jobs that did not end in the iteration after their cancel end now."""
        for job in self._scheduler.jobs:
            if job.request_id in self._cancelled:
                self._respond(job, [], FinishReason.CANCELLED, is_final=True)
                self._scheduler.remove(job, stores=self._behaviour.keeps_blocks_after_cancel)
        self._cancelled.clear()


class DoubleBindings:
    """The fake as a module whose executors are made with these options beside the real ones.

    It stands for `tensorrt_llm.bindings.executor` where an executor is made from a directory:
    `DoubleBindings(clock=clock, behaviour=Behaviour(...)).Executor(path, model_type, config)`.
    """

    def __init__(self, **options: Any) -> None:
        class OptionsExecutor(Executor):
            def __init__(
                self, model_path: Any, model_type: Any = None, executor_config: Any = None
            ) -> None:
                super().__init__(model_path, model_type, executor_config, **options)

        OptionsExecutor.__name__ = "Executor"
        self.Executor: Callable[..., Executor] = OptionsExecutor

    def __getattr__(self, name: str) -> Any:
        return globals()[name] if name in globals() else __getattr__(name)
