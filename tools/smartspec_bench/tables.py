"""What a run prints, and its phases as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, geometric_mean

from rich.console import Console
from rich.table import Table

from smartspec_bench.document import About, Ceilings, Comparison, Document, Phase, Spread
from smartspec_bench.plan import SHAPES
from smartspec_bench.ratios import Means, paired

SPREADS = ("e2e_ms", "ttft_ms", "itl_ms", "tpot_ms", "send_lag_ms")
FIELDS = ("mean", "p50", "p90", "p95", "p99")
PLAIN = (
    *("policy", "shape", "workload", "load", "rate_rps", "seed", "repeat"),
    *("num_sent", "num_finished", "num_failed", "duration_s"),
    *("token_goodput_tps", "slo_goodput_rps", "mean_draft_len", "acceptance_rate"),
)
Key = tuple[int, str, float, str]
Measure = Callable[[Phase], float | None]

COMPARED: tuple[tuple[str, Measure], ...] = (
    ("e2e_ms mean", lambda phase: phase.e2e_ms.mean),
    ("e2e_ms p99", lambda phase: phase.e2e_ms.p99),
    ("ttft_ms mean", lambda phase: phase.ttft_ms.mean),
    ("tpot_ms mean", lambda phase: phase.tpot_ms.mean),
    ("token_goodput_tps", lambda phase: phase.token_goodput_tps),
)
"""Of `bench compare`."""


def print_about(console: Console, about: About) -> None:
    """The machine and what is on it, before anything is measured."""
    versions = ", ".join(f"{name} {number}" for name, number in about.versions.items())
    for name, text in (
        ("machine", about.machine),
        ("pair", about.pair),
        ("versions", versions),
        ("commit", about.commit or "unknown"),
    ):
        console.print(f"{name:9}{text}", highlight=False, markup=False)


def print_ceilings(console: Console, ceilings: Ceilings) -> None:
    rates = ", ".join(f"{name} {rps:.2f}" for name, rps in ceilings.saturation_rps.items())
    passes = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in ceilings.target_pass_ms.items())
    console.print(f"saturation, requests/s: {rates}", highlight=False, markup=False)
    console.print(f"target's pass, ms by sequences: {passes}", highlight=False, markup=False)
    console.print(f"copy in memory, GB/s: {ceilings.copy_gb_per_s:.1f}", highlight=False)
    for note in ceilings.notes:
        console.print(note, highlight=False, markup=False)


def phase_line(phase: Phase) -> str:
    load = f" at {phase.load:g}" if phase.load else ""
    mean_ms = phase.e2e_ms.mean
    latency = "no request finished" if mean_ms is None else f"mean e2e {mean_ms:.0f} ms"
    failed = f", {phase.num_failed} failed" if phase.num_failed else ""
    return (
        f"{phase.repeat + 1}: {phase.shape}{load}, {phase.workload}, {phase.policy}: "
        f"{latency}, {phase.num_finished} requests{failed}"
    )


def print_results(console: Console, document: Document) -> None:
    console.print(phases_table(document.phases))
    console.print(verdicts_table(document.comparisons))
    for line in document.summary:
        console.print(line, highlight=False, markup=False)


def phases_table(phases: Sequence[Phase]) -> Table:
    """A line for each point and policy: means over its repeats."""
    table = Table(title="Means over the repeats; milliseconds")
    for column in ("shape", "workload", "load", "policy"):
        table.add_column(column)
    for column in ("repeats", "e2e", "e2e p99", "ttft", "tpot", "tokens/s", "drafted", "failed"):
        table.add_column(column, justify="right")
    for (shape, workload, load, policy), members in by_point(phases).items():
        table.add_row(
            SHAPES[shape],
            workload,
            f"{load:g}" if load else "",
            policy,
            str(len(members)),
            _mean([phase.e2e_ms.mean for phase in members]),
            _mean([phase.e2e_ms.p99 for phase in members]),
            _mean([phase.ttft_ms.mean for phase in members]),
            _mean([phase.tpot_ms.mean for phase in members]),
            _mean([phase.token_goodput_tps for phase in members]),
            f"{fmean(phase.mean_draft_len for phase in members):.2f}",
            str(sum(phase.num_failed for phase in members)),
        )
    return table


def by_point(phases: Sequence[Phase]) -> dict[Key, list[Phase]]:
    """By shape, workload, load and policy, in that order."""

    def key(phase: Phase) -> Key:
        return SHAPES.index(phase.shape), phase.workload, phase.load, phase.policy

    return {name: list(group) for name, group in groupby(sorted(phases, key=key), key)}


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1f}" if known else ""


def verdicts_table(found: Sequence[Comparison]) -> Table:
    table = Table(title="goodput over the others: ratio and 95 % interval")
    for column in ("shape", "workload", "load", "measure", "against"):
        table.add_column(column)
    for column in ("ratio", "low", "high", "pairs", "bound"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for one in found:
        against = f"{one.role}: {one.against}" if one.role == "best fixed" else one.against
        table.add_row(
            one.shape,
            one.workload,
            f"{one.load:g}" if one.load else "",
            one.metric,
            against,
            f"{one.ratio:.3f}",
            f"{one.low:.3f}",
            f"{one.high:.3f}",
            str(one.num_pairs),
            "" if one.bound is None else f"{one.bound:.2f}",
            "" if one.bound is None else one.verdict,
        )
    return table


def write_csv(path: Path, phases: Sequence[Phase]) -> None:
    """A line a phase; a spread is five columns, such as e2e_ms_p99."""
    columns = [*PLAIN, *(f"{name}_{field}" for name in SPREADS for field in FIELDS)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for phase in phases:
            values = [getattr(phase, name) for name in PLAIN]
            spreads: list[Spread] = [getattr(phase, name) for name in SPREADS]
            writer.writerow(
                [*values, *(getattr(spread, field) for spread in spreads for field in FIELDS)]
            )


def compare_table(before: Document, after: Document) -> Table:
    """Every point and policy that both runs have: after over before, as geometric means.

    The interval is over the repeats, the first against the first and so on. It tells how far the
    phases of a run scatter; what changed on the machine between the runs is not in it.
    """
    title = f"{after.about.date} over {before.about.date}, geometric means over the repeats"
    table = Table(title=title)
    for column in ("shape", "workload", "load", "policy", "measure"):
        table.add_column(column)
    for column in ("before", "after", "ratio", "low", "high"):
        table.add_column(column, justify="right")
    old, new = by_point(before.phases), by_point(after.phases)
    for key in (key for key in new if key in old):
        shape, workload, load, policy = key
        place = (SHAPES[shape], workload, f"{load:g}" if load else "", policy)
        for name, measure in COMPARED:
            first, second = _by_repeat(old[key], measure), _by_repeat(new[key], measure)
            if first and second:
                table.add_row(*place, name, *_sides(first, second))
    return table


def _by_repeat(phases: Sequence[Phase], measure: Measure) -> Means:
    return {phase.repeat: value for phase in phases if (value := measure(phase))}


def _sides(before: Means, after: Means) -> tuple[str, ...]:
    means = geometric_mean(before.values()), geometric_mean(after.values())
    shown = tuple(f"{mean:.1f}" for mean in means)
    ratio = paired(after, before)
    if ratio is None:
        return (*shown, f"{means[1] / means[0]:.3f}", "", "")
    return (*shown, *(f"{value:.3f}" for value in (ratio.value, ratio.low, ratio.high)))
