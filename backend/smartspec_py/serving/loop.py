"""The step loop: the thread that owns requests and engines.

A step: take news -> expire -> admit -> plan -> propose -> submit -> poll -> apply -> record. The
roster moves requests, the drafters guess, the planner decides; nothing in here knows Triton or
PyTorch. The only text that this thread handles is that of requests with stop words, in the roster.
An exception in a step is the end of the loop, and whoever runs it fails all requests.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.core.planner import BatchTable
from smartspec_py.core.types import SequenceId, SequenceView
from smartspec_py.engines.base import (
    NO_DRAFT,
    Decode,
    Draft,
    Event,
    Prefill,
    Proposer,
    Target,
    Verify,
    Work,
)
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.controller import Controller, Outcome
from smartspec_py.serving.drafters import Drafters, Proposed
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.messages import SHUTTING_DOWN, Update
from smartspec_py.serving.metrics import FLUSH_S, Control, Load, StepSample
from smartspec_py.serving.request import ErrorCode, Request
from smartspec_py.serving.roster import Arrival, Roster
from smartspec_py.serving.step import Decision

__all__ = ["Arrival", "StepLoop", "StepRecord"]

POLL_S = 0.05
"""The longest that a poll waits for an engine with work in flight before news are looked at."""

IDLE_WAIT_S = 0.5
"""The longest that an idle loop waits for a request before it looks whether it should end."""

NUM_RECORDS = 1024
"""Step records kept: at 32 sequences about 10 MiB."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did and took, in seconds.

    start_s: by the loop's clock. num_generated: tokens that requests kept. target_s: the pass of
    its decoding work. total_s: from the plan to the events' end, so that what the parts leave is
    the loop's own work.
    """

    start_s: float
    decision: Decision
    events: Sequence[Event]
    num_rows: int
    num_prefill_tokens: int
    num_drafted: int
    num_generated: int
    plan_s: float
    draft_s: float
    target_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """By the loop's clock. between_s: from the end of the step before, where it was not idle."""

    between_s: float
    start: float
    viewed: float
    planned: float
    proposed: float
    applied: float


@dataclass(frozen=True, slots=True)
class _Step:
    """What went into a step, and what came of it; num_generated: tokens that requests kept."""

    decision: Decision
    proposed: Proposed
    prefills: Sequence[Prefill]
    events: Sequence[Event]
    num_generated: int


