"""Chooses the draft length of every sequence in a step.

`plan` is a pure function of the views, the cost model and the settings. The same inputs give the
same plan. Each sequence has a policy, given by name (`policies`). Policies without a search choose
first. `goodput` chooses last, for the cost of the whole step with the earlier choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.policies import (
    MAX_FIXED_DRAFT_LEN,
    BatchTable,
    FixedLength,
    PlannerSettings,
    Policy,
    batch_table_of,
    parse_policy,
)
from smartspec_py.core.plan.search import Outcome, outcome
from smartspec_py.core.plan.step import MIN_STEP_S, Choice, Ints, Step, step_of
from smartspec_py.core.types import SequenceId, SequenceView, SpecPlan

__all__ = [
    "MAX_FIXED_DRAFT_LEN",
    "BatchTable",
    "PlannerSettings",
    "batch_table_of",
    "evaluate",
    "parse_policy",
    "plan",
]

DEFAULT_SETTINGS = PlannerSettings()

NO_DRAFTS = (0, "none", "fixed:0")
"""Forced lengths and policies that never draft."""


def plan(
    views: Sequence[SequenceView],
    cost: CostModel,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> SpecPlan:
    """Choose a draft length and a drafting method for each view.

    The plan also has the expected tokens and seconds. Raises ValueError if a policy does not exist
    or if the settings lack a value that it needs.
    """
    if not views:
        return SpecPlan()
    if all(settings.forced.get(view.sequence, view.policy) in NO_DRAFTS for view in views):
        return _without_drafts(views, cost, settings)
    step = _step_of(views, cost, settings)
    return _planned(views, step, settings)


def _without_drafts(
    views: Sequence[SequenceView], cost: CostModel, settings: PlannerSettings
) -> SpecPlan:
    """`evaluate` for no drafts, without the time for a step's options."""
    num_tokens = len(views) + settings.num_background
    context_len = sum(view.context_len for view in views) / len(views)
    seconds = cost.target_s(num_tokens, num_tokens, context_len) + cost.step_host_s(num_tokens)
    if settings.last_num_tokens not in (None, num_tokens):
        seconds += cost.change_s(num_tokens)
    draft_lens = dict.fromkeys([view.sequence for view in views], 0)
    return SpecPlan(draft_lens, float(num_tokens), max(seconds, MIN_STEP_S))


def _step_of(views: Sequence[SequenceView], cost: CostModel, settings: PlannerSettings) -> Step:
    num_background, num_prefilling = settings.num_background, settings.num_prefilling
    return step_of(views, cost, num_background, num_prefilling, settings.last_num_tokens)


def _planned(views: Sequence[SequenceView], step: Step, settings: PlannerSettings) -> SpecPlan:
    forced = settings.forced
    names: list[str | int] = [view.policy for view in views]
    if forced:
        names = [forced.get(view.sequence, view.policy) for view in views]
    policies = {name: _policy(name) for name in set(names)}
    found = set(policies.values())
    if len(found) == 1:
        return _spec_plan(views, step, found.pop().choose(step, settings))
    choice = step.nothing()
    for policy in sorted(found, key=attrgetter("turn", "name")):
        members = np.array([i for i, name in enumerate(names) if policies[name] == policy])
        choice = _with_members(step, choice, members, policy, settings)
    return _spec_plan(views, step, outcome(step, choice))


def _policy(asked: str | int) -> Policy:
    """The policy for a name or for a forced draft length."""
    return FixedLength(asked) if isinstance(asked, int) else parse_policy(asked)


def _with_members(
    step: Step, held: Choice, members: Ints, policy: Policy, settings: PlannerSettings
) -> Choice:
    part = step.among(members, held)
    chosen = policy.choose(part, settings).choice
    ways, lengths = held.ways.copy(), held.lengths.copy()
    ways[members] = step.first_ways[members] + chosen.ways - part.first_ways
    lengths[members] = chosen.lengths
    return Choice(ways, lengths)


def evaluate(
    views: Sequence[SequenceView],
    draft_lens: Sequence[int],
    cost: CostModel,
    choices: Mapping[SequenceId, int] | None = None,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> SpecPlan:
    """The plan with the given draft lengths, and its expected tokens and seconds.

    choices: the option of each sequence, as in `SpecPlan.choices`.
    """
    if not views:
        return SpecPlan()
    step = _step_of(views, cost, settings)
    options = [(choices or {}).get(view.sequence, 0) for view in views]
    ways = step.first_ways + np.array(options)
    choice = Choice(ways, np.array(draft_lens))
    return _spec_plan(views, step, outcome(step, choice))


def _spec_plan(views: Sequence[SequenceView], step: Step, found: Outcome) -> SpecPlan:
    choice = found.choice
    sequences = [view.sequence for view in views]
    choices: dict[SequenceId, int] = {}
    if len(step.owners) > len(views):
        options = (choice.ways - step.first_ways).tolist()
        lengths = choice.lengths.tolist()
        choices = {s: o for s, o, k in zip(sequences, options, lengths, strict=True) if o and k}
    return SpecPlan(
        draft_lens=dict(zip(sequences, choice.lengths.tolist(), strict=True)),
        expected_tokens=found.tokens - step.prefilling_tokens,
        expected_s=found.seconds,
        choices=choices,
    )
