"""Replays records of a real server in the simulator, and compares the two.

A record gets the oracle of its texts, and is read and run as `smartspec simulate --record` does.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.serving.config import DRAFT_MODEL, LimitsConfig
from smartspec_sim.latency import RequestTiming, summarise
from smartspec_sim.record import read_record
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.traces.oracle import OracleSequence
from smartspec_sim.traces.walks import walk
from smartspec_sim.workload import SimRequest

PAUSE_S = 1.0
"""Between a warm-up and what is replayed behind it."""

WARM_UP_SEQUENCES = 1_000_000

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t of a 95 % interval, by the repeats less one, from 1."""


@dataclass(frozen=True)
class Replay:
    """A run and its simulation, with timings of both in the order of `records`. drafted, accepted:
    tokens per request, real and simulated. num_alike: requests that accepted as many drafts as the
    oracle predicts for a fixed length; None for other policies."""

    records: Sequence[Mapping[str, Any]]
    real: Sequence[RequestTiming]
    simulated: Sequence[RequestTiming]
    drafted: tuple[float, float]
    accepted: tuple[float, float]
    num_cut: int
    num_failed: int
    num_alike: int | None


def with_oracle(path: Path, texts: Sequence[OracleSequence]) -> list[dict[str, Any]]:
    """The lines of a record, by arrival, each with the oracle of its text. Also written as
    NAME.replay.jsonl, for `smartspec simulate --record`."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: (line["scheduled_s"], line["index"]))
    for line in lines:
        text = texts[line["index"] % len(texts)]
        line["kind"] = ""  # the server was told none
        line["accepted"] = {
            name: {"accepted": list(one.accepted)}
            | ({} if one.available is None else {"available": list(one.available)})
            for name, one in text.proposers.items()
        }
    written = "".join(f"{json.dumps(line)}\n" for line in lines)
    path.with_suffix(".replay.jsonl").write_text(written, encoding="utf-8")
    return lines


def sim_limits(limits: LimitsConfig) -> SimLimits:
    assert limits.prefill_chunk is not None
    return SimLimits(
        max_sequences=limits.max_sequences,
        max_queue=limits.max_queue,
        max_draft_len=limits.max_draft_len,
        prefill_chunk=limits.prefill_chunk,
    )


def replay(
    path: Path,
    warm_up: Path,
    policy: str,
    texts: Sequence[OracleSequence],
    cost: CostModel,
    limits: LimitsConfig,
) -> Replay:
    """Simulate the record, after the policy's warm-up, from which the server had learned. Requests
    that failed are simulated and counted in num_failed, but are in no latency."""
    warm = [_numbered_apart(request) for request in _requests(warm_up, texts)]
    begun = Simulation(warm, policy, cost, sim_limits(limits)).run()
    lines, requests = with_oracle(path, texts), _requests(path, texts)
    shift_s = begun.elapsed_s + PAUSE_S
    later = [replace(r, arrival_s=r.arrival_s + shift_s) for r in requests]
    result = Simulation([*warm, *later], policy, cost, sim_limits(limits)).run()
    served = [lines[request.sequence - 1] for request in requests]
    lens = [texts[line["index"] % len(texts)].num_generated for line in served]
    n = max(1, len(served))
    num_drafted = result.num_drafted - begun.num_drafted
    num_accepted = result.num_accepted - begun.num_accepted
    return Replay(
        records=served,
        real=real_timings(served),
        simulated=[_earlier(timing, shift_s) for timing in result.timings[len(warm) :]],
        drafted=(_total(served, "total_draft_tokens") / n, num_drafted / n),
        accepted=(_total(served, "total_accepted_draft_tokens") / n, num_accepted / n),
        num_cut=sum(r["num_output_tokens"] != m for r, m in zip(served, lens, strict=True)),
        num_failed=sum(line["error"] is not None for line in lines),
        num_alike=_num_alike(served, policy, texts),
    )


def _requests(path: Path, texts: Sequence[OracleSequence]) -> list[SimRequest]:
    with_oracle(path, texts)
    return read_record(path.with_suffix(".replay.jsonl"), accept=0.5)


def _numbered_apart(request: SimRequest) -> SimRequest:
    return replace(request, sequence=WARM_UP_SEQUENCES + request.sequence)


def _earlier(timing: RequestTiming, shift_s: float) -> RequestTiming:
    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - shift_s

    return replace(
        timing,
        scheduled_s=timing.scheduled_s - shift_s,
        sent_s=timing.sent_s - shift_s,
        first_s=moved(timing.first_s),
        last_s=moved(timing.last_s),
    )


def real_timings(lines: Sequence[Mapping[str, Any]]) -> list[RequestTiming]:
    """As clients saw them, from the first arrival on."""
    start_s = min(line["scheduled_s"] for line in lines)
    return [
        RequestTiming(
            scheduled_s=line["scheduled_s"] - start_s,
            sent_s=line["sent_s"] - start_s,
            first_s=line["chunk_s"][0] - start_s,
            last_s=line["chunk_s"][-1] - start_s,
            num_tokens=line["num_output_tokens"],
            error=line["error"],
        )
        for line in lines
    ]


def saturation_rate(timings: Sequence[RequestTiming], batch_size: int) -> float:
    """Requests a second while more waited than were served: all but the last batch_size."""
    ends = sorted(t.last_s for t in timings if t.last_s is not None)
    num = max(1, len(ends) - batch_size)
    return num / ends[num - 1]


def latencies(timings: Sequence[RequestTiming]) -> dict[str, float]:
    """Milliseconds and tokens a second, by name."""
    found = summarise(timings)
    names = [("ttft_ms", "mean")] + [("e2e_ms", name) for name in ("mean", "p50", "p99")]
    chosen = {f"{name}_{statistic}": found[name][statistic] for name, statistic in names}
    return chosen | {"tokens_per_s": found["token_goodput_tps"]}


@dataclass(frozen=True)
class Ratio:
    """Simulated over real, of the means over the repeats. half: of its 95 % interval, from the
    repeats' own ratios; None for one repeat."""

    real: float
    simulated: float
    half: float | None

    @property
    def value(self) -> float:
        return self.simulated / self.real

    def is_within(self, most: float) -> bool:
        return abs(self.value - 1) <= most

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.value}


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """pairs: of each repeat, real and simulated."""
    real = statistics.fmean(pair[0] for pair in pairs)
    simulated = statistics.fmean(pair[1] for pair in pairs)
    ratios = [b / a for a, b in pairs]
    half = None
    if len(ratios) > 1:
        t = T_95[min(len(ratios) - 1, len(T_95)) - 1]
        half = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return Ratio(real, simulated, half)


