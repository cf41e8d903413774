"""The claim about trees of drafts, judged by the figures of the study `trees`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from studies.claims_rows import Finding, graded

CHOSEN = "goodput: tree of heads"
FIXED = ("heads, chain of 4", "heads, tree of 8", "heads, tree of 32")


def chosen_trees(figures: Mapping[str, Any]) -> Finding:
    """figures: docs/results/trees.json. Goodput must be within 1 % of the best fixed drafts at
    every number of requests, and its trees must shrink with it."""
    names, slots = figures["arms"], figures["slots"]

    def mixed(size: str, name: str) -> Mapping[str, float]:
        found: Mapping[str, float] = slots[size][names.index(name)]["mixed"]
        return found

    ratios = [
        mixed(size, CHOSEN)["tokens_per_s"]
        / max(mixed(size, name)["tokens_per_s"] for name in FIXED)
        for size in slots
    ]
    drafts = [mixed(size, CHOSEN)["drafts"] for size in slots]
    shrinks = all(few > many for few, many in pairwise(drafts))
    sizes = ", ".join(f"{one:.1f}" for one in drafts)
    return Finding(
        "goodput applies to tree-style decoding",
        "SmartSpec [P]",
        "applies; no figure known to us",
        f"{min(ratios):.3f} to {max(ratios):.3f} of the best of a chain of 4 and trees of 8 and 32 "
        f"drafts at {', '.join(slots)} requests; {sizes} drafts per request and step",
        graded(min(ratios) >= 0.99, shrinks),
        "Medusa heads of the shipped models with modelled times of an H100 (trees.md); the best "
        "fixed drafts are chosen in hindsight for each number of requests",
    )
