"""How close is the simulator to a real server? The same load on both, point by point.

Run by `scripts/study fidelity`, about 12 minutes on a machine that does nothing else. It starts a
real Triton server, loads it, and replays the records. The environment variable ROUNDS changes the
number of repeats. FOLDER names an earlier measurement, which is then only evaluated again.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.serving.step import StepRecord
from smartspec_sim.observed import load_observed
from smartspec_sim.traces.oracle import OracleSequence
from smartspec_sim.traces.steps import read_steps
from studies.document import publish
from studies.fidelity_live import (
    ALL_AT_ONCE,
    LIMITS,
    PREFILL_CHUNK,
    Load,
    Run,
    expand_pair,
    profile_path,
    read_runs,
    read_texts,
    serving,
    warm_up_of,
    write_prompts,
    write_runs,
)
from studies.fidelity_page import Point, figures, page, shown_share
from studies.fidelity_replay import (
    Ratio,
    Replay,
    latencies,
    ratio_of,
    real_timings,
    replay,
    saturation_rate,
    with_oracle,
)
from studies.fidelity_steps import (
    StepPair,
    pairs_of,
    prompts_alone,
)

FOLDER = Path(".smartspec/fidelity")


@dataclass(frozen=True)
class Settings:
    """shares: of each policy's saturation rate. num_full: requests of a saturated run, all at once.
    point_s: seconds of sending of any other. num_warm: requests before anything counts."""

    shares: Mapping[str, Sequence[float]] = field(
        default_factory=lambda: {
            "none": (0.3, 0.45, 0.6, 0.7),
            "fixed:3": (0.3, 0.45, 0.6, 0.7),
            "goodput": (0.45, 0.7),
        }
    )
    rounds: int = 3
    num_prompts: int = 64
    num_warm: int = 48
    num_full: int = 48
    point_s: float = 10.0
    dtype: str = "auto"


def main() -> None:
    out = Path(sys.argv[1])
    earlier = os.environ.get("FOLDER")
    folder = Path(earlier) if earlier else FOLDER
    settings = Settings(rounds=int(os.environ.get("ROUNDS", "3")))
    if earlier is None:
        measure(folder, settings)
    evaluate(folder, out)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def measure(folder: Path, settings: Settings) -> None:
    """Start the server, load it, keep records, step traces and its profile in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    expand_pair(say)
    say(f"writing {settings.num_prompts} texts and their oracle")
    write_prompts(folder, settings.num_prompts, settings.dtype)
    say("starting the server, which profiles itself")
    with serving(folder, settings.dtype) as server:
        load = Load(server, folder)
        rates = _warm_up(load, folder, settings)
        runs = []
        for repeat in range(1, settings.rounds + 1):
            for run in _runs(settings, rates, repeat):
                num = settings.num_full if run.share is None else 100_000
                try:
                    found = load.offer(run, num, settings.point_s)
                except RuntimeError as error:
                    say(f"{run.name} is left out: {error}")
                    continue
                runs.append(run)
                write_runs(folder, runs)
                say(
                    f"round {repeat} of {settings.rounds}, {run.name}: "
                    f"{found['num_finished']} requests, {found['num_failed']} failed, "
                    f"mean {found['e2e_ms']['mean']:.0f} ms, {found['token_goodput_tps']:.0f} tok/s"
                )


def _warm_up(load: Load, folder: Path, settings: Settings) -> dict[str, float]:
    """Measures saturation rates, which determine the loads, and warms up kernels for all pass
    sizes."""
    rates = {}
    for policy in settings.shares:
        run = warm_up_of(policy)
        load.offer(run, settings.num_warm, settings.point_s)
        lines = with_oracle(run.record(folder), read_texts(folder))
        lines = [line for line in lines if line["chunk_s"]]
        rates[policy] = saturation_rate(real_timings(lines), LIMITS.max_sequences)
        say(f"warm-up, {policy}: saturated at {rates[policy]:.2f} requests/s")
    return rates


def _runs(settings: Settings, rates: Mapping[str, float], repeat: int) -> list[Run]:
    """Runs of one round. Every second round is in reverse order, so that a drift of the machine
    affects all."""
    runs = []
    for policy, shares in settings.shares.items():
        name = policy.replace(":", "")
        runs.append(Run(f"{name}-full-{repeat}", policy, None, ALL_AT_ONCE, repeat))
        for share in shares:
            rate = round(share * rates[policy], 4)
            runs.append(Run(f"{name}-{share}-{repeat}", policy, share, rate, repeat))
    return runs if repeat % 2 else runs[::-1]


