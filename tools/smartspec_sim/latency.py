"""The latency summary of a measured or simulated load. `DEFINITIONS` defines its terms.

Pure functions: request times in, summary out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "e2e")

DEFINITIONS = """\
ttft: time to first token. e2e: time to last token. tpot: (e2e - ttft) / (tokens - 1). Gaps between
chunks are not token latencies: a chunk has up to k + 1 tokens.

Latencies count from the time at which a request was due, so they include delays of the client and
of the server (no coordinated omission). `from_sent`: latencies from the time of sending.
Percentiles are interpolated linearly.

token_goodput_tps: generated tokens of finished requests per second. slo_goodput_rps: requests per
second that met every target. Both rates use the time from the first due request to the last
token."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request, in seconds from the start of the load.

    scheduled_s: time at which it was due. sent_s: time of sending. first_s, last_s: times of the
    first and the last token; None without tokens. error: why it did not finish, else None.
    """

    scheduled_s: float
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.error is None and self.last_s is not None

    def ttft_s(self, start_s: float) -> float:
        assert self.first_s is not None
        return self.first_s - start_s

    def e2e_s(self, start_s: float) -> float:
        assert self.last_s is not None
        return self.last_s - start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in milliseconds; None means no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def is_met(self, timing: RequestTiming) -> bool:
        """Whether the request met all targets; latencies count from the time it was due.

        A request with one token meets every tpot target. A failed request meets no target.
        """
        if not timing.is_finished:
            return False
        start_s = timing.scheduled_s
        found = (timing.ttft_s(start_s), timing.tpot_s or 0.0, timing.e2e_s(start_s))
        asked = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return all(
            most_ms is None or 1e3 * seconds <= most_ms
            for seconds, most_ms in zip(found, asked, strict=True)
        )


def parse_slo(text: str) -> Slo:
    """Parse targets such as `ttft:200 tpot:20 e2e:5000`. Raises ValueError."""
    targets: dict[str, float] = {}
    for part in text.split():
        name, _, value = part.partition(":")
        name = "e2e" if name == "e2el" else name  # vLLM's word
        if name not in SLO_NAMES or name in targets:
            raise ValueError(f"{part!r}: must be ttft:MS, tpot:MS or e2e:MS, each at most once")
        try:
            targets[name] = float(value)
        except ValueError:
            raise ValueError(
                f"{part!r}: {value!r} is not a number; give milliseconds, such as ttft:200"
            ) from None
        if not targets[name] > 0:
            raise ValueError(f"{part!r}: the target must be above 0 ms")
    if not targets:
        raise ValueError("no target given; give at least one, such as ttft:200")
    return Slo(targets.get("ttft"), targets.get("tpot"), targets.get("e2e"))


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
        **_latencies(finished, lambda timing: timing.scheduled_s),
        "from_sent": _latencies(finished, lambda timing: timing.sent_s),
        "send_lag_ms": statistics_ms([t.sent_s - t.scheduled_s for t in timings]),
    }
    if slo is not None:
        num_met = sum(slo.is_met(timing) for timing in timings)
        summary["num_slo_met"] = num_met
        summary["slo_goodput_rps"] = _rate(num_met, elapsed_s)
    return summary


def with_errors(timings: Sequence[RequestTiming], slo: Slo | None = None) -> dict[str, Any]:
    """The summary, plus the number of requests per error, in descending order."""
    errors = Counter(timing.error for timing in timings if timing.error is not None)
    return {**summarise(timings, slo), "errors": dict(errors.most_common())}


def _latencies(
    finished: Sequence[RequestTiming], start: Callable[[RequestTiming], float]
) -> dict[str, Mapping[str, float | None]]:
    return {
        "ttft_ms": statistics_ms([timing.ttft_s(start(timing)) for timing in finished]),
        "tpot_ms": statistics_ms([s for timing in finished if (s := timing.tpot_s) is not None]),
        "e2e_ms": statistics_ms([timing.e2e_s(start(timing)) for timing in finished]),
    }


def statistics_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90, p95 and p99 in milliseconds; all None without values."""
    names = ["mean", *(f"p{q}" for q in PERCENTILES)]
    if not seconds:
        return dict.fromkeys(names)
    values = [np.mean(seconds), *np.percentile(seconds, PERCENTILES)]
    return {name: 1e3 * float(value) for name, value in zip(names, values, strict=True)}


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0