def mean_server_s(
    replays: Sequence[Replay], of: Callable[[Mapping[str, Any]], float]
) -> float | None:
    """Mean over all requests that the server sent its times of; None without any."""
    found = [of(line) for one in replays for line in one.records if "server_s" in line]
    return statistics.fmean(found) if found else None


def outside_s(line: Mapping[str, Any]) -> float:
    """The part of a request's latency that the server's loop does not see: Triton before it, the
    responder, Triton and the network after it."""
    server = line["server_s"]
    inside_s = server["last_token"] - server["arrival"]
    return float(line["chunk_s"][-1] - line["sent_s"] - inside_s)


def send_lag_s(line: Mapping[str, Any]) -> float:
    return float(line["sent_s"] - line["scheduled_s"])


def _num_alike(
    lines: Sequence[Mapping[str, Any]], policy: str, texts: Sequence[OracleSequence]
) -> int | None:
    kind, _, length = policy.partition(":")
    if kind != "fixed":
        return None
    expected = [
        sum(step.num_accepted for step in walk(text, DRAFT_MODEL, int(length))) for text in texts
    ]
    is_alike = (
        line["total_accepted_draft_tokens"] == expected[line["index"] % len(texts)]
        for line in lines
    )
    return sum(map(bool, is_alike))


def _total(lines: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(line[name]) for line in lines)
