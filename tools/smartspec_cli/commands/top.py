"""`smartspec top`: a live view of a server in the terminal, from its metrics."""

from __future__ import annotations

import re
import time
import urllib.error
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from smartspec_cli.commands import JsonFile, check_outputs, fail, result_console, write_json
from smartspec_launch.address import DIRECT, Address

GAUGES = {
    "num_requests_running": "requests running",
    "num_requests_waiting": "requests waiting",
    "kv_cache_utilization": "KV cache used, share",
    "spec_decode_proposed_length": "drafts per sequence, last step",
    "spec_decode_acceptance_length": "tokens per verification",
    "spec_decode_acceptance_rate": "accepted share of drafts",
    "token_goodput_predicted_tokens_per_second": "tokens/s of step time, predicted",
    "token_goodput_actual_tokens_per_second": "tokens/s of step time, actual",
    "guard_switches_total": "switches of the guard",
    "num_preemptions_total": "preemptions",
}
RATES = {
    "generation_tokens_total": "tokens generated per second",
    "spec_decode_num_draft_tokens_total": "tokens drafted per second",
    "spec_decode_num_accepted_tokens_total": "drafts accepted per second",
    "decoding_steps_total": "decoding steps per second",
}
LINE = re.compile(r"^smartspec_(\w+?)(?:\{.*\})? (\S+)$", re.M)

Values = Mapping[str, float]


def top(
    url: Annotated[str, typer.Option(help="Address of the metrics.")] = Address().metrics_url,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.2, max=60)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show what a running server does: requests, draft lengths, acceptance and tokens per second.

    Ctrl-C ends it. Rates are of the time since the last look. --json writes the last values.
    """
    check_outputs(json=json_file)
    before, before_s = _values(url), time.monotonic()
    console = result_console(json_file)
    rows: dict[str, float] = {}
    try:
        with Live(console=console, auto_refresh=False, transient=once) as live:
            while True:
                time.sleep(interval)
                now, now_s = _values(url), time.monotonic()
                rows = _rows(before, now, now_s - before_s)
                before, before_s = now, now_s
                live.update(_table(url, rows), refresh=True)
                if once:
                    break
    except KeyboardInterrupt:
        pass
    if once:
        console.print(_table(url, rows))
    write_json(json_file, rows)


def _values(url: str) -> Values:
    """Each metric of SmartSpec, summed over its labels."""
    try:
        with DIRECT.open(url, timeout=5.0) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        fail(f"--url: {url} does not answer ({error}): give the address of a running server")
    found: dict[str, float] = {}
    for name, value in LINE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    if not found:
        fail(f"--url: {url} has no metrics of SmartSpec: give the metrics address of its Triton")
    return found


def _rows(before: Values, now: Values, seconds: float) -> dict[str, float]:
    gauges = {meaning: now.get(name, 0.0) for name, meaning in GAUGES.items()}
    rates = {
        meaning: (now.get(name, 0.0) - before.get(name, 0.0)) / seconds
        for name, meaning in RATES.items()
    }
    return gauges | rates


def _table(url: str, rows: Mapping[str, float]) -> Table:
    table = Table("", "value", title=url)
    table.columns[1].justify = "right"
    for meaning, value in rows.items():
        table.add_row(meaning, f"{value:.0f}" if value == int(value) else f"{value:.2f}")
    return table
