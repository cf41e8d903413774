"""The page of the fidelity study: points and their verdicts, and where the time differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smartspec_py.core.cost import CostModel
from studies.document import table
from studies.fidelity_live import DRAFT, LIMITS, TARGET, Run
from studies.fidelity_replay import Ratio, Replay, mean_server_s, outside_s, send_lag_s
from studies.fidelity_steps import (
    Line,
    StepPair,
    by_kind,
    by_prompt,
    by_rows,
    context_slopes,
    lines_of,
)

MOST_LATENCY, MOST_RATE = 0.10, 0.05
"""Relative errors that are asked for: of mean latency up to 0.7 of saturation, and of rates."""


@dataclass(frozen=True)
class Point:
    """A load under a policy, all repeats. share: None is saturation. ratios: by figure."""

    policy: str
    share: float | None
    rate: float
    replays: Sequence[Replay]
    ratios: Mapping[str, Ratio]

    @property
    def is_met(self) -> bool:
        if self.share is None:
            names = ("saturation_rps", "tokens_per_s")
            return all(self.ratios[name].is_within(MOST_RATE) for name in names)
        is_near = self.ratios["e2e_ms_mean"].is_within(MOST_LATENCY)
        return is_near and self.ratios["tokens_per_s"].is_within(MOST_RATE)


def page(
    points: Sequence[Point],
    runs: Sequence[Run],
) -> list[str]:
    repeats = max(run.repeat for run in runs)
    return [
        _answer(points),
        _points_table(points),
        _full_table([point for point in points if point.share is None]),
        _method(points, repeats),
    ]


def _answer(points: Sequence[Point]) -> str:
    below = [point for point in points if point.share is not None]
    full = [point for point in points if point.share is None]
    worst = max(below, key=lambda point: abs(point.ratios["e2e_ms_mean"].value - 1))
    rates = [abs(point.ratios["saturation_rps"].value - 1) for point in full]
    num = sum(abs(point.ratios["e2e_ms_mean"].value - 1) <= MOST_LATENCY for point in below)
    met = sum(point.is_met for point in full)
    near = worst.ratios["e2e_ms_mean"].value
    return (
        "How close is the simulator to the server? **Mean latency is within 10 % of the server's "
        f"at {num} of {len(below)} points up to 0.7 of saturation; at the worst point it is "
        f"{near:.3f} of it ({worst.policy}, {shown_share(worst.share)}). Saturation rate and "
        f"throughput are within 5 % for {met} of {len(full)} policies; the largest error of a rate "
        f"is {100 * max(rates):.1f} %.**"
    )


def _points_table(points: Sequence[Point]) -> str:
    """Of the loads below saturation."""
    full = {p.policy: p.ratios["saturation_rps"].real for p in points if p.share is None}
    header = ("policy", "load / saturation", "req/s", "requests", "mean latency, s", "ratio")
    return table(
        (*header, "of p99", "of TTFT", "of tokens/s", "verdict"),
        [
            (
                point.policy,
                f"{point.rate / full[point.policy]:.2f}" if point.policy in full else "?",
                f"{point.rate:.2f}",
                sum(len(one.records) for one in point.replays),
                _both(point.ratios["e2e_ms_mean"], 1e-3),
                _with_half(point.ratios["e2e_ms_mean"]),
                *(point.ratios[n].value for n in ("e2e_ms_p99", "ttft_ms_mean")),
                point.ratios["tokens_per_s"].value,
                "met" if point.is_met else "missed",
            )
            for point in points
            if point.share is not None
        ],
    )


def _full_table(points: Sequence[Point]) -> str:
    return table(
        (
            "policy, all at once",
            "requests/s",
            "ratio",
            "tokens/s",
            "ratio",
            "of latency",
            "verdict",
        ),
        [
            (
                point.policy,
                _both(point.ratios["saturation_rps"], 1.0),
                _with_half(point.ratios["saturation_rps"]),
                _both(point.ratios["tokens_per_s"], 1.0, 1),
                _with_half(point.ratios["tokens_per_s"]),
                point.ratios["e2e_ms_mean"].value,
                "met" if point.is_met else "missed",
            )
            for point in points
        ],
    )


def _method(points: Sequence[Point], repeats: int) -> str:
    failed = sum(one.num_failed for point in points for one in point.replays)
    cut = sum(one.num_cut for point in points for one in point.replays)
    return f"""\
A real Triton server on this machine with the 88 M and 4 M pair (`{TARGET}` + `{DRAFT}`),
{LIMITS.max_sequences} rows, prompt chunks of {LIMITS.prefill_chunk}, greedy. `smartspec load` sent
the prompts of the four workloads in an open loop with Poisson arrivals, {repeats} repeats of each
point. Saturation is all requests at once; its rate leaves out the last {LIMITS.max_sequences} to
end. The simulator replayed each record with the same arrivals, lengths and policy, the profile
that the server left, and the exact acceptance of its texts (`smartspec trace --oracle`). Requests
ended by their length. {failed} requests failed, {cut} ended at another length than their text.

Ratios are simulated over real. +- is half of a 95 % interval over the repeats. A verdict is *met*
within 10 % for mean latency and 5 % for throughput up to 0.7 of saturation, and within 5 % above.
The JSON file also has the steps by rows and prompt, prompts alone, context, and the parts outside
of the loop."""


def figures(
    points: Sequence[Point],
    pairs: Sequence[StepPair],
    alone: Sequence[tuple[int, float, float]],
    causes: Mapping[str, Mapping[str, float]],
    profile: CostModel,
) -> dict[str, Any]:
    def listed(lines: Sequence[Line]) -> list[dict[str, Any]]:
        return [asdict(line) | {"ratio": line.ratio} for line in lines]

    return {
        "points": [
            {
                "policy": point.policy,
                "share": point.share,
                "rate": point.rate,
                "is_met": point.is_met,
                "ratios": {name: ratio.to_json() for name, ratio in point.ratios.items()},
                "outside_s": mean_server_s(point.replays, outside_s),
                "send_lag_s": mean_server_s(point.replays, send_lag_s),
                "drafted": [one.drafted for one in point.replays],
                "accepted": [one.accepted for one in point.replays],
            }
            for point in points
        ],
        "steps_by_kind": listed(lines_of(by_kind(pairs))),
        "steps_by_rows": listed(lines_of(by_rows(pairs))),
        "steps_by_prompt": listed(lines_of(by_prompt(pairs))),
        "prompts_alone": alone,
        "context": context_slopes(pairs),
        "causes": causes,
        "profile": asdict(profile),
    }


def shown_share(share: float | None) -> str:
    return "all at once" if share is None else f"{share} of saturation"


def _both(ratio: Ratio, factor: float, digits: int = 2) -> str:
    """Simulated / real."""
    return f"{factor * ratio.simulated:.{digits}f} / {factor * ratio.real:.{digits}f}"


def _with_half(ratio: Ratio) -> str:
    half = "?" if ratio.half is None else f"{ratio.half:.3f}"
    return f"{ratio.value:.3f} +- {half}"
