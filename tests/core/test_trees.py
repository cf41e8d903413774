"""Ranked nodes of a tree, compared with a search over all trees."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations, product

import numpy as np
import pytest

from smartspec_py.core.plan.trees import OTHERS, TreeSpace
from smartspec_py.core.types import ROOT

DEPTH, WIDTH = 3, 2


def probabilities(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.05, 0.95, (4, DEPTH))


def path_probs(best: np.ndarray) -> dict[tuple[int, ...], float]:
    """Of every path of ranks."""
    found = {}
    for depth in range(1, DEPTH + 1):
        for path in product(range(WIDTH), repeat=depth):
            prob = 1.0
            for at, rank in enumerate(path):
                prob *= best[at] if rank == 0 else (1 - best[at]) * OTHERS
            found[path] = prob
    return found


def paths(space: TreeSpace, nodes: list[int]) -> list[tuple[int, ...]]:
    """The ranks from the root to each node of the tree of these nodes."""
    tree = space.tree(nodes)
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        assert parent < len(found), "a parent comes first"
        found.append((() if parent == ROOT else found[parent]) + (rank,))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_first_nodes_are_the_best_tree(seed: int) -> None:
    best = probabilities(seed)
    space = TreeSpace(DEPTH, WIDTH)
    nodes, ratios = space.ranked(best, 6)
    assert nodes.shape == ratios.shape == (4, 6)
    for row in range(4):
        probs = path_probs(best[row])
        for size in range(1, 7):
            chosen = paths(space, nodes[row, :size].tolist())
            expected = sum(probs[path] for path in chosen)
            assert np.cumprod(ratios[row])[:size].sum() == pytest.approx(expected)
            trees = [tree for tree in every_tree(probs) if len(tree) == size]
            assert expected == pytest.approx(max(sum(probs[p] for p in tree) for tree in trees))


def every_tree(probs: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """All trees of up to 6 of these paths, the empty one included."""
    return [
        tree
        for size in range(7)
        for tree in combinations(probs, size)
        if all(path[:-1] in tree or len(path) == 1 for path in tree)
    ]


def test_one_guess_for_each_position_is_a_chain() -> None:
    space = TreeSpace(4, 1)
    accept_probs = np.array([[0.9, 0.5, 0.7, 0.2]])
    nodes, ratios = space.ranked(accept_probs, 64)
    assert ratios == pytest.approx(accept_probs)
    assert space.tree(nodes[0].tolist()).parents == (ROOT, 0, 1, 2)


def test_large_spaces_leave_out_paths_of_unlikely_guesses() -> None:
    space = TreeSpace(4, 4)
    assert len(space) == 160
    rng = random.Random(1)
    best = np.array([[rng.uniform(0.3, 0.9) for _ in range(4)] for _ in range(8)])
    nodes, _ = space.ranked(best, 64)
    for row in nodes.tolist():
        assert len(set(paths(space, row))) == 64
