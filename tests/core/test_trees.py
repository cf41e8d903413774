"""Trees of drafts in the planner: the most probable paths against an enumeration, what is learned,
and what plans do with the costs of an 8 B model on an H200."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.branches import INITIAL_PROB, BranchTracker
from smartspec_py.core.plan.planner import plan
from smartspec_py.core.plan.trees import (
    MAX_NODES,
    MAX_STEP_NODES,
    SHARES,
    WIDTH,
    path_probs,
    tree_options,
)
from smartspec_py.core.types import DraftOption, SequenceView, SpecPlan


@pytest.mark.parametrize("seed", range(5))
def test_the_most_probable_paths(seed: int) -> None:
    """All paths of up to three guesses. None of the best nine is left out. The best 63 lose little,
    because each depth follows eight paths only."""
    rng = np.random.default_rng(seed)
    probs, other = rng.uniform(0.05, 0.95, (2, 3)), rng.uniform(0.1, 0.9)
    found = list(path_probs(probs, other, MAX_NODES))
    assert [paths.shape for paths in found] == [(2, WIDTH), (2, MAX_NODES), (2, MAX_NODES)]
    for row, best in enumerate(probs):
        guesses = [[p, *((1 - p) * other * SHARES)] for p in best]
        paths: list[float] = []
        for depth in range(3):
            paths += [float(np.prod(path)) for path in product(*guesses[: depth + 1])]
            expected = np.sort(paths)[::-1][:MAX_NODES]
            np.testing.assert_allclose(
                found[depth][row][:9], expected[:9][: len(found[depth][row])]
            )
            assert found[depth][row].sum() >= 0.97 * expected.sum()


def test_options_of_a_chain() -> None:
    """One for each depth that takes a pass; without passes, only the deepest."""
    chain = DraftOption(3, (0.5, 0.4, 0.3), 7, draft_s=0.1, proposer="heads")
    short = chain._replace(max_draft_len=1, accept_probs=(0.6,))
    free = chain._replace(has_draft_passes=False)
    trees = tree_options([chain, short, free], 0.4, 20, 0.01)
    assert [[tree.depth for tree in of_one] for of_one in trees] == [[1, 2, 3], [1], [3]]
    deep = trees[0][2]
    assert (deep.max_draft_len, deep.draft_prefill_len, deep.proposer) == (20, 7, "heads")
    assert deep.draft_s == pytest.approx(0.13)
    survivals = np.cumprod(deep.accept_probs)
    assert survivals[:2] == pytest.approx([0.5, 0.2])
    assert (np.diff(survivals) <= 0).all()


def test_what_a_tree_tells() -> None:
    """Guesses 7 and 8 come first, then 9 and 5 after 7, and 6 after 9."""
    drafts, parents = (7, 8, 9, 5, 6), (0, 0, 1, 1, 3)
    for generated, best in (
        ((7, 9, 6, 1), (3, 3)),
        ((7, 9, 2), (3, 2)),
        ((7, 5, 1), (3, 1)),
        ((8, 1), (3, 0)),
        ((1,), (3, 0)),
    ):
        assert BranchTracker().observe(drafts, parents, generated) == best


@pytest.mark.parametrize("num_guesses", [2, 4, WIDTH])
def test_the_learned_probability(num_guesses: int) -> None:
    """The best of some guesses is right in half of the cases, and another of all in 0.6 of the
    others, whatever part of them the tree has. It returns to the first value without trees."""
    rng, branches = random.Random(1), BranchTracker()
    assert branches.prob == pytest.approx(INITIAL_PROB)
    weights = [0.5, *(0.5 * 0.6 * SHARES), 0.5 * 0.4]
    for _ in range(2000):
        [token] = rng.choices(range(WIDTH + 1), weights)
        branches.fade()
        branches.observe(range(num_guesses), (0,) * num_guesses, (token,))
    assert branches.prob == pytest.approx(0.6, abs=0.1)
    for _ in range(4000):
        branches.fade()
    assert branches.prob == pytest.approx(INITIAL_PROB, abs=0.01)


H200 = CostModel(
    target=PassTable(
        (1, 8, 32, 64),
        (1, 2, 4, 8, 16, 32, 64),
        (
            (5.97e-3, 6.10e-3, 6.22e-3, 6.20e-3, 6.32e-3, 6.73e-3, 6.86e-3),
            (6.30e-3, 6.62e-3, 6.73e-3, 6.72e-3, 7.09e-3, 9.88e-3, 15.6e-3),
            (6.86e-3, 7.35e-3, 7.64e-3, 9.88e-3, 15.6e-3, 28e-3, 56e-3),
            (7.95e-3, 8.55e-3, 10.7e-3, 16.4e-3, 28e-3, 56e-3, 112e-3),
        ),
    ),
    draft=PassTable((1,), (1,), ((0.3e-3,),)),
    host_s=0.3e-3,
)
"""An 8 B model: docs/research/performance-gpu.md. Passes that it does not list take as long as
those with as many tokens, and larger ones are extrapolated. A head's pass takes 0.3 ms."""


def planned(num_requests: int, with_trees: bool) -> SpecPlan:
    """p = 0.5 and C = 0.4. A depth of a tree takes 0.1 ms longer than a draft of a chain, and 0.02
    ms for each further request."""
    chain = DraftOption(7, (0.5,) * 7)
    num_nodes = min(MAX_NODES, MAX_STEP_NODES // num_requests)
    [trees] = tree_options([chain], 0.4, num_nodes, (0.08 / num_requests + 0.02) * 1e-3)
    options = (chain, *trees) if with_trees else (chain,)
    views = [SequenceView(i, 400, 100, "goodput", options) for i in range(num_requests)]
    return plan(views, H200)


def test_one_request_gets_a_tree() -> None:
    chain, tree = planned(1, with_trees=False), planned(1, with_trees=True)
    assert tree.goodput > 1.1 * chain.goodput
    assert tree.draft_lens[0] > 20


@pytest.mark.parametrize("num_requests", [16, 32, 64])
def test_many_requests_get_chains(num_requests: int) -> None:
    assert planned(num_requests, with_trees=True) == planned(num_requests, with_trees=False)