def evaluate(folder: Path, out: Path) -> None:
    """Replay what was measured, and write the page."""
    runs, texts = read_runs(folder), read_texts(folder)
    profile = load_observed(profile_path(folder))
    if profile.host_s == profile.host_row_s == 0.0:
        say("the profile has no host time: the server served too little, or was killed")
    points = _points(folder, runs, texts, profile)
    steps = {run.name: list(read_steps(run.steps(folder)).steps) for run in runs}
    pairs = [pair for found in steps.values() for pair in pairs_of(found, profile)]
    alone = _prompts_alone(points, runs, steps, profile)
    causes = _causes(folder, runs, texts, profile, pairs)
    publish(
        out,
        "fidelity",
        "How close the simulator is to the server",
        page(points, runs),
        figures(points, pairs, alone, causes, profile),
    )
    say(f"{sum(point.is_met for point in points)} of {len(points)} points are within their limits")


def _points(
    folder: Path, runs: Sequence[Run], texts: Sequence[OracleSequence], cost: CostModel
) -> list[Point]:
    found = []
    for policy, share in dict.fromkeys((run.policy, run.share) for run in runs):
        members = [run for run in runs if (run.policy, run.share) == (policy, share)]
        say(f"replaying {policy}, {shown_share(share)}")
        replays = [_replay(folder, run, texts, cost) for run in members]
        found.append(Point(policy, share, members[0].rate, replays, _ratios(replays, share)))
    order = ["none", "fixed:3", "goodput"]
    return sorted(found, key=lambda point: (order.index(point.policy), point.share or 9.0))


def _replay(folder: Path, run: Run, texts: Sequence[OracleSequence], cost: CostModel) -> Replay:
    warm_up = warm_up_of(run.policy).record(folder)
    return replay(run.record(folder), warm_up, run.policy, texts, cost, LIMITS)


def _ratios(replays: Sequence[Replay], share: float | None) -> dict[str, Ratio]:
    """By figure, simulated over real."""
    sides = [(_figures_of(one.real, share), _figures_of(one.simulated, share)) for one in replays]
    return {name: ratio_of([(a[name], b[name]) for a, b in sides]) for name in sides[0][0]}


def _figures_of(timings: Sequence[Any], share: float | None) -> dict[str, float]:
    found = latencies(timings)
    if share is None:
        found["saturation_rps"] = saturation_rate(timings, LIMITS.max_sequences)
    return found


def _prompts_alone(
    points: Sequence[Point],
    runs: Sequence[Run],
    steps: Mapping[str, Sequence[StepRecord]],
    profile: CostModel,
) -> list[tuple[int, float, float]]:
    found = []
    for point in points:
        members = [run for run in runs if (run.policy, run.share) == (point.policy, point.share)]
        for run, one in zip(members, point.replays, strict=True):
            found += prompts_alone(one.records, steps[run.name], profile, PREFILL_CHUNK)
    return found


def _causes(
    folder: Path,
    runs: Sequence[Run],
    texts: Sequence[OracleSequence],
    profile: CostModel,
    pairs: Sequence[StepPair],
) -> dict[str, dict[str, float]]:
    """Simulated over real mean latency at the loads below saturation, by policy, had the simulator
    charged for what was measured: one term after the other."""
    variants = _variants(profile, pairs)
    found: dict[str, dict[str, float]] = {name: {} for name in variants}
    for name, cost in variants.items():
        say(f"replaying with {name}")
        for policy in dict.fromkeys(run.policy for run in runs):
            members = [run for run in runs if run.policy == policy and run.share is not None]
            sides = []
            for run in members:
                one = _replay(folder, run, texts, cost)
                real, simulated = latencies(one.real), latencies(one.simulated)
                sides.append(simulated["e2e_ms_mean"] / real["e2e_ms_mean"])
            found[name][policy] = statistics.fmean(sides)
    return found


def _variants(profile: CostModel, pairs: Sequence[StepPair]) -> dict[str, CostModel]:
    """Cost models with measured means in place of the profile's; each has those before it."""
    host_s = statistics.fmean(
        p.measured["host_s"] + p.measured["between_s"] - p.charged["host_s"] for p in pairs
    )
    with_host = replace(profile, host_s=max(0.0, profile.host_s + host_s))
    plain = [p for p in pairs if not p.num_prefill]
    target = _quotient(plain, "target_s")
    draft = _quotient([p for p in plain if p.charged["draft_s"]], "draft_s")
    with_target = replace(with_host, target_base=target, target_slope=target)
    return {
        "the profile as it is": profile,
        f"{1e3 * host_s:+.1f} ms of host a step": with_host,
        f"and target passes x {target:.3f}": with_target,
        f"and draft passes x {draft:.3f}": replace(with_target, draft_factor=draft),
    }


def _quotient(pairs: Sequence[StepPair], part: str) -> float:
    """Measured over charged; 1 without steps."""
    charged = sum(pair.charged[part] for pair in pairs)
    return sum(pair.measured[part] for pair in pairs) / charged if charged else 1.0


if __name__ == "__main__":
    main()
