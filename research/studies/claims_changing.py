"""The claims about load and text that change, in the same way as `claims_served`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from studies.claims_loads import CHANGING, DYNAMIC_RATES
from studies.claims_rows import Finding, graded
from studies.claims_runs import ADAPTIVE, ALL, ENGINE, FIXED, SWEPT, Case, Outcome, Outcomes
from studies.document import table

SHIFT_RATE = 4.0
SU_FIXED = ("fixed:2", "fixed:4")
SU_POLICIES = ("none", *SU_FIXED, "batch_table", *ADAPTIVE)


def cases() -> list[Case]:
    found = [Case(ENGINE, "dynamic", 0.0, p) for p in SWEPT]
    found += [Case(ENGINE, "shift", SHIFT_RATE, p) for p in ALL]
    return found + [Case(ENGINE, "changing", 0.0, p) for p in SU_POLICIES]


def changing(found: Outcomes) -> list[Finding]:
    return [_dynamic(found), _shift(found), _su_traffic(found)]


def _dynamic(found: Outcomes) -> Finding:
    outcomes = {p: found[Case(ENGINE, "dynamic", 0.0, p)] for p in SWEPT}
    phases = [f"{rate:g} req/s" for rate in DYNAMIC_RATES]
    fixed = [p for p in outcomes if p.startswith("fixed")]
    ours, none = outcomes["goodput"], outcomes["none"]
    best = min(outcomes[p].latency_s for p in (*fixed, "none"))
    fastest = [min(outcomes[p].by_phase[i] for p in (*fixed, "none")) for i in range(3)]
    worst = max(a / b for a, b in zip(ours.by_phase, fastest, strict=True))
    return Finding(
        "load 1 -> 16 -> 48 req/s, 40 s each",
        "SmartSpec [A]",
        "adapts; no figure known to us",
        f"mean latency {ours.latency_s / none.latency_s:.3f} of none's and "
        f"{ours.latency_s / best:.3f} of the best single choice's",
        graded(ours.latency_s <= 1.02 * best, worst <= 1.05),
        f"in each phase at most {worst:.3f} of the best choice for it in hindsight; the last is "
        "overload, where waiting is nearly all",
        (_phase_table("Load 1 -> 16 -> 48 req/s on engine 7B", outcomes, phases),),
    )


def _shift(found: Outcomes) -> Finding:
    outcomes = {p: found[Case(ENGINE, "shift", SHIFT_RATE, p)] for p in ALL}
    candidates = [outcomes[p] for p in ("none", *FIXED)]
    ours = outcomes["goodput"]
    best = min(one.latency_s for one in candidates)
    fastest = [min(one.by_phase[i] for one in candidates) for i in range(2)]
    shares = [a / b for a, b in zip(ours.by_phase, fastest, strict=True)]
    return Finding(
        "a change of data set in mid-run",
        "SmartSpec [A]",
        "adapts; no figure known to us",
        f"mean latency {ours.latency_s / best:.3f} of the best fixed k's; before the change "
        f"{shares[0]:.3f}, after it {shares[1]:.3f} of the best for each",
        graded(ours.latency_s <= 1.01 * best, max(shares) <= 1.05),
        "Sonnet (acceptance 0.85), then CNN/DailyMail (0.57), and nobody tells the server",
        (
            _phase_table(
                f"Sonnet, then CNN/DailyMail, {SHIFT_RATE:g} req/s on engine 7B",
                outcomes,
                ("Sonnet", "CNN/DailyMail"),
            ),
        ),
    )


def _phase_table(title: str, outcomes: Mapping[str, Outcome], phases: Sequence[str]) -> str:
    none = outcomes["none"]
    rows = [
        (
            policy,
            one.latency_s / none.latency_s,
            *(f"{s:.2f} ({s / base:.3f})" for s, base in _pairs(one, none)),
            f"{one.mean_draft_len:.2f}",
        )
        for policy, one in outcomes.items()
    ]
    header = ("policy", "mean latency / none's", *phases, "mean k")
    return (
        f"{title}. Mean latency of requests by when they came, in seconds, and relative to no "
        "drafts.\n\n" + table(header, rows)
    )


def _pairs(one: Outcome, none: Outcome) -> list[tuple[float, float]]:
    return list(zip(one.by_phase, none.by_phase, strict=True))


def _su_traffic(found: Outcomes) -> Finding:
    latency = {p: found[Case(ENGINE, "changing", 0.0, p)].latency_s for p in SU_POLICIES}
    better = min(latency[p] for p in SU_FIXED)
    by_table, ours = better / latency["batch_table"] - 1, better / latency["goodput"] - 1
    rows = [(p, f"{s:.2f} s", better / s) for p, s in latency.items()]
    return Finding(
        "the table under traffic that changes",
        "Su et al. [Q]",
        "about 9 % faster than the better of two fixed s",
        f"{CHANGING[0]:g} and {CHANGING[1]:g} req/s in turn, s = 2 or 4: table {by_table:+.1%}, "
        f"goodput {ours:+.1%}",
        graded(by_table > 0, by_table >= 0.07),
        "the table is made for acceptance 0.7, and is not told what it really is",
        (
            "Mean latency under changing traffic on engine 7B; speed relative to the better of "
            "s = 2 and s = 4.\n\n" + table(("policy", "latency", "speed"), rows),
        ),
    )
