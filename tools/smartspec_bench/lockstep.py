"""Runs policies under load in lockstep: in one process, each with its own loop, engine and clock.

Two phases on a live server are minutes apart, and a shared machine can be a third slower in the
second. Here the loops take turns step by step: the policy with the fewest seconds of service runs
the next step. So a change of the machine's speed that lasts longer than a few steps affects all
policies equally, and cancels in their ratios.

A policy's clock runs only while its own loop runs. If a loop has nothing to do, its clock is set to
the next arrival, so that idle time costs nothing. Each loop learns from its own steps only, as on a
server with this policy alone. Models, texts, planning and step times are real. Triton, HTTP and
other threads are not included; `bench overhead` measures them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any, Protocol

from smartspec_bench.client import FullQueue
from smartspec_bench.phases import phase_of
from smartspec_bench.plan import (
    CLOSED,
    GLOBAL,
    MIX,
    MIXED,
    NONE,
    Capacity,
    Due,
    Settings,
    Turn,
    needed_workloads,
    points,
    requests,
    turns,
)
from smartspec_bench.prompts import Prompt, generated
from smartspec_bench.session import Kept, Listener, Load, with_phase
from smartspec_bench.streams import Exchange
from smartspec_bench.warm_up import (
    EXTRA_SLOTS,
    NUM_SOLO,
    WARM_UP_SEED,
    ceilings,
    saturation_rps,
)
from smartspec_py.core.types import SpecMetrics
from smartspec_py.serving.config import ServerConfig
from smartspec_py.serving.intake import Engine, Intake, cache_budget
from smartspec_py.serving.messages import ResponseState, Update
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import defaults_of
from smartspec_py.serving.step import StepRecord
from smartspec_testing.clock import Stopwatch
from smartspec_testing.local import LocalSink
from smartspec_testing.offline import OfflineLoop

NOTE = "in lockstep in one process: without Triton and HTTP, each policy on an engine of its own"


class Feed(Protocol):
    """The requests of a phase, one after another."""

    def next_s(self, now_s: float, num_out: int) -> float | None:
        """The time when the next request is due while `num_out` are in flight. math.inf: when one
        of them has ended. None: there is no further request."""
        ...

    def take(self) -> Due:
        """The next."""
        ...


class OpenFeed:
    """Arrivals at their times, whatever the loop does."""

    def __init__(self, due: Sequence[Due]) -> None:
        self._due = list(reversed(due))

    def next_s(self, now_s: float, num_out: int) -> float | None:
        return self._due[-1].time_s if self._due else None

    def take(self) -> Due:
        return self._due.pop()


class SlotFeed:
    """A constant number of requests in flight: the next is due when one has ended."""

    def __init__(self, prompts: Iterator[Prompt], num_slots: int) -> None:
        self._prompts = prompts
        self._num_slots = num_slots
        self._next: Due | None = None

    def next_s(self, now_s: float, num_out: int) -> float | None:
        if num_out >= self._num_slots:
            return math.inf
        if self._next is None:
            prompt = next(self._prompts, None)
            self._next = None if prompt is None else Due(now_s, prompt)
        return None if self._next is None else self._next.time_s

    def take(self) -> Due:
        assert self._next is not None, "asked without looking"
        taken, self._next = self._next, None
        return taken


class Side:
    """One policy. `begin` starts a phase; `step` until it `is_over`. Times are seconds from its
    begin."""

    def __init__(
        self,
        policy: str,
        engine: Engine,
        config: ServerConfig,
        fields: Mapping[str, Any],
        watch: Stopwatch | None = None,
    ) -> None:
        """fields: of every request's `GenerateParams`, without text and policy. watch: None creates
        one."""
        self.policy = policy
        self.engine = engine
        self.config = config
        self.num_ended = 0
        self.passes_s = (0.0, 0.0)
        """Seconds of the phase in draft passes, and in target passes."""
        self.exchanges: list[Exchange] = []
        self.watch = watch or Stopwatch()
        self._fields = fields
        self._intake = Intake(
            engine, config.limits, defaults_of(engine, config), clock=self.watch.now
        )
        self._loop = OfflineLoop(
            engine.target,
            engine.proposers,
            engine.cost,
            self.watch.now,
            budget=cache_budget(engine, config.limits),
            max_queue=config.limits.max_queue,
            prefill_chunk=engine.prefill_chunk(config.limits),
            on_update=self._take,
            on_step=self._count,
        )
        self._out: dict[int, tuple[Exchange, ResponseState]] = {}
        self._feed: Feed = OpenFeed([])
        self._start_s = 0.0
        self._ran_before_s = 0.0

    def renewed(self) -> Side:
        """The same on the same engine, without learned estimates."""
        return Side(self.policy, self.engine, self.config, self._fields)

    def state(self) -> dict[str, Any]:
        """The estimates that the loop has learned, in the form in which a server stores them."""
        return self._loop.loop.state()

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start with a share of the evidence of another side."""
        self._loop.loop.restore(state, kept)

    def begin(self, feed: Feed) -> None:
        assert self.is_over, "the phase before is not over"
        self._feed = feed
        self.exchanges, self.num_ended, self.passes_s = [], 0, (0.0, 0.0)
        self._start_s, self._ran_before_s = self.watch.now(), self.watch.ran_s

    @property
    def now_s(self) -> float:
        return self.watch.now() - self._start_s

    @property
    def served_s(self) -> float:
        """Seconds of the phase in which the loop ran."""
        return self.watch.ran_s - self._ran_before_s

    @property
    def is_over(self) -> bool:
        return not self._out and self._feed.next_s(self.now_s, 0) is None

    def step(self) -> None:
        """One step of the loop, with all requests that are due by then. Idle time before it is
        skipped."""
        due_s = self._feed.next_s(self.now_s, len(self._out))
        if not self._out and due_s is not None and due_s > self.now_s:
            self.watch.sleep(due_s - self.now_s)
            # Sums of seconds are rounded: what is due must not be missed for it.
            self._put(self._feed.take())
        self._put_due()
        with self.watch.running():
            self._loop.step()

    def _put_due(self) -> None:
        while (due_s := self._feed.next_s(self.now_s, len(self._out))) is not None:
            if due_s > self.now_s:
                return
            self._put(self._feed.take())

    def _put(self, due: Due) -> None:
        prompt = due.prompt
        fields = {**self._fields, "text": prompt.text, "policy": self.policy}
        if prompt.max_tokens is not None:
            fields["max_tokens"] = prompt.max_tokens
        arrival = self._intake.receive(GenerateParams(**fields), LocalSink())
        # It came in the middle of a step, as requests do.
        arrival.request.arrival_s = self._start_s + due.time_s
        exchange = Exchange(len(self.exchanges), due.time_s, prompt.kind)
        self.exchanges.append(exchange)
        self._out[arrival.request.sequence] = exchange, arrival.response
        self._loop.put(arrival.request)

    def _count(self, step: StepRecord) -> None:
        draft_s, target_s = self.passes_s
        self.passes_s = (draft_s + step.draft_s, target_s + step.target_s)

    def _take(self, update: Update) -> None:
        exchange, response = self._out[update.sequence]
        response.count(update.progress)
        if update.tokens:
            exchange.chunk_s.append(self.now_s)
            exchange.chunk_tokens.append(len(update.tokens))
        if not update.is_last:
            return
        if update.error is not None:
            exchange.error = update.error[1]
        exchange.last = {
            "num_steps": update.progress.num_steps,
            "metrics": response.spec.to_json(SpecMetrics.DETAILED),
        }
        self.num_ended += 1
        del self._out[update.sequence]


