"""The table of `smartspec simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

CAPTION = "ttft, tpot, e2e: mean/p99 in ms from the time a request was due"


def simulation_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each load and policy. Fits in 80 columns; the JSON document has the other values.

    A row without latencies means that no number of replicas meets the targets.
    """
    is_fleet = any(row["num_replicas"] != 1 or "targets" in row for row in rows)
    names = ["req/s", "policy", "replicas" if is_fleet else "tokens/s", "ttft", "tpot", "e2e"]
    names += ["slo/s"] if any("slo_goodput_rps" in row for row in rows) else []
    names += ["drafted"] if is_fleet else ["drafted", "gained"]
    names += ["failed"] if any(row.get("num_failed") for row in rows) else []
    table = Table(caption=_caption(rows, is_fleet), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    last_rate = None
    for row in rows:
        if last_rate not in (None, row["offered_rps"]):
            table.add_section()
        last_rate = row["offered_rps"]
        cells = _cells(row)
        table.add_row(*(cells.get(name, "-") for name in names))
    return table


def _caption(rows: Sequence[Mapping[str, Any]], is_fleet: bool) -> str:
    if not is_fleet:
        return f"{CAPTION}; drafted, gained: tokens per step and sequence"
    targets = dict.fromkeys(text for row in rows for text in row.get("targets", ()))
    return f"replicas: the fewest with {', '.join(targets)}; {CAPTION}" if targets else CAPTION


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The row's values by column."""
    cells = {"req/s": f"{row['offered_rps']:.2f}", "policy": row["policy"]}
    if "ttft_ms" not in row:
        return cells | {"replicas": f"over {max(row['tried'])}"}
    for name in ("ttft", "tpot", "e2e"):
        cells[name] = f"{_ms(row[f'{name}_ms']['mean'])}/{_ms(row[f'{name}_ms']['p99'])}"
    return cells | {
        "replicas": str(row["num_replicas"]),
        "tokens/s": f"{row['token_goodput_tps']:.0f}",
        "slo/s": f"{row.get('slo_goodput_rps', 0.0):.2f}",
        "drafted": f"{row['mean_draft_len']:.2f}",
        "gained": f"{row['mean_acceptance_len']:.2f}",
        "failed": str(row["num_failed"]),
    }


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.0f}s"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
