"""Combines several runs of the same kind into one document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smartspec_bench.document import Document, Phase, Series
from smartspec_bench.plan import STEADY
from smartspec_bench.verdicts import comparisons, summary

SAME = ("form", "pair", "machine", "cores", "commit", "versions", "limits")
"""Of `About`, in all runs."""


class MergeError(ValueError):
    """These runs are not repeats of each other; the message names the difference."""


def merged(documents: Sequence[Document]) -> Document:
    """The repeats of all runs, renumbered in the given order, with new comparisons and a new
    summary. All other values are from the first run. Series over time are kept for the first repeat
    only, because the page of a run shows only these. Raises MergeError."""
    if not documents:
        raise MergeError("results: there must be one at least")
    first = documents[0]
    for number, document in enumerate(documents[1:], start=2):
        for name in SAME:
            one, other = getattr(first.about, name), getattr(document.about, name)
            if one != other:
                raise MergeError(f"results: {name} of run {number} is {other!r}, not {one!r}")
    seeds = [phase.seed for document in documents for phase in _of_one_policy(document)]
    if len(set(seeds)) < len(seeds):
        raise MergeError("results: two runs have the same seed: one is no repeat of the other")
    phases: list[Phase] = []
    for document in documents:
        num_before = 1 + max((phase.repeat for phase in phases), default=-1)
        phases += [replace(one, repeat=num_before + one.repeat) for one in document.phases]
    phases = _with_first_series(phases)
    found = comparisons(phases)
    commands = dict.fromkeys(document.about.command for document in documents)
    return replace(
        first,
        about=replace(first.about, command=" ; ".join(commands)),
        phases=phases,
        comparisons=found,
        summary=summary(found),
    )


def _with_first_series(phases: Sequence[Phase]) -> list[Phase]:
    first: dict[tuple[str, str], int] = {}
    for phase in phases:
        place = (phase.shape, phase.workload)
        first[place] = min(phase.repeat, first.get(place, phase.repeat))
    return [
        phase
        if phase.shape != STEADY and phase.repeat == first[phase.shape, phase.workload]
        else replace(phase, series=Series())
        for phase in phases
    ]


def _of_one_policy(document: Document) -> list[Phase]:
    """Seeds are per point and repeat; all policies share them."""
    names = {phase.policy for phase in document.phases}
    one = min(names, default="")
    return [phase for phase in document.phases if phase.policy == one]