def serve(sides: Sequence[Side]) -> None:
    """Run phases that have begun until all have ended: in turns, step by step."""
    left = [side for side in sides if not side.is_over]
    while left:
        side = min(left, key=lambda one: one.served_s)
        side.step()
        if side.is_over:
            left.remove(side)


def run(
    sides: Mapping[str, Side], max_sequences: int, load: Load, kept: Kept, listener: Listener
) -> None:
    """Like `session.run`. sides: by policy, for all points. Raises BenchError."""
    settings = load.settings
    capacity = _warm_up(sides, settings, max_sequences, load.max_tokens, listener.say)
    found = ceilings(capacity, sides[NONE].engine.cost, max_sequences, NOTE)
    kept.keep(replace(kept.document, ceilings=found))
    todo = _groups(turns(points(settings, capacity), settings))
    num_left, start_s = sum(map(len, todo)), time.monotonic()
    listener.measured(found, num_left, _expected_s(todo, capacity))
    for number, group in enumerate(todo, start=1):
        spent_s = time.monotonic() - start_s
        if load.minutes is not None and spent_s > 60 * load.minutes:
            listener.say(f"{load.minutes:g} minutes are over")
            break
        listener.say(f"{group[0].name} and the others, repeat {group[0].repeat + 1}")
        for turn in group:
            sides[turn.policy].begin(_feed(turn))
        serve([sides[turn.policy] for turn in group])
        left_s = (time.monotonic() - start_s) / number * (len(todo) - number)
        for turn in group:
            side = sides[turn.policy]
            phase = phase_of(turn, side.exchanges, load.slo, side.passes_s)
            kept.keep(with_phase(kept.document, phase))
            num_left -= 1
            listener.ended(phase, num_left, left_s)


