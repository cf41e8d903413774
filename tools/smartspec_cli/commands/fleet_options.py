"""The options of `smartspec simulate` that describe a fleet, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smartspec_cli.commands import USAGE_ERROR, fail

if TYPE_CHECKING:
    from smartspec_sim.capacity import Target
    from smartspec_sim.fleet import FleetSpec, Outage
    from smartspec_sim.scenario import Run

DEFAULT_ROUTE = "least"


@dataclass(frozen=True)
class FleetOptions:
    """Values as given. replicas, targets: one of them selects the simulation of a fleet."""

    replicas: int | None
    targets: list[str]
    route: str
    failures: list[str]
    rolling: str | None

    def are_given(self) -> bool:
        """Whether to simulate a fleet. Exits if options of a fleet are given without one."""
        if self.replicas is not None and self.targets:
            fail("--replicas and --target cannot be used together", USAGE_ERROR)
        if self.replicas is not None or self.targets:
            return True
        given = {
            "--route": self.route != DEFAULT_ROUTE,
            "--fail": bool(self.failures),
            "--rolling-restart": self.rolling is not None,
        }
        for option, is_used in given.items():
            if is_used:
                fail(f"{option}: needs --replicas or --target", USAGE_ERROR)
        return False

    def runs(self, runs: list[Run]) -> list[Run]:
        """The runs on the fleet. Raises ValueError if a route does not suit a load."""
        from smartspec_sim.fleet_runs import FleetRun

        fleet, targets = self._fleet(), tuple(map(_target, self.targets))
        return [FleetRun.of(run, fleet, targets) for run in runs]

    def _fleet(self) -> FleetSpec:
        from smartspec_sim.fleet import FleetSpec
        from smartspec_sim.routing import ROUTES

        if self.route not in ROUTES:
            fail(f"--route: got {self.route!r}, must be one of {', '.join(ROUTES)}", USAGE_ERROR)
        failures = tuple(_outage("--fail", text) for text in self.failures)
        rolling = None if self.rolling is None else _outage("--rolling-restart", self.rolling)
        return FleetSpec(self.replicas or 1, self.route, failures, rolling)


def _target(text: str) -> Target:
    from smartspec_sim.capacity import parse_target

    try:
        return parse_target(text)
    except ValueError as error:
        fail(f"--target: {error}; the model is --model", USAGE_ERROR)


def _outage(option: str, text: str) -> Outage:
    """Parse `SECONDS:SECONDS`, the time and the duration of a restart."""
    from smartspec_sim.fleet import Outage

    time, _, restart = text.partition(":")
    try:
        found = Outage(float(time), float(restart))
    except ValueError:
        fail(f"{option}: got {text!r}, must be AT:RESTART in seconds, such as 30:20", USAGE_ERROR)
    for seconds in (found.time_s, found.restart_s):
        if not 0 <= seconds <= 1e7:
            fail(f"{option}: got {seconds:g} s in {text!r}, must be in 0..1e7", USAGE_ERROR)
    return found
