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
from smartspec_py.core.plan.problem import MIN_STEP_S, Choice, Ints, PlanProblem, problem_of
from smartspec_py.core.plan.search import Outcome, outcome
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
        return without_drafts(views, cost, settings)
    problem = _problem_of(views, cost, settings)
    policies = [_policy(settings.forced.get(view.sequence, view.policy)) for view in views]
    different = set(policies)
    if len(different) == 1:
        return _spec_plan(views, problem, different.pop().choose(problem, settings))
    choice = problem.nothing()
    for policy in sorted(different, key=attrgetter("turn", "name")):
        members = np.array([index for index, one in enumerate(policies) if one == policy])
        choice = _with_members(problem, choice, members, policy, settings)
    return _spec_plan(views, problem, outcome(problem, choice))


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
    problem = _problem_of(views, cost, settings)
    options = [(choices or {}).get(view.sequence, 0) for view in views]
    choice = Choice(problem.first_options + np.array(options), np.array(draft_lens))
    return _spec_plan(views, problem, outcome(problem, choice))


def without_drafts(
    views: Sequence[SequenceView], cost: CostModel, settings: PlannerSettings = DEFAULT_SETTINGS
) -> SpecPlan:
    """`evaluate` for no drafts. It is faster, because it does not look at the options."""
    num_tokens = len(views) + settings.num_background
    context_len = sum(view.context_len for view in views) / len(views)
    seconds = cost.target_s(num_tokens, num_tokens, context_len) + cost.step_host_s(num_tokens)
    if settings.last_num_tokens not in (None, num_tokens):
        seconds += cost.change_s(num_tokens)
    draft_lens = dict.fromkeys([view.sequence for view in views], 0)
    return SpecPlan(draft_lens, float(num_tokens), max(seconds, MIN_STEP_S))


def _problem_of(
    views: Sequence[SequenceView], cost: CostModel, settings: PlannerSettings
) -> PlanProblem:
    num_background, num_prefilling = settings.num_background, settings.num_prefilling
    return problem_of(views, cost, num_background, num_prefilling, settings.last_num_tokens)


def _policy(name: str | int) -> Policy:
    """The policy for a name or for a forced draft length."""
    return FixedLength(name) if isinstance(name, int) else parse_policy(name)


def _with_members(
    problem: PlanProblem, held: Choice, members: Ints, policy: Policy, settings: PlannerSettings
) -> Choice:
    """The choice in which these sequences have what the policy chooses for them."""
    part = problem.among(members, held)
    chosen = policy.choose(part, settings).choice
    options, lengths = held.options.copy(), held.lengths.copy()
    options[members] = problem.first_options[members] + chosen.options - part.first_options
    lengths[members] = chosen.lengths
    return Choice(options, lengths)


def _spec_plan(views: Sequence[SequenceView], problem: PlanProblem, found: Outcome) -> SpecPlan:
    sequences, choice = [view.sequence for view in views], found.choice
    lengths = choice.lengths.tolist()
    choices: dict[SequenceId, int] = {}
    if not problem.has_one_option:
        options = (choice.options - problem.first_options).tolist()
        choices = {s: o for s, o, k in zip(sequences, options, lengths, strict=True) if o and k}
    return SpecPlan(
        draft_lens=dict(zip(sequences, lengths, strict=True)),
        expected_tokens=found.tokens - problem.prefilling_tokens,
        expected_s=found.seconds,
        choices=choices,
    )
