"""Numbers as a reader wants them."""

from __future__ import annotations

import math

MISSING = "-"


def digits(value: float | None) -> str:
    """Three significant ones, thousands apart; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def tick(value: float) -> str:
    """Of an axis: no zeros at the end."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio(value: float) -> str:
    """Three decimals: differences of one in a hundred are what is asked; fewer from 10 on."""
    return f"{value:.3f}" if abs(value) < 10 else digits(value)


def interval(low: float, high: float) -> str:
    return f"{ratio(low)} to {ratio(high)}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Such as `1 load`, `1,200 requests`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def measure(name: str) -> str:
    """A comparison's metric in words: `e2e_ms.mean` is the mean end-to-end latency."""
    field, _, statistic = name.partition(".")
    words = {
        "e2e_ms": "end-to-end latency",
        "ttft_ms": "time to first token",
        "itl_ms": "time between tokens",
        "tpot_ms": "time per token",
        "speed_up": "speed-up over none",
    }.get(field, field)
    return f"{statistic} {words}".strip()
