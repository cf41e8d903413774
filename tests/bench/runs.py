"""What the tests of runs under load share: a small run, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from smartspec_bench.document import About, Ceilings, Phase
from smartspec_bench.plan import Settings
from smartspec_bench.session import Listener, Load
from smartspec_py.serving.config import LimitsConfig

ABOUT = About("t", "2026-01-01", "c", "m", 2, {}, "", "p", {}, "short", "d")
LIMITS = LimitsConfig(max_sequences=4, max_queue=64)

SETTINGS = Settings(
    policies=("none", "fixed:2", "goodput"),
    shapes=("mix", "closed"),
    workloads=("mixed",),
    loads=(0.5,),
    repeats=2,
    seconds=0.2,
    min_requests=3,
    num_closed=2,
    saturation_s=0.6,
)
"""A shape is either closed or open to a run; what else they differ in is the plan's."""


@dataclass
class Heard:
    ceilings: list[Ceilings] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    fails_after: int | None = None

    def measured(self, ceilings: Ceilings, num_phases: int, left_s: float) -> None:
        assert left_s > 0
        self.ceilings.append(ceilings)
        self.left.append(num_phases)

    def ended(self, phase: Phase, num_left: int, left_s: float) -> None:
        self.phases.append(phase)
        self.left.append(num_left)
        if len(self.phases) == self.fails_after:
            raise KeyboardInterrupt

    @property
    def listener(self) -> Listener:
        return Listener(lambda text: None, self.measured, self.ended)


def load(settings: Settings, minutes: float | None = None) -> Load:
    return Load(settings, 8, 0.0, 30.0, None, minutes)
