"""The comparison of policies: its arithmetic by hand, and once on a live server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from servers import fake_config, serving

from smartspec_bench.arms import Arm, Job, Phase, run_arms
from smartspec_bench.progress import Progress
from smartspec_bench.streams import StreamError
from smartspec_cli.commands.bench_arms import _summary, best_fixed

PROGRESS = Progress("not shown")


def arm(policy: str, *rounds: tuple[int, float]) -> Arm:
    """rounds: tokens and seconds; 10 steps, 20 drafted, 5 accepted in each."""
    return Arm(policy, [Phase(tokens, 10, 20, 5, elapsed_s) for tokens, elapsed_s in rounds])


def test_figures_by_hand() -> None:
    """Rates 10, 20, 40: their geometric mean is 20."""
    fast = arm("fixed:2", (10, 1.0), (20, 1.0), (20, 0.5))
    assert fast.tokens_per_s == pytest.approx(20.0)
    assert fast.mean_draft_len == 2.0
    assert fast.mean_acceptance_len == 1.5


def test_ratios_are_those_of_the_tokens_per_s_beside_them() -> None:
    """By medians of ratios, and tokens over seconds in all, they would contradict each other."""
    arms = [
        arm("none", (10, 1.0), (10, 4.0), (10, 1.0)),
        arm("fixed:2", (10, 0.5), (10, 9.0), (10, 0.5)),
        arm("goodput", (10, 0.6), (10, 3.0), (10, 0.6)),
    ]
    none, fixed, goodput = _summary(arms)
    for row in (none, fixed, goodput):
        assert row["over_none"] == pytest.approx(row["tokens_per_s"] / none["tokens_per_s"])
        assert row["over_best_fixed"] == pytest.approx(row["tokens_per_s"] / fixed["tokens_per_s"])
    ratios = [1.0 / 0.6, 4.0 / 3.0, 1.0 / 0.6]
    assert goodput["over_none"] == pytest.approx(math.prod(ratios) ** (1 / 3))


def test_best_fixed_is_the_fastest_of_the_fixed() -> None:
    arms = [arm("none", (99, 1.0)), arm("fixed:1", (10, 1.0)), arm("fixed:3", (20, 1.0))]
    best = best_fixed(arms)
    assert best is not None
    assert best.policy == "fixed:3"
    assert best_fixed(arms[:1]) is None


@pytest.mark.triton
def test_arms_on_a_live_server(tmp_path: Path) -> None:
    """Two groups, two rounds, two policies: the same tokens for each; a bad job is an error."""
    good = [Job({"text_input": text, "max_tokens": 9}) for text in ("one", "two two")]
    groups = {"a": [good, good], "b": [good[:1], good[:1]]}
    with serving(fake_config(step_s=0.001), tmp_path) as server:
        url = server.address.grpc_url
        results = asyncio.run(run_arms(url, ["none", "fixed:3"], groups, PROGRESS))
        bad = {"a": [[Job({"text_input": "x", "max_tokens": 0})]]}
        with pytest.raises(StreamError, match="max_tokens"):
            asyncio.run(run_arms(url, ["none"], bad, PROGRESS))
    for name, num_tokens in (("a", 18), ("b", 9)):
        none, fixed = results[name]
        assert [phase.num_tokens for phase in (*none.phases, *fixed.phases)] == [num_tokens] * 4
        assert none.mean_draft_len == 0
        assert 0 < fixed.mean_draft_len <= 3
        assert fixed.mean_acceptance_len > 1
