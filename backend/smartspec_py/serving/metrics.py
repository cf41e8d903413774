"""The meter: adds up metric values and flushes the changes to a sink.

Values are added up in plain Python and flushed at most every FLUSH_S, because each call of Triton's
metrics goes to another process and takes 40 us on a busy server. A flush makes about 25 calls under
load, and 4 more for each finished request. `Meter` has no lock: only the responder's thread uses
it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product

from smartspec_py.core.types import FinishReason
from smartspec_py.engines.host_time import Cause
from smartspec_py.serving import metric_families as families
from smartspec_py.serving.messages import LoopState, Progress
from smartspec_py.serving.metric_families import FAMILIES, Family, Kind
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.step import Reason, StepRecord

FLUSH_S = 1.0

COST_PARTS = ("target_base", "target_slope", "draft")
PREDICTORS = ("profile", "corrected")
DECIDERS = tuple(Reason)
"""Label values."""

Series = tuple[Family, tuple[str, ...]]
"""A family, and a value for each of its labels."""

MetricSink = Callable[[Family, tuple[str, ...], float], None]
"""Receives a series and a value: the increase of a counter, the new value of a gauge, or an
observation for a histogram."""


def drop(family: Family, labels: tuple[str, ...], value: float) -> None:
    """A sink that drops everything."""


class Meter:
    """Adds up samples between flushes. Used by one thread. Callers pass the time."""

    def __init__(self, method: str, k_max: int, policy: str, name: str = "") -> None:
        """For `config_info`. method: default proposer. k_max: largest draft length. policy: the
        server's default. name: of the model, for clients."""
        zeros = dict.fromkeys(_counters_from_zero(k_max), 0.0)
        self._counts: dict[Series, float] = defaultdict(float, zeros)
        self._gauges: dict[Series, float] = {}
        self._shown: dict[Series, float] = {}
        self._observations: list[tuple[Series, float]] = []
        self._last_step: StepRecord | None = None  # since the last flush
        self._state = LoopState()
        self._verified: Counter[tuple[int, int]] = Counter()
        self._planned: list[StepRecord] = []
        self._last_flush_s = -math.inf
        self._set(families.CONFIG_INFO, 1.0, method, str(k_max), policy, name)

    def add_step(self, step: StepRecord) -> None:
        self._last_step = step
        self._verified.update(step.verifications)
        self._count(families.DISABLED_STEPS, step.num_undrafted)
        self._count(families.PROMPT_TOKENS, step.num_prefill_tokens)
        self._count(families.GENERATION_TOKENS, step.num_generated)
        self._count(families.DRAFT_TIME, step.draft_s)
        self._count(families.VERIFY_TIME, step.target_s)
        if step.batch_size:
            self._count(families.STEP_TIME, step.total_s)
            self._count(families.DECIDED, 1, step.decision.reason)
            cost = step.decision.cost
            factors = (cost.target_base, cost.target_slope, cost.draft_factor)
            for part, factor in zip(COST_PARTS, factors, strict=True):
                self._set(families.COST_FACTOR, factor, part)
        # Plans do not predict the time of prompt chunks.
        if step.decision.plan.expected_s > 0 and not step.num_prefill_tokens:
            self._planned.append(step)

    def add_request(
        self, progress: Progress, end_s: float, num_tokens: int, reason: FinishReason | None
    ) -> None:
        """Count an accepted request that ended.

        end_s: by the clock of `progress`. reason: None if it ended with an error. Latencies are
        only recorded for requests that were not cancelled and had no error, except for queue time
        and time to first token.
        """
        arrival_s, first_s = progress.arrival_s, progress.first_token_s
        self._observe_span(families.QUEUE_TIME, arrival_s, progress.scheduled_s)
        self._observe_span(families.TTFT, arrival_s, first_s)
        if reason is None:
            self._count(families.FAILED, 1)
        elif reason is FinishReason.CANCELLED:
            self._count(families.CANCELLED, 1)
        else:
            self._count(families.SUCCESS, 1, reason.value)
            if num_tokens > 1:
                self._observe_span(families.TPOT, first_s, progress.last_token_s, num_tokens - 1)
            self._observe_span(families.E2E, arrival_s, end_s)

    def add_rejection(self, code: ErrorCode) -> None:
        """Count a rejected request."""
        self._count(families.REJECTED, 1, code.name.lower())

    def set_state(self, state: LoopState) -> None:
        """Set the state of the loop. Called when it has changed."""
        before, self._state = self._state, state
        self._set(families.RUNNING, state.num_running)
        self._set(families.WAITING, state.num_waiting)
        self._set(families.CACHE, state.cache_utilization)
        self._count(families.PREEMPTIONS, state.num_preemptions - before.num_preemptions)
        self._count(families.SWITCHES, state.num_switches - before.num_switches)
        for cause, host_s in state.host_s.items():
            self._count(families.HOST_TIME, host_s - before.host_s.get(cause, 0.0), cause)
        for predictor, error in zip(PREDICTORS, state.time_errors, strict=True):
            self._set(families.TIME_ERROR, error, predictor)

    @property
    def due_s(self) -> float | None:
        """When to flush next. None if there is nothing to flush."""
        has_values = self._counts or self._gauges or self._last_step or self._observations
        return self._last_flush_s + FLUSH_S if has_values else None

    def flush_if_due(self, sink: MetricSink, now_s: float) -> None:
        """Send all changes to the sink, if they are due. If it raises, the rest of them is lost.

        now_s: seconds of a monotonic clock.
        """
        if self.due_s is None or now_s < self.due_s:
            return
        self._last_flush_s = now_s
        self._count_verifications()
        self._set_goodput()
        self._show_step()
        gauges = {s: value for s, value in self._gauges.items() if self._shown.get(s) != value}
        changes = [*self._counts.items(), *gauges.items(), *self._observations]
        for pending in (self._counts, self._gauges, self._observations):
            pending.clear()
        self._shown |= gauges
        for (family, labels), value in changes:
            sink(family, labels, value)

    def _count_verifications(self) -> None:
        for (drafted, accepted), num in self._verified.items():
            self._count(families.DRAFTS, num)
            self._count(families.DRAFT_TOKENS, drafted * num)
            self._count(families.ACCEPTED, accepted * num)
            for position in range(1, drafted + 1):
                self._count(families.DRAFT_TOKENS_AT, num, str(position))
            for position in range(1, accepted + 1):
                self._count(families.ACCEPTED_AT, num, str(position))
        self._verified.clear()

    def _show_step(self) -> None:
        """Histograms of steps have the last step of each flush."""
        step, self._last_step = self._last_step, None
        if step is None:
            return
        self._observations.append(((families.STEP_LATENCY, ()), step.total_s))
        if num_decoding := len(step.verifications) + step.num_undrafted:
            length = step.num_drafted / num_decoding
            self._observations.append(((families.PROPOSED_LENGTHS, ()), length))

    def _set_goodput(self) -> None:
        """Compare plans with results, over the steps since the last flush."""
        steps, self._planned = self._planned, []
        if not steps:
            return
        expected_s = sum(step.decision.plan.expected_s for step in steps)
        expected_tokens = sum(step.decision.plan.expected_tokens for step in steps)
        self._set(families.GOODPUT_PREDICTED, expected_tokens / expected_s)
        self._set(families.STEP_PREDICTED, expected_s / len(steps))
        if total_s := sum(step.total_s for step in steps):
            num_generated = sum(step.num_generated for step in steps)
            self._set(families.GOODPUT_ACTUAL, num_generated / total_s)

    def _count(self, family: Family, by: float, *labels: str) -> None:
        if by:
            self._counts[family, labels] += by

    def _set(self, family: Family, value: float, *labels: str) -> None:
        self._gauges[family, labels] = float(value)

    def _observe_span(
        self, family: Family, start_s: float | None, stop_s: float | None, parts: int = 1
    ) -> None:
        """Record the span divided by `parts`, unless one of its ends did not happen."""
        if start_s is not None and stop_s is not None:
            self._observations.append(((family, ()), (stop_s - start_s) / parts))


def _counters_from_zero(k_max: int) -> Iterator[Series]:
    """All counter series. They start at 0, because otherwise a rate misses the first increase."""
    values = {
        "position": [str(position) for position in range(1, k_max + 1)],
        "finished_reason": [r.value for r in FinishReason if r is not FinishReason.CANCELLED],
        "reason": [code.name.lower() for code in ErrorCode],
        "decider": DECIDERS,
        "cause": tuple(Cause),
    }
    for family in FAMILIES:
        if family.kind is Kind.COUNTER:
            yield from ((family, labels) for labels in product(*(values[n] for n in family.labels)))
