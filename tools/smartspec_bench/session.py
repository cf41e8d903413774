"""A load run on one live server: warm-up, then all turns. It saves the document after each turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_bench.client import Client
from smartspec_bench.document import About, Ceilings, Document, Phase, write
from smartspec_bench.phases import phase_of
from smartspec_bench.plan import (
    CLOSED,
    IDLE_S,
    Capacity,
    Settings,
    Turn,
    expected_s,
    points,
    requests,
    turns,
)
from smartspec_bench.verdicts import comparisons, summary
from smartspec_bench.warm_up import ceilings, cost_of, warm_up
from smartspec_launch.triton_server import Address
from smartspec_sim.latency import Slo

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """Options of a run.

    timeout_s: limit per request. minutes: no phase begins later than this after the first phase;
    None means no limit.
    """

    settings: Settings
    max_tokens: int
    temperature: float
    timeout_s: float
    slo: Slo | None
    minutes: float | None

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "return_spec_metrics": "detailed",
            # Policies share their prompts: with the prefix cache only the first would prefill them.
            "reuse_prefix": False,
        }


@dataclass(frozen=True)
class Listener:
    """Callbacks of a run.

    say: receives a message about the current work. measured: receives the machine's limits, the
    number of phases and the expected seconds. ended: receives a finished phase, the number of
    remaining phases and the remaining seconds.
    """

    say: Say
    measured: Callable[[Ceilings, int, float], None]
    ended: Callable[[Phase, int, float], None]


class Kept:
    """The document of all measurements so far, in memory and on disk."""

    def __init__(self, about: About, path: Path | None) -> None:
        """path: file to write; None for memory only. Raises OSError if it cannot be written."""
        self._path = path
        self.keep(Document(about))

    def keep(self, document: Document) -> None:
        self.document = document
        if self._path is not None:
            write(self._path, document)


async def run(
    address: Address, max_sequences: int, load: Load, kept: Kept, listener: Listener
) -> None:
    """Do the whole run. `kept` has all measurements, even after an error. Raises BenchError."""
    settings = load.settings
    async with Client(address, load.fields, load.timeout_s) as client:
        capacity = await warm_up(client, settings, max_sequences, listener.say)
        found = ceilings(capacity, cost_of(address), max_sequences)
        kept.keep(replace(kept.document, ceilings=found))
        todo = list(turns(points(settings, capacity), settings))
        clock = _Clock(todo, capacity)
        listener.measured(found, len(todo), clock.left_s)
        for number, turn in enumerate(todo, start=1):
            if load.minutes is not None and clock.spent_s > 60 * load.minutes:
                listener.say(f"The run stops: the limit of {load.minutes:g} minutes is reached.")
                break
            listener.say(f"{turn.name}, repeat {turn.repeat + 1}")
            phase = await _measure(client, turn, load.slo)
            clock.passed(turn)
            kept.keep(with_phase(kept.document, phase))
            listener.ended(phase, len(todo) - number, clock.left_s)


async def _measure(client: Client, turn: Turn, slo: Slo | None) -> Phase:
    due = requests(turn)
    before = await client.pass_times_s()
    if turn.point.shape == CLOSED:
        exchanges = await client.closed_loop(turn.policy, [one.prompt for one in due])
    else:
        exchanges = await client.open_loop(turn.policy, due)
    await asyncio.sleep(IDLE_S)
    await client.wait_idle()
    after = await client.pass_times_s()
    return phase_of(turn, exchanges, slo, (after[0] - before[0], after[1] - before[1]))


def with_phase(document: Document, phase: Phase) -> Document:
    """The document with one more phase, and with new comparisons and summary."""
    phases = [*document.phases, phase]
    found = comparisons(phases)
    return replace(document, phases=phases, comparisons=found, summary=summary(found))


class _Clock:
    """Estimates the remaining seconds: expected time, scaled by actual / expected time so far."""

    def __init__(self, todo: list[Turn], capacity: Capacity) -> None:
        self._capacity = capacity
        self._left_s = sum(expected_s(turn, capacity) for turn in todo)
        self._expected_s = 0.0
        self._start_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def left_s(self) -> float:
        scale = self.spent_s / self._expected_s if self._expected_s else 1.0
        return scale * self._left_s

    def passed(self, turn: Turn) -> None:
        expected = expected_s(turn, self._capacity)
        self._left_s -= expected
        self._expected_s += expected
