"""The page of the fidelity study: points and their verdicts, and where the time differs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smartspec_py.core.cost import CostModel
from studies.document import table
from studies.fidelity_live import DRAFT, LIMITS, TARGET, Run
from studies.fidelity_replay import Ratio, Replay, mean_server_s, outside_s, send_lag_s
from studies.fidelity_steps import (
    PARTS,
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
    pairs: Sequence[StepPair],
    alone: Sequence[tuple[int, float, float]],
    causes: Mapping[str, Mapping[str, float]],
    runs: Sequence[Run],
) -> list[str]:
    repeats = max(run.repeat for run in runs)
    return [
        _answer(points),
        _points_table(points),
        _full_table([point for point in points if point.share is None]),
        "## Where they differ",
        "Every recorded step, charged as the simulator charges it from the step's own rows, "
        "tokens, drafts and context, beside what it took; milliseconds, measured / charged. "
        "*Between* is the loop's time from one step to the next.",
        _lines_table(lines_of(by_kind(pairs)), ["steps", *PARTS]),
        "Steps without prompts, by rows:",
        _lines_table(lines_of(by_rows(pairs)), ["rows", *PARTS]),
        "Steps that read prompts beside decoding:",
        _lines_table(lines_of(by_prompt(pairs)), ["prompt", *PARTS]),
        _alone_text(alone),
        _context_text(pairs),
        "Outside the loop, and acceptance; milliseconds and tokens a request, means:",
        _outside_table(points),
        "Mean latency below saturation, simulated over real, had the simulator charged for what "
        "was measured:",
        _causes_table(causes),
        "## How it was made",
        _method(points, repeats),
    ]


def _answer(points: Sequence[Point]) -> str:
    below = [point for point in points if point.share is not None]
    full = [point for point in points if point.share is None]
    worst = max(below, key=lambda point: abs(point.ratios["e2e_ms_mean"].value - 1))
    rates = [abs(point.ratios["saturation_rps"].value - 1) for point in full]
    num = sum(abs(point.ratios["e2e_ms_mean"].value - 1) <= MOST_LATENCY for point in below)
    met = sum(point.is_met for point in full)
    return (
        f"**Mean latency is within 10 % of the server's at {num} of {len(below)} points up to 0.7 "
        f"of saturation; the worst is {worst.ratios['e2e_ms_mean'].value:.3f} of it "
        f"({worst.policy}, {shown_share(worst.share)}). Saturation rate and throughput are within "
        f"5 % for {met} of {len(full)} policies; the worst rate is off by "
        f"{100 * max(rates):.1f} %.**"
    )


def _points_table(points: Sequence[Point]) -> str:
    """Of the loads below saturation."""
    full = {p.policy: p.ratios["saturation_rps"].real for p in points if p.share is None}
    header = ("policy", "load / saturation", "req/s", "requests", "mean latency, s", "ratio")
    return table(
        (*header, "of p50", "of p99", "of TTFT", "of tokens/s", "verdict"),
        [
            (
                point.policy,
                f"{point.rate / full[point.policy]:.2f}" if point.policy in full else "?",
                f"{point.rate:.2f}",
                sum(len(one.records) for one in point.replays),
                _both(point.ratios["e2e_ms_mean"], 1e-3),
                _with_half(point.ratios["e2e_ms_mean"]),
                *(point.ratios[n].value for n in ("e2e_ms_p50", "e2e_ms_p99", "ttft_ms_mean")),
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


def _lines_table(lines: Sequence[Line], header: Sequence[str]) -> str:
    names = [name.removesuffix("_s") for name in header]
    return table(
        (names[0], "number", "share of time", *names[1:], "charged / measured", "median"),
        [
            (
                line.name,
                line.num_steps,
                f"{100 * line.share:.1f} %",
                *(
                    f"{1e3 * line.measured[part]:.2f} / {1e3 * line.charged[part]:.2f}"
                    for part in PARTS
                ),
                line.ratio,
                line.median,
            )
            for line in lines
        ],
    )


def _alone_text(alone: Sequence[tuple[int, float, float]]) -> str:
    if not alone:
        return "No prompt was read while nothing else ran."
    tokens, measured, charged = (statistics.fmean(column) for column in zip(*alone, strict=True))
    return (
        f"{len(alone)} prompts of {tokens:.0f} tokens were read while nothing else ran: "
        f"{1e3 * measured:.1f} ms from scheduling to the first token, charged "
        f"{1e3 * charged:.1f} ms ({charged / measured:.3f})."
    )


def _context_text(pairs: Sequence[StepPair]) -> str:
    slopes = context_slopes(pairs)
    if not slopes:
        return "Too few steps of one size to say what context costs."
    shown = "; ".join(
        f"{rows} rows: {real:.2f} / {charged:.2f} ({num} steps)"
        for rows, num, real, charged in slopes
    )
    return (
        "A token of context adds to a target pass, in microseconds a row, measured (least squares) "
        f"/ charged: {shown}."
    )


def _outside_table(points: Sequence[Point]) -> str:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{1e3 * value:.1f}"

    return table(
        ("policy", "load", "send lag", "Triton and wire", "drafted", "accepted", "same"),
        [
            (
                point.policy,
                shown_share(point.share),
                ms(mean_server_s(point.replays, send_lag_s)),
                ms(mean_server_s(point.replays, outside_s)),
                *(
                    " / ".join(
                        f"{statistics.fmean(getattr(r, name)[side] for r in point.replays):.1f}"
                        for side in (0, 1)
                    )
                    for name in ("drafted", "accepted")
                ),
                _alike(point.replays),
            )
            for point in points
        ],
    )


def _alike(replays: Sequence[Replay]) -> str:
    """Requests whose accepted drafts are just as the oracle says, where that can be said."""
    numbers = [one.num_alike for one in replays if one.num_alike is not None]
    return f"{sum(numbers)} of {sum(len(one.records) for one in replays)}" if numbers else ""


def _causes_table(causes: Mapping[str, Mapping[str, float]]) -> str:
    policies = list(next(iter(causes.values())))
    rows = [(name, *(found[policy] for policy in policies)) for name, found in causes.items()]
    return table(("charged", *policies), rows)


def _method(points: Sequence[Point], repeats: int) -> str:
    failed = sum(one.num_failed for point in points for one in point.replays)
    cut = sum(one.num_cut for point in points for one in point.replays)
    return f"""\