class StepLoop:
    """Drives one target and its proposers. `step` is called by one thread, and only there."""

    def __init__(
        self,
        target: Target,
        proposers: Mapping[str, Proposer],
        cost: CostModel,
        budget: CacheBudget,
        inbox: Inbox[Arrival],
        prefill_chunk: int,
        post: Callable[[Update | StepSample | Load], None],
        clock: Callable[[], float] = time.monotonic,
        batch_table: BatchTable | None = None,
        engine_timeout_s: float = math.inf,
    ) -> None:
        """post: takes news for the responder. clock: seconds, any origin. batch_table: None has
        one made from `cost`. engine_timeout_s: see `LimitsConfig`."""
        self._target = target
        self.controller = Controller(
            cost,
            target.capabilities.max_draft_len,
            target.capabilities.max_sequences,
            batch_table,
        )
        self._inbox = inbox
        self._post = post
        self._clock = clock
        capabilities = target.capabilities
        largest = capabilities.max_prefill_tokens
        chunk = None if largest is None else prefill_chunk
        self._batcher = Batcher(capabilities.max_sequences, chunk, largest)
        self._drafters = Drafters(proposers)
        self._roster = Roster(target, self._drafters, self._batcher, budget, inbox, post, clock)
        self._engine_timeout_s = engine_timeout_s
        self._drain_until_s: float | None = None
        self._applied_s = 0.0
        self._shown_load = Load(0, 0)
        self._next_look_s = 0.0
        self._cache_utilization = 0.0
        self._shown_preemptions = 0
        self._shown_switches = 0
        self.records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)

    def run(self) -> None:
        """Step until the inbox is closed; then end what is left."""
        while not self._inbox.is_closed:
            self.step(IDLE_WAIT_S)
        self.fail_all(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)

    def step(self, idle_wait_s: float = 0.0) -> None:
        """One step; waits up to idle_wait_s for a request where there is none.

        Raises EngineStalledError where the target has answered for too long nothing of a request,
        and whatever an engine raises.
        """
        was_busy = bool(self._batcher)
        mail = self._inbox.take(0.0 if was_busy else idle_wait_s)
        for call in mail.calls:
            call(None)
        self._roster.take(mail)
        self._roster.check_engine(self._engine_timeout_s)
        self._roster.expire()
        self._end_drain()
        self._roster.admit()
        start = self._clock()
        if not was_busy:
            # Whoever stops the server asks whether anything is in flight, and a step may be long.
            self._show(self._load(start))
        ready = self._batcher.ready()
        views = self._views(ready)
        viewed = self._clock()
        num_reading, num_background = self._batcher.num_reading, self._num_background()
        decision = self.controller.plan(views, num_reading, num_background)
        planned = self._clock()
        drafts = self._drafters.propose(ready, views, decision.plan, decision.prices)
        proposed = self._clock()
        num_decoding = max(1, decision.num_rows)
        num_tokens = len(ready) + sum(len(d.tokens) for d in drafts.drafts.values())
        prefills = self._batcher.prefills(decision.plan.expected_tokens / num_decoding, num_tokens)
        self._roster.submit([*prefills, *self._decoding_work(ready, drafts.drafts)])
        events = self._target.poll(POLL_S)
        num_before = self._roster.num_generated
        self._roster.apply(events)
        kept = self._roster.num_generated - num_before
        applied = self._clock()
        between_s = start - self._applied_s if was_busy else 0.0
        self._applied_s = applied
        times = _StepTimes(between_s, start, viewed, planned, proposed, applied)
        self._record(_Step(decision, drafts, prefills, events, kept), times)

    def drain(self, grace_s: float) -> None:
        """Let what was taken finish within grace_s, then end it."""
        self._drain_until_s = self._clock() + grace_s

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Give every request that is left its final response. The engines are not used again."""
        self._roster.fail_all(code, message)

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON has it. Not while `run` runs."""
        return {"drafters": self._drafters.state(), "controller": self.controller.state()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Begin with what another loop has learned. kept: of its evidence. Raises KeyError,
        TypeError or ValueError for what is no state of such a loop."""
        self._drafters.restore(state["drafters"], kept)
        self.controller.restore(state["controller"], kept)

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, conversations and what is held do not agree."""
        self._roster.check_integrity()

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting

    @property
    def num_live(self) -> int:
        return self._batcher.num_live

    @property
    def num_preemptions(self) -> int:
        return self._roster.num_preemptions

    def _end_drain(self) -> None:
        if self._drain_until_s is not None and self._clock() >= self._drain_until_s:
            self._roster.cancel_all()

    def _num_background(self) -> int:
        """None where every step ends what it begins, and nobody need count them."""
        has_bursts = self._target.capabilities.max_decode_tokens > 1
        return self._batcher.num_background if has_bursts else 0

    def _views(self, ready: Sequence[Request]) -> list[SequenceView]:
        now = self._clock()
        room = self._roster.cache.draft_room(ready, self._batcher.live)
        return self._drafters.views(ready, room, now)

    def _decoding_work(
        self, ready: Iterable[Request], drafts: Mapping[SequenceId, Draft]
    ) -> Iterable[Work]:
        burst = self._target.capabilities.max_decode_tokens
        for request in ready:
            draft = drafts.get(request.sequence, NO_DRAFT)
            if draft.tokens:
                yield Verify(request.sequence, draft.tokens, draft.probs)
            else:
                yield Decode(request.sequence, min(burst, request.remaining))

    def _record(self, step: _Step, times: _StepTimes) -> None:
        load = self._load(times.applied)
        if not step.events:
            self._show(load)
            return
        decision = step.decision
        decoding = [event for event in step.events if event.sequence in decision.plan.draft_lens]
        record = StepRecord(
            start_s=times.start,
            decision=decision,
            events=step.events,
            num_rows=len(decision.views),
            num_prefill_tokens=sum(len(prefill.tokens) for prefill in step.prefills),
            num_drafted=sum(event.num_drafted for event in step.events),
            num_generated=step.num_generated,
            plan_s=times.planned - times.start,
            draft_s=times.proposed - times.planned,
            target_s=max((event.pass_s for event in decoding), default=0.0),
            total_s=times.applied - times.start,
        )
        self.records.append(record)
        self.controller.observe(
            decision,
            Outcome(
                drafted=step.proposed.num_drafted,
                verified={s: len(d.tokens) for s, d in step.proposed.drafts.items()},
                num_generated=step.num_generated,
                num_prefill_tokens=record.num_prefill_tokens,
                draft_s=record.draft_s if step.proposed.num_drafted else 0.0,
                target_s=record.target_s,
                total_s=record.total_s + times.between_s,
                plan_s=times.planned - times.viewed,
            ),
        )
        self._post(self._sample(record, decoding, load))

    def _sample(self, record: StepRecord, decoding: Sequence[Event], load: Load) -> StepSample:
        num_preempted = self.num_preemptions - self._shown_preemptions
        self._shown_load, self._shown_preemptions = load, self.num_preemptions
        return StepSample(
            num_prefill_tokens=record.num_prefill_tokens,
            num_generated=record.num_generated,
            verifications=[(e.num_drafted, e.num_accepted) for e in decoding if e.num_drafted],
            num_undrafted=sum(len(e.tokens) for e in decoding if not e.num_drafted),
            draft_s=record.draft_s,
            target_s=record.target_s,
            total_s=record.total_s,
            expected_tokens=record.decision.plan.expected_tokens,
            expected_s=record.decision.plan.expected_s,
            load=load,
            num_preempted=num_preempted,
            control=self._control(record) if record.num_rows else None,
        )

    def _control(self, record: StepRecord) -> Control:
        cost, controller = record.decision.cost, self.controller
        num_switches = controller.num_switches - self._shown_switches
        self._shown_switches = controller.num_switches
        factors = (cost.target_base, cost.target_slope, cost.draft_factor)
        return Control(record.decision.reason, num_switches, factors, controller.time_errors)

    def _show(self, load: Load) -> None:
        """The load by itself, where it is another than was shown; a step's sample has its own."""
        if load != self._shown_load:
            self._shown_load = load
            self._post(load)

    def _load(self, now: float) -> Load:
        """The cache is looked at only as often as metrics are handed over, and when it is empty."""
        if now >= self._next_look_s or not self.num_live:
            self._next_look_s = now + FLUSH_S
            cache = self._roster.cache
            used = cache.used(self._batcher.live) / max(1, cache.budget.capacity)
            self._cache_utilization = min(1.0, used)
        return Load(self.num_live, self.num_waiting, self._cache_utilization)
