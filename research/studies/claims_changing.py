"""The claims about load and text that change, in the same way as `claims_served`."""

from __future__ import annotations

from studies.claims_loads import CHANGING, DYNAMIC_RATES
from studies.claims_rows import Finding, graded
from studies.claims_runs import ADAPTIVE, ALL, ENGINE, FIXED, SWEPT, Case, Outcomes

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
    fixed = [p for p in outcomes if p.startswith("fixed")]
    ours, none = outcomes["goodput"], outcomes["none"]
    best = min(outcomes[p].latency_s for p in (*fixed, "none"))
    fastest = [min(outcomes[p].by_phase[i] for p in (*fixed, "none")) for i in range(3)]
    worst = max(a / b for a, b in zip(ours.by_phase, fastest, strict=True))
    return Finding(
        f"load {' -> '.join(f'{rate:g}' for rate in DYNAMIC_RATES)} req/s, 40 s each",
        "SmartSpec [A]",
        "adapts; no figure known to us",
        f"mean latency {ours.latency_s / none.latency_s:.3f} of that without drafts, "
        f"{ours.latency_s / best:.3f} of that of the best single choice",
        graded(ours.latency_s <= 1.02 * best, worst <= 1.05),
        f"at most {worst:.3f} of the best choice for each phase in hindsight; the last phase is "
        "overload, where latency is mostly waiting",
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
        f"mean latency {ours.latency_s / best:.3f} of that of the best fixed k; "
        f"{shares[0]:.3f} before the change and {shares[1]:.3f} after it, of the best for each",
        graded(ours.latency_s <= 1.01 * best, max(shares) <= 1.05),
        "Sonnet (acceptance 0.85), then CNN/DailyMail (0.57); the server is not told",
    )


def _su_traffic(found: Outcomes) -> Finding:
    latency = {p: found[Case(ENGINE, "changing", 0.0, p)].latency_s for p in SU_POLICIES}
    better = min(latency[p] for p in SU_FIXED)
    by_table, ours = better / latency["batch_table"] - 1, better / latency["goodput"] - 1
    return Finding(
        "the table under traffic that changes",
        "Su et al. [Q]",
        "about 9 % faster than the better of two fixed s",
        f"{CHANGING[0]:g} and {CHANGING[1]:g} req/s in turn, s = 2 or 4: table {by_table:+.1%}, "
        f"goodput {ours:+.1%}",
        graded(by_table > 0, by_table >= 0.07),
        "the table is made for acceptance 0.7 and does not adapt",
    )
