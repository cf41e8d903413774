"""Tables of a simulation or a measured load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

CAPTION = (
    "ttft, tpot, e2e: mean/p99 in ms from the time a request was due; "
    "drafted, gained: tokens per step and sequence"
)


def simulation_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each load and policy."""
    is_fleet = any("num_replicas" in row for row in rows)
    return fleet_table(rows) if is_fleet else _table(rows)


def fleet_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Replicas and latencies. Fits in 80 columns. A row without latencies means that no number of
    replicas meets the targets."""
    caption = "ttft, tpot, e2e: mean/p99 in ms from the time a request was due"
    targets = dict.fromkeys(text for row in rows for text in row.get("targets", ()))
    if targets:
        caption = f"replicas: the fewest with {', '.join(targets)}; {caption}"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
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


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Fits in 80 columns. The JSON document has the other values."""
    has_slo = any("slo_goodput_rps" in row for row in rows)
    has_failed = any(row["num_failed"] for row in rows)
    table = Table(caption=CAPTION, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
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


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.0f}s"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
