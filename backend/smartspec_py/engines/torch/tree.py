"""Trees of drafts that the target verifies in one pass.

A tree is given by `parents`: for each draft the index of the draft before it, or ROOT if it follows
the last known token. Parents come before their children, and children of one parent differ. In a
pass, token 0 of the row is the last known token, and token i + 1 is draft i.

The slot of a token in the cache is its index. Its position, which rotates keys and chooses the
noise, is its depth. Both are the same only in a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.types import ROOT


def chain(num_drafts: int) -> range:
    """The parents of drafts of which each follows the one before."""
    return range(ROOT, num_drafts - 1)


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token of the row: 0 for the last known token, 1 or more for drafts."""
    found = [0]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found


def path_to(draft: int, parents: Sequence[int]) -> list[int]:
    """The drafts from the first one to this one; empty for ROOT."""
    found = []
    while draft != ROOT:
        found.append(draft)
        draft = parents[draft]
    return found[::-1]


def visibility(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens of the row a token sees: its ancestors and itself; bool [n + 1, n + 1]."""
    found = np.eye(len(parents) + 1, dtype=bool)
    found[:, 0] = True
    for draft, parent in enumerate(parents):
        found[draft + 1] |= found[parent + 1]
    return found


def accepted_path(drafts: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The accepted drafts, in order. drawn: the target's own token after each token of the row."""
    pairs = zip(parents, drafts, strict=True)
    children = {pair: index for index, pair in enumerate(pairs)}
    found, last = [], ROOT
    while (child := children.get((last, drawn[last + 1]))) is not None:
        found.append(child)
        last = child
    return found
