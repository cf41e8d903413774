"""Part: are the texts with speculation the same as without?

In bfloat16, a pass over several tokens need not give the same bits as passes over one token. So
tokens with nearly equal scores may differ. Every difference is checked, and classified as a
near-tie or a fault (`smartspec_bench.nearties`). In float32 there should be none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from smartspec_bench.exactness import (
    CheckArm,
    CheckReport,
    Divergence,
    compare_alone,
    compare_mixed,
    force_drafting,
    reference,
)
from smartspec_bench.gpu.document import EXACTNESS, ArmExactness
from smartspec_bench.gpu.pair import Pair, serving
from smartspec_bench.gpu.plan import LOADED_POLICIES, Plan
from smartspec_bench.nearties import judge
from smartspec_bench.workloads import WORKLOADS, generate
from smartspec_py.serving.intake import Intake
from smartspec_py.serving.request import GenerateParams
from smartspec_testing.local import LocalSink
from smartspec_testing.scoring import TargetScorer

PROMPT_SEED = 8_000_009
"""Seed of the prompts. It differs from the seeds of the shipped pair's training."""

MIXED_SEED = 1


def check_exactness(
    pair: Pair, plan: Plan, deadline_s: float, say: Callable[[str], None]
) -> tuple[list[ArmExactness], list[str]]:
    """Compare every policy alone, then all in mixed batches. Also returns what did not fit in the
    time."""
    arms = [CheckArm(policy) for policy in LOADED_POLICIES]
    reports, left_out = list[CheckReport](), list[str]()
    with serving(pair) as server:
        force_drafting(server, pair.config)
        say("texts without speculation")
        cases = reference(server, _requests(plan))
        runs: list[tuple[str, Callable[[], CheckReport]]] = [
            (f"{arm}, alone", partial(compare_alone, server, cases, arm)) for arm in arms[1:]
        ]
        runs.append(("mixed", partial(compare_mixed, server, cases, arms, MIXED_SEED)))
        for name, compare in runs:
            if time.monotonic() > deadline_s:
                left_out.append(f"{EXACTNESS}: {name}")
                continue
            say(f"texts: {name}")
            reports.append(compare())
    # The server has stopped, so that its engine is free to be asked again.
    return [judged(pair, server.intake, report) for report in reports], left_out


def _requests(plan: Plan) -> Sequence[GenerateParams]:
    return [
        GenerateParams(
            text=generate(workload, PROMPT_SEED, index).prompt, max_tokens=plan.max_tokens
        )
        for index in range(plan.exact_prompts)
        for workload in WORKLOADS
    ]


def judged(pair: Pair, intake: Intake, report: CheckReport) -> ArmExactness:
    """The report's counts, with each difference classified; no server may run."""
    near_ties = [_is_near_tie(pair, intake, found) for found in report.divergences]
    return ArmExactness(
        policy=report.arm,
        mode=report.mode,
        num_requests=report.num_requests,
        num_tokens=report.num_tokens,
        num_drafted=report.num_drafted,
        num_accepted=report.num_accepted,
        num_differences=len(near_ties),
        num_near_ties=sum(near_ties),
    )


def _is_near_tie(pair: Pair, intake: Intake, found: Divergence) -> bool:
    request = intake.receive(found.params, LocalSink()).request
    return judge(TargetScorer(pair.target), request, found).is_near_tie