def policies_of(settings: Settings) -> tuple[str, ...]:
    """Those that `run` needs a side for."""
    more = (GLOBAL,) if MIX in settings.shapes else ()
    return tuple(dict.fromkeys((*settings.policies, *more)))


def _groups(todo: Iterator[Turn]) -> list[list[Turn]]:
    """The turns of a point in a repeat, which follow each other."""
    return [list(group) for _, group in groupby(todo, lambda one: (one.repeat, one.point.index))]


def _expected_s(todo: Sequence[Sequence[Turn]], capacity: Capacity) -> float:
    """The expected time if every policy is as fast as `none` at its saturation rate."""
    num = sum(len(requests(group[0])) * len(group) for group in todo)
    return num / capacity.none_rps[MIXED]


def _feed(turn: Turn) -> Feed:
    due = requests(turn)
    if turn.point.shape == CLOSED:
        return SlotFeed((one.prompt for one in due), 1)
    return OpenFeed(due)


def _warm_up(
    sides: Mapping[str, Side],
    settings: Settings,
    max_sequences: int,
    max_tokens: int,
    say: Callable[[str], None],
) -> Capacity:
    """As `warm_up.warm_up`."""
    num_slots = max_sequences + EXTRA_SLOTS

    def rates(policies: Sequence[str], workload: str) -> dict[str, float]:
        say(f"saturation of {', '.join(policies)} on {workload}")
        queues = {name: FullQueue() for name in policies}
        for name, queue in queues.items():
            prompts = _filling(sides[name], queue, workload, num_slots, settings, max_tokens)
            sides[name].begin(SlotFeed(prompts, num_slots))
        serve([sides[name] for name in policies])
        for name, queue in queues.items():
            queue.exchanges = sides[name].exchanges
        return {name: saturation_rps(queue, num_slots) for name, queue in queues.items()}

    saturation = rates(list(sides), MIXED)
    others = (name for name in needed_workloads(settings) if name != MIXED)
    none_rps = {name: rates([NONE], name)[NONE] for name in others}
    none = sides[NONE]
    none.begin(SlotFeed(islice(generated(MIXED, WARM_UP_SEED), NUM_SOLO), 1))
    serve([none])
    return Capacity(saturation, {MIXED: saturation[NONE], **none_rps}, none.now_s / NUM_SOLO)


def _filling(
    side: Side,
    queue: FullQueue,
    workload: str,
    num_slots: int,
    settings: Settings,
    max_tokens: int,
) -> Iterator[Prompt]:
    """Like `Client.full_queue`: the first requests are shorter, and the interval begins when all of
    them have ended."""
    prompts = generated(workload, WARM_UP_SEED)
    for number, prompt in enumerate(islice(prompts, num_slots), start=1):
        yield replace(prompt, max_tokens=math.ceil(max_tokens * number / num_slots))
    for prompt in prompts:
        if side.num_ended >= num_slots and queue.to_s == math.inf:
            queue.start(side.now_s, settings.saturation_s)
        if side.now_s >= queue.to_s:
            return
        yield prompt
