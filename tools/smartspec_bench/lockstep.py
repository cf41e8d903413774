"""Runs policies under load in lockstep: in one process, each with its own loop, engine and clock.

Two phases on a live server are minutes apart, and a shared machine can be a third slower in the
second. Here the loops take turns step by step: the policy with the fewest seconds of service runs
the next step. So a change of the machine's speed that lasts longer than a few steps affects all
policies equally, and cancels in their ratios.

A policy's clock runs only while its own loop runs. If a loop has nothing to do, its clock is set to
the next arrival, so that idle time costs nothing. Each loop learns from its own steps only, as on a
server with this policy alone. Models, texts, planning and step times are real. Triton, HTTP and
other threads are not included; `bench live --overhead` measures them.

Works with every engine, and needs no package that the engine does not need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from smartspec_bench.plan import CLOSED, START, Due, Settings, points, rounds
from smartspec_bench.prompts import PROMPT_SEED, generated
from smartspec_bench.results import BenchError, Recorder, check_answered, phase_of
from smartspec_bench.streams import Exchange, counts_of
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.intake import Intake, cache_budget
from smartspec_py.serving.messages import ResponseState, Update
from smartspec_py.serving.step import StepRecord
from smartspec_testing.clock import Stopwatch
from smartspec_testing.local import LocalSink
from smartspec_testing.offline import OfflineLoop

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig

NONE = "none"
WARM_UP_SEED = PROMPT_SEED - 1
"""No phase has it."""

EXTRA_SLOTS = 4
"""Requests beyond those that the engine serves at once, so that the queue is never empty."""


class Feed:
    """The requests of a phase, one after another: each at its time, or when a slot is free."""

    def __init__(self, due: Iterable[Due] = (), num_slots: int | None = None) -> None:
        """num_slots: so many requests are in flight, and the next one is due when one has ended."""
        self._due, self._num_slots = iter(due), num_slots
        self._next: Due | None = None

    def next_s(self, now_s: float, num_out: int) -> float | None:
        """When the next request is due while `num_out` are in flight. math.inf: when one of them
        has ended. None: there is no further request."""
        if self._num_slots is not None and num_out >= self._num_slots:
            return math.inf
        if self._next is None:
            self._next = next(self._due, None)
            if self._next is not None and self._num_slots is not None:
                self._next = replace(self._next, time_s=now_s)
        return None if self._next is None else self._next.time_s

    def take(self) -> Due:
        """Remove and return the next request."""
        assert self._next is not None, "take() needs a due request"
        taken, self._next = self._next, None
        return taken


class Side:
    """One policy. `begin` starts a phase; `step` until it `is_over`. Times are seconds from its
    begin. Each phase is a tenant of its own: its prompts were answered in other phases too."""

    def __init__(
        self, policy: str, engine: Engine, limits: LimitsConfig, fields: Mapping[str, Any]
    ) -> None:
        """fields: of every request's `GenerateParams`, without text and policy."""
        self.policy = policy
        self.engine = engine
        self.num_ended = 0
        self.exchanges: list[Exchange] = []
        self.tokens: list[list[int]] = []
        """Of each exchange."""
        self.watch = Stopwatch()
        self._limits, self._fields = limits, fields
        self._intake = Intake(engine, limits, policy, clock=self.watch.now)
        self._loop = OfflineLoop(
            engine.target,
            engine.proposers,
            engine.cost,
            self.watch.now,
            budget=cache_budget(engine, limits),
            max_queue=limits.max_queue,
            prefill_chunk=engine.prefill_chunk(limits.prefill_chunk),
            on_update=self._take,
        )
        self._out: dict[int, tuple[Exchange, ResponseState]] = {}
        self._feed, self._tenant = Feed(), ""
        self._start_s = 0.0
        self._ran_before_s = 0.0

    def renewed(self) -> Side:
        """The same on the same engine, without learned estimates."""
        return Side(self.policy, self.engine, self._limits, self._fields)

    @property
    def records(self) -> Sequence[StepRecord]:
        """The last steps."""
        return self._loop.loop.records

    def begin(self, feed: Feed) -> None:
        assert self.is_over, "the phase before is not over"
        self._feed, self._tenant = feed, uuid4().hex
        self.exchanges, self.tokens, self.num_ended = [], [], 0
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
            # The sum may be rounded to just before the due time.
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
        fields["tenant"] = self._tenant
        if prompt.max_tokens is not None:
            fields["max_tokens"] = prompt.max_tokens
        request, response = self._intake.receive(GenerateParams(**fields), LocalSink())
        # Most requests arrive during a step. Latency counts from then.
        request.arrival_s = self._start_s + due.time_s
        exchange = Exchange(len(self.exchanges), due.time_s, prompt.kind)
        self.exchanges.append(exchange)
        self.tokens.append([])
        self._out[request.sequence] = exchange, response
        self._loop.put(request)

    def _take(self, update: Update) -> None:
        exchange, response = self._out[update.sequence]
        response.count(update, len(update.tokens))
        if update.tokens:
            exchange.chunk_s.append(self.now_s)
            exchange.chunk_tokens.append(len(update.tokens))
            self.tokens[exchange.index].extend(update.tokens)
        if not update.is_last:
            return
        if update.error is not None:
            exchange.error = update.error[1]
        exchange.last = counts_of(update.progress)
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
    sides: Mapping[str, Side],
    num_slots: int,
    settings: Settings,
    recorder: Recorder,
    minutes: float = math.inf,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Warm up, then all phases; no phase begins after `minutes`. sides: by policy, with none.

    num_slots: requests that the engine serves at once. Raises BenchError.
    """
    none_rps = _saturation(sides, num_slots, settings, say)
    recorder.document.about["saturation_rps"] = none_rps
    found = points(settings, none_rps)
    end_s = time.monotonic() + 60 * minutes
    for repeat, point, due in rounds(found, settings):
        if time.monotonic() > end_s:
            say(f"{minutes:g} minutes are over")
            break
        say(f"repeat {repeat + 1} of {settings.repeats}, {point.shape} {point.load:g}")
        own = [side.renewed() if point.shape == START else side for side in sides.values()]
        for side in own:
            side.begin(Feed(due, 1 if point.shape == CLOSED else None))
        serve(own)
        plain = next(side.tokens for side in own if side.policy == NONE)
        place = point.shape, settings.workload, point.load
        for side in own:
            same = sum(a == b for a, b in zip(side.tokens, plain, strict=True))
            phase = phase_of(side.policy, place, repeat, side.exchanges)
            recorder.add(replace(phase, num_same_texts=same))


def _saturation(
    sides: Mapping[str, Side],
    num_slots: int,
    settings: Settings,
    say: Callable[[str], object],
) -> float:
    """Requests per second without speculation at a queue that is never empty.

    All policies serve it, so that their loops learn and kernels are compiled.
    """
    say("saturation rate")
    num_slots += EXTRA_SLOTS
    queues = {name: _FullQueue(side, num_slots, settings) for name, side in sides.items()}
    for queue in queues.values():
        queue.side.begin(Feed(queue.due(), num_slots))
    serve(list(sides.values()))
    return queues[NONE].rate_rps()


class _FullQueue:
    """A queue that is never empty, and the interval of it that counts.

    Requests that start together would stay in phase: all prefill, then all decode. So the first
    ones generate only 1 / num_slots, 2 / num_slots, .. of `max_tokens`. The interval begins when
    they have ended. It lasts `saturation_s`, and until another request has ended.
    """

    def __init__(self, side: Side, num_slots: int, settings: Settings) -> None:
        self.side = side
        self._num_slots, self._settings = num_slots, settings
        self._from_s = self._to_s = math.inf

    def due(self) -> Iterator[Due]:
        prompts = generated(self._settings.workload, WARM_UP_SEED, self._settings.template)
        most = self._settings.max_tokens
        for number, prompt in enumerate(islice(prompts, self._num_slots), start=1):
            yield Due(0.0, replace(prompt, max_tokens=math.ceil(most * number / self._num_slots)))
        num_before = 0
        for prompt in prompts:
            now_s, num_ended = self.side.now_s, self.side.num_ended
            if num_ended >= self._num_slots and self._from_s == math.inf:
                self._from_s, num_before = now_s, num_ended
            is_long = now_s >= self._from_s + self._settings.saturation_s
            if is_long and num_ended > num_before:
                self._to_s = now_s
                return
            yield Due(0.0, prompt)

    def rate_rps(self) -> float:
        """Tokens per second, divided by the mean tokens of a request that was not shortened."""
        exchanges = self.side.exchanges
        check_answered(exchanges)
        num_tokens = sum(
            num
            for exchange in exchanges
            for time_s, num in zip(exchange.chunk_s, exchange.chunk_tokens, strict=True)
            if self._from_s < time_s <= self._to_s
        )
        if not num_tokens:
            raise BenchError("no tokens are generated after the prompts of this workload")
        whole = exchanges[self._num_slots :]
        mean = sum(one.num_tokens for one in whole) / len(whole)
        return num_tokens / (self._to_s - self._from_s) / mean
