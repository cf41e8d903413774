"""Computes the time of each start phase from the timestamps in Triton's log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

MARKS = (
    ("Triton", '"TRITONBACKEND_ModelInstanceInitialize: '),
    ("Python", '"initialize: '),
    ("imports", ":engine libraries imported"),
    ("checks", ":context: "),
    ("target", ":loaded engine.model"),
    ("draft", ":loaded engine.draft"),
    ("engines", ":room for "),
    ("profile", ":cache: "),
    ("ports", '"Started HTTPService at '),
)
"""The phases in order, each with a text from the log line that ends it. A phase without such a line
is left out, and its time counts as part of the next phase. This applies to phases of other engines.
engines: TensorRT-LLM engines."""

SHORT_S = 0.05
DAY_S = 86_400
_TIME = re.compile(r"[IWE]\d{4} (\d\d):(\d\d):(\d\d\.\d+) ")


def start_phases(log: str, begin_s: float) -> dict[str, float]:
    """The seconds of each phase. Empty if the log lines do not begin with Triton's timestamps.

    begin_s: when Triton was started, in seconds since the epoch. The log has the UTC time of day.
    """
    ends: dict[str, float] = {}
    for line in log.splitlines():
        name = next((name for name, mark in MARKS if mark in line), None)
        found = _TIME.match(line)
        if found and name is not None:
            hours, minutes, seconds = map(float, found.groups())
            ends.setdefault(name, 3600 * hours + 60 * minutes + seconds)
    spent = (round((end - start) % DAY_S, 3) for start, end in pairwise([begin_s, *ends.values()]))
    return dict(zip(ends, spent, strict=True))


def phases_text(phases: Mapping[str, float]) -> str:
    """Text such as `imports 2.1 s, target 0.4 s`, without phases shorter than SHORT_S."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in phases.items() if value >= SHORT_S)
