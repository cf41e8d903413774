"""Terminal output of a run, and its phases as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table

from smartspec_bench.document import About, Ceilings, Document, Phase, Spread
from smartspec_bench.ratios import Means, paired
from smartspec_bench.report import blocks
from smartspec_bench.report.points import (
    DRAFT_LEN,
    E2E_MEAN,
    E2E_P99,
    TOKEN_GOODPUT,
    TPOT_MEAN,
    TTFT_MEAN,
    Metric,
    points_of,
)
from smartspec_bench.report.tables import means_table, verdicts_table

SPREADS = ("e2e_ms", "ttft_ms", "itl_ms", "tpot_ms", "send_lag_ms")
FIELDS = ("mean", "p50", "p90", "p95", "p99")
PLAIN = (
    *("policy", "shape", "workload", "load", "rate_rps", "seed", "repeat"),
    *("num_sent", "num_finished", "num_failed", "duration_s"),
    *("token_goodput_tps", "slo_goodput_rps", "mean_draft_len", "acceptance_rate"),
)
SHOWN = (E2E_MEAN, E2E_P99, TTFT_MEAN, TPOT_MEAN, TOKEN_GOODPUT, DRAFT_LEN)
"""Metrics shown on the terminal. The report page has more."""

COMPARED = {
    "e2e_ms mean": E2E_MEAN,
    "e2e_ms p99": E2E_P99,
    "ttft_ms mean": TTFT_MEAN,
    "tpot_ms mean": TPOT_MEAN,
    "token_goodput_tps": TOKEN_GOODPUT,
}
"""Metrics of `bench compare`."""


def print_about(console: Console, about: About) -> None:
    """Print machine, models and versions before the measurements."""
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
    console.print(f"target pass, ms by sequences: {passes}", highlight=False, markup=False)
    console.print(f"memory copy, GB/s: {ceilings.copy_gb_per_s:.1f}", highlight=False)
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
    points = points_of(document.phases)
    found = document.comparisons
    title = "goodput / other policies: ratio and 95 % interval"
    console.print(as_rich(means_table(points, SHOWN)))
    console.print(as_rich(verdicts_table(found, title)))
    for line in document.summary:
        console.print(line, highlight=False, markup=False)


def as_rich(table: blocks.Table) -> Table:
    shown = Table(title=table.caption)
    for at, name in enumerate(table.columns):
        shown.add_column(name, justify="left" if at < table.num_words else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def write_csv(path: Path, phases: Sequence[Phase]) -> None:
    """Write one line per phase. A `Spread` becomes five columns, such as e2e_ms_p99."""
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
    """The ratio after / before for each point and policy that both runs have.

    Ratios are geometric means over the repeats, which are paired by their number. The interval
    shows the variation between phases. It does not show changes of the machine between the runs.
    """
    title = f"{after.about.date} / {before.about.date}, geometric means over the repeats"
    table = Table(title=title)
    for column in ("shape", "workload", "load", "policy", "measure"):
        table.add_column(column)
    for column in ("before", "after", "ratio", "low", "high"):
        table.add_column(column, justify="right")
    old = {(one.shape, one.workload, one.load, one.policy): one for one in points_of(before.phases)}
    for one in points_of(after.phases):
        key = (one.shape, one.workload, one.load, one.policy)
        if key not in old:
            continue
        place = (one.shape, one.workload, f"{one.load:g}" if one.load else "", one.policy)
        for name, metric in COMPARED.items():
            first, second = (_by_repeat(each.phases, metric) for each in (old[key], one))
            if first and second:
                table.add_row(*place, name, *_sides(first, second))
    return table


def _by_repeat(phases: Sequence[Phase], metric: Metric) -> Means:
    return {phase.repeat: value for phase in phases if (value := metric.of(phase))}


def _sides(before: Means, after: Means) -> tuple[str, ...]:
    means = geometric_mean(before.values()), geometric_mean(after.values())
    shown = tuple(f"{mean:.1f}" for mean in means)
    ratio = paired(after, before)
    if ratio is None:
        return (*shown, f"{means[1] / means[0]:.3f}", "", "")
    return (*shown, *(f"{value:.3f}" for value in (ratio.value, ratio.low, ratio.high)))