A real Triton server on this machine, pair {TARGET} + {DRAFT} (the shipped pair, expanded without
changing what it computes), {LIMITS.max_sequences} rows, prompt chunks of {LIMITS.prefill_chunk},
greedy. `smartspec load` sends the four workloads' prompts in turn, open loop, Poisson, from a
process of its own; {repeats} repeats of each point, with other arrivals in each, spread over the
whole measurement. Saturation is all requests at once; its rate is taken over all but the last
{LIMITS.max_sequences} to end. Loads were chosen as shares of the rate that a warm-up showed; the
table has them as shares of the rate measured afterwards. Every replay begins with that warm-up's
record, from which the server had learned too.

Each record is replayed with the same arrivals, lengths and policy, the profile that this server
left (`engine.profile_cache`: passes measured at its start, host time learned from its last steps),
and the exact acceptance of its texts: they are written once without drafts, `smartspec trace
--oracle` says at every position how many drafts of each proposer would be right, and a text does
not depend on what is drafted. So that lengths are known, each prompt asks for as many tokens as its
text has, and requests end by their length; one that ends by its end token takes a draw more, which
the simulator leaves out. In bfloat16 near-ties
can still change a text; *same* counts the requests that accepted exactly as many drafts as the
oracle says. {failed} requests failed, {cut} ended at another length than their text.

Ratios, and the columns that begin with *of*, are simulated over real. Of latencies, each is the
mean over the repeats of each one's mean, median or 99th percentile; +- is half of a 95 % interval
of the ratio, from the repeats' own ratios (Student's t). A verdict is by the ratio itself: within
10 % for mean latency and 5 % for throughput up to 0.7 of saturation, within 5 % for saturation rate
and throughput above."""


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
