"""The latency summary of a measured or simulated load.

ttft: time to first token. e2e: time to last token. tpot: (e2e - ttft) / (tokens - 1). Gaps between
chunks are not token latencies: a chunk has up to k + 1 tokens.

Latencies count from the time at which a request was due, so they include delays of the client and
of the server (no coordinated omission). Percentiles are interpolated linearly.

token_goodput_tps: generated tokens of finished requests per second. slo_goodput_rps: requests per
second that met every target. Both rates use the time from the first due request to the last token.

Pure functions: request times in, summary out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request, in seconds from the start of the load.

    scheduled_s: time at which it was due. first_s, last_s: times of the first and the last token;
    None without tokens. error: why it did not finish, else None.
    """

    scheduled_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.error is None and self.last_s is not None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        assert self.last_s is not None
        return self.last_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def latency_s(self, name: str) -> float | None:
        """One of LATENCIES of a finished request."""
        found: float | None = getattr(self, f"{name}_s")
        return found


Slo = dict[str, float]
"""Latency targets in milliseconds, by name."""


def meets(slo: Slo, timing: RequestTiming) -> bool:
    """Whether the request met all targets. A request with one token meets every tpot target. A
    failed request meets no target."""
    return timing.is_finished and all(
        1e3 * (timing.latency_s(name) or 0.0) <= most_ms for name, most_ms in slo.items()
    )


def parse_slo(text: str) -> Slo:
    """Parse targets such as `ttft:200 tpot:20 e2e:5000`. Raises ValueError."""
    slo: Slo = {}
    for part in text.split():
        name, _, value = part.partition(":")
        try:
            if name not in LATENCIES or name in slo or not float(value) > 0:
                raise ValueError
        except ValueError:
            message = f"{part!r}: must be ttft:MS, tpot:MS or e2e:MS, above 0 and at most once"
            raise ValueError(message) from None
        slo[name] = float(value)
    if not slo:
        raise ValueError("no target given; give at least one, such as ttft:200")
    return slo


def summarise(timings: Sequence[RequestTiming], slo: Slo | None = None) -> dict[str, Any]:
    """The summary as a JSON document. Names of values in milliseconds end in _ms."""
    finished = [timing for timing in timings if timing.is_finished]
    start_s = min((timing.scheduled_s for timing in timings), default=0.0)
    end_s = max((timing.last_s for timing in finished if timing.last_s is not None), default=0.0)
    elapsed_s = max(end_s - start_s, 0.0)
    num_tokens = sum(timing.num_tokens for timing in finished)
    summary: dict[str, Any] = {
        "num_requests": len(timings),
        "num_finished": len(finished),
        "num_failed": len(timings) - len(finished),
        "num_tokens": num_tokens,
        "elapsed_s": elapsed_s,
        "requests_per_s": _rate(len(finished), elapsed_s),
        "token_goodput_tps": _rate(num_tokens, elapsed_s),
    }
    for name in LATENCIES:
        seconds = [s for timing in finished if (s := timing.latency_s(name)) is not None]
        summary[f"{name}_ms"] = statistics_ms(seconds)
    if slo is not None:
        summary["num_slo_met"] = sum(meets(slo, timing) for timing in timings)
        summary["slo_goodput_rps"] = _rate(summary["num_slo_met"], elapsed_s)
    return summary


def statistics_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90, p95 and p99 in milliseconds; all None without values."""
    names = ["mean", *(f"p{q}" for q in PERCENTILES)]
    if not seconds:
        return dict.fromkeys(names)
    values = [np.mean(seconds), *np.percentile(seconds, PERCENTILES)]
    return {name: 1e3 * float(value) for name, value in zip(names, values, strict=True)}


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0
