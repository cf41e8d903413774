"""Heads in the simulator: which guesses are right, and trees of them."""

from dataclasses import replace

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import ROOT, Tree
from smartspec_sim.acceptance import (
    HEADS_DECAY,
    HEADS_DEPTH,
    HEADS_WIDTH,
    NO_RANK,
    GuessRanks,
    draw_ranks,
)
from smartspec_sim.engine import SimHeadsSpec
from smartspec_sim.simulate import SimLimits, SimResult, Simulation
from smartspec_sim.workload import KindSpec, LengthSpec, PhaseSpec, WorkloadSpec, draw

CHEAP_DRAFTS = CostModel(PassTable((1, 32), (1, 64), ((0.007, 0.0075), (0.008, 0.040))))
FEW, MANY = 1, 24


def test_a_chain_is_accepted_up_to_the_first_wrong_guess() -> None:
    ranks = GuessRanks(np.array([[0, 0, 1, 0], [NO_RANK, 0, 0, 0]], dtype=np.uint8))
    assert [ranks.accepted(0, k) for k in range(1, 5)] == [1, 2, 2, 2]
    assert ranks.accepted(1, 4) == 0
    assert ranks.accepted(2, 4) == 0, "after the last position nothing is right"


def test_a_tree_is_accepted_along_the_right_guesses() -> None:
    ranks = GuessRanks(np.array([[1, 0, 2]], dtype=np.uint8))
    tree = Tree(parents=(ROOT, ROOT, 1, 0, 2, 2), ranks=(0, 1, 0, 0, 0, 2))
    assert ranks.path(0, tree) == (1, 2, 5)
    assert ranks.path(0, Tree((ROOT, 0), (0, 0))) == ()
    assert ranks.path(1, tree) == ()


def test_guesses_are_right_as_often_as_asked() -> None:
    ranks = draw_ranks(np.random.default_rng(1), 20_000, 0.7).ranks
    assert ranks.shape == (20_000, HEADS_DEPTH)
    for depth in range(HEADS_DEPTH):
        share = float((ranks[:, depth] == 0).mean())
        assert share == pytest.approx(0.7 * HEADS_DECAY**depth, abs=0.015)
    wrong = ranks[ranks[:, 0] != 0, 0]
    assert float((wrong < HEADS_WIDTH).mean()) == pytest.approx(0.3, abs=0.02)


def simulated(policy: str, num_slots: int, width: int) -> SimResult:
    """Requests that all arrive at once."""
    kind = KindSpec(
        proposer="heads", prompt=LengthSpec(mean=16), output=LengthSpec(mean=100), accept=0.6
    )
    phases = (PhaseSpec(duration_s=1.0, rate=4.0 * num_slots),)
    requests = draw(WorkloadSpec(kinds=(kind,), phases=phases))
    requests = [replace(one, arrival_s=0.0) for one in requests]
    limits = SimLimits(num_slots, max_draft_len=32, heads=SimHeadsSpec(width=width))
    return Simulation(requests, policy, CHEAP_DRAFTS, limits).run()


def test_trees_shrink_under_load_and_beat_chains_without() -> None:
    chain, tree = simulated("goodput", FEW, 1), simulated("goodput", FEW, HEADS_WIDTH)
    assert tree.elapsed_s < 0.97 * chain.elapsed_s
    assert tree.mean_draft_len > 12
    assert simulated("goodput", MANY, HEADS_WIDTH).mean_draft_len < tree.mean_draft_len / 2


def test_a_chain_has_at_most_one_draft_for_each_head() -> None:
    assert max(simulated("fixed:8", FEW, 1).draft_lens) == HEADS_DEPTH
    assert max(simulated("fixed:8", FEW, HEADS_WIDTH).draft_lens) == 8
