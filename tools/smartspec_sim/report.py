"""Tables and the plot of a simulation or a measured load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

CAPTION = (
    "ttft, tpot, e2e: mean/p99 in ms from the time a request was due; "
    "drafted, gained: tokens per step and sequence"
)


class PlotError(RuntimeError):
    """The plot cannot be drawn; the message says why."""


def simulation_tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """One table per scenario, with a row for each rate and policy."""
    for label in dict.fromkeys(row["scenario"] for row in rows):
        of_label = [row for row in rows if row["scenario"] == label]
        is_fleet = any("num_replicas" in row for row in of_label)
        yield fleet_table(label, of_label) if is_fleet else _scenario_table(label, of_label)


def fleet_table(label: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Replicas and latencies. Fits in 80 columns. A row without latencies means that no number of
    replicas meets the targets."""
    caption = "ttft, tpot, e2e: mean/p99 in ms from the time a request was due"
    targets = dict.fromkeys(text for row in rows for text in row.get("targets", ()))
    if targets:
        caption = f"replicas: the fewest with {', '.join(targets)}; {caption}"
    table = Table(title=label, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("req/s", "policy", "replicas", "ttft", "tpot", "e2e", "drafted", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        cells = [f"{row['offered_rps']:.2f}", row["policy"]]
        if "ttft_ms" not in row:
            table.add_row(*cells, f"over {max(row['tried'])}", *"-----")
            continue
        cells.append(str(row["num_replicas"]))
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            cells.append(f"{_ms(row[name]['mean'])}/{_ms(row[name]['p99'])}")
        table.add_row(*cells, f"{row['mean_draft_len']:.2f}", str(row["num_failed"]))
    return table


def _scenario_table(label: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Fits in 80 columns. The JSON document has the other values."""
    has_slo = any("slo_goodput_rps" in row for row in rows)
    has_failed = any(row["num_failed"] for row in rows)
    table = Table(title=label, caption=CAPTION, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("req/s", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    names = ["tokens/s", "ttft", "tpot", "e2e", *(["slo/s"] if has_slo else []), "drafted"]
    for name in [*names, "gained", *(["failed"] if has_failed else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    last_rate = None
    for row in rows:
        if last_rate not in (None, row["offered_rps"]):
            table.add_section()
        last_rate = row["offered_rps"]
        cells = [f"{last_rate:.2f}", row["policy"], f"{row['token_goodput_tps']:.0f}"]
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            cells.append(f"{_ms(row[name]['mean'])}/{_ms(row[name]['p99'])}")
        cells += [f"{row['slo_goodput_rps']:.2f}"] if has_slo else []
        cells += [f"{row['mean_draft_len']:.2f}", f"{row['mean_acceptance_len']:.2f}"]
        cells += [str(row["num_failed"])] if has_failed else []
        table.add_row(*cells)
    return table


def load_table(summary: Mapping[str, Any]) -> Table:
    """Latencies of a measured load, one row each."""
    table = Table(title="milliseconds")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name in ("ttft", "tpot", "e2e"):
        table.add_row(name, *map(_ms, summary[f"{name}_ms"].values()))
    for name in ("ttft", "e2e"):
        values = summary["from_sent"][f"{name}_ms"].values()
        table.add_row(f"{name} from sent", *map(_ms, values))
    table.add_row("send lag", *map(_ms, summary["send_lag_ms"].values()))
    return table


def print_load(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the table and the other values. summary: the result of `latency.with_errors`."""
    console.print(load_table(summary))
    errors = (f"{count} x {text}" for text, count in summary["errors"].items())
    for line in (*load_lines(summary), *errors):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def load_lines(summary: Mapping[str, Any]) -> list[str]:
    """The results of a measured load that are not latencies."""
    lines = [
        f"{summary['num_finished']} of {summary['num_requests']} requests finished in "
        f"{summary['elapsed_s']:.1f} s: {summary['requests_per_s']:.2f} requests/s",
        f"token_goodput_tps: {summary['token_goodput_tps']:.1f}",
    ]
    if "slo_goodput_rps" in summary:
        lines.append(
            f"slo_goodput_rps: {summary['slo_goodput_rps']:.2f} ({summary['num_slo_met']} requests)"
        )
    return lines


def draw_picture(rows: Sequence[Mapping[str, Any]], path: Path, latency: str = "e2e_ms") -> None:
    """Plot mean latency over request rate, with a line for each scenario and policy.

    If the rows are the results of --target, plot the number of replicas instead. Colours show
    policies, dashes show scenarios. The file's suffix selects the format. Raises PlotError.
    """
    try:
        alt = import_module("altair")
    except ImportError as error:
        raise PlotError("--plot needs altair: pip install 'smartspec-py[plot]'") from error
    is_search = any("targets" in row for row in rows)
    lines = replica_lines(rows) if is_search else latency_lines(rows, latency)
    points = [
        {"scenario": scenario, "policy": policy, "x": x, "y": y}
        for (scenario, policy), line in lines.items()
        for x, y in line
    ]
    title = f"mean {latency.removesuffix('_ms')}, ms (simulated)"
    if is_search:
        title = f"replicas with {', '.join(rows[0]['targets'])} (simulated)"
    chart = alt.Chart(alt.Data(values=points)).mark_line(point=True)
    chart = chart.encode(
        x=alt.X("x:Q", title="offered load, requests/s"),
        y=alt.Y("y:Q", title=title, scale=alt.Scale(type="log")),
        color="policy:N",
        strokeDash="scenario:N",
    ).properties(width=600, height=320)
    try:
        chart.save(path, scale_factor=2)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot: {error}") from error


def latency_lines(
    rows: Sequence[Mapping[str, Any]], latency: str
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points (rate, mean latency) by scenario and policy, in ascending order of rate."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: float(row["offered_rps"])):
        points = lines.setdefault((row["scenario"], row["policy"]), [])
        if row[latency]["mean"] is not None:
            points.append((row["offered_rps"], row[latency]["mean"]))
    return lines


def replica_lines(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points (rate, replicas) by scenario and policy, without those that have no solution."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: float(row["offered_rps"])):
        points = lines.setdefault((row["scenario"], row["policy"]), [])
        if row["num_replicas"] is not None:
            points.append((row["offered_rps"], float(row["num_replicas"])))
    return lines


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.0f}s"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
