"""Explains the plan of a step, and compares expected with actual results over a window of steps.

Pure: works on step records. Every plan here uses the cost model and the settings of the step's
decision. Nothing is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from smartspec_py.core.plan.planner import evaluate
from smartspec_py.core.plan.problem import PREFILLING_TOKENS
from smartspec_py.core.types import DraftOption, SequenceId
from smartspec_py.serving.step import StepRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible plan of a step. draft_lens: in the order of the step's views.

    expected_s: in seconds. tokens_per_s: the goodput.
    is_best: the candidate in its list with the most tokens per second. This count includes the
    value of the step for prompts in prefill.
    """

    name: str
    draft_lens: tuple[int, ...]
    expected_tokens: float
    expected_s: float
    tokens_per_s: float
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Expected and actual results of the steps in a window.

    num_steps: steps without prompt chunks, which plans do not include. Sums are over these steps.
    time_error: mean of |realised - expected| / expected seconds of a step. num_switches: how often
    speculation of a sequence started or stopped. num_trials: verified drafts up to the first
    rejected one. predicted, observed: their mean acceptance probability, and the share
    that was accepted; 0 without trials.
    """

    num_steps: int
    expected_tokens: float
    realised_tokens: int
    expected_s: float
    realised_s: float
    time_error: float
    num_switches: int
    num_trials: int
    predicted: float
    observed: float


def candidates(step: StepRecord) -> list[Candidate]:
    """The chosen plan, and one plan per draft length that all sequences share.

    A sequence with a smaller maximum uses that maximum. Each sequence uses its chosen option.
    """
    plan = step.decision.plan
    chosen = [plan.option(view) for view in step.decision.views]
    caps = {v.sequence: o.max_draft_len for v, o in zip(step.decision.views, chosen, strict=True)}
    plans = [("chosen", plan.draft_lens, plan.choices)]
    for length in sorted({length for option in chosen for length in _lengths(option)}):
        lengths = {sequence: min(length, cap) for sequence, cap in caps.items()}
        plans.append((f"all {length}", lengths, plan.choices))
    return _evaluated(step, plans)


def options(step: StepRecord, sequence: SequenceId) -> list[Candidate]:
    """All draft lengths and options of one sequence; the other sequences keep their plan.

    Raises KeyError if the step's plan does not include the sequence.
    """
    plan = step.decision.plan
    chosen = plan.draft_lens[sequence], plan.choices.get(sequence, 0)
    view = next(view for view in step.decision.views if view.sequence == sequence)
    plans = []
    for option, drafts in enumerate(view.options):
        # Length 0 is the same plan for all options, so only the first option has it.
        lengths_shown = {*_lengths(drafts), *([chosen[0]] if option == chosen[1] else ())}
        for length in sorted(lengths_shown)[min(option, 1) :]:
            name = f"{length}, option {option}" if option else str(length)
            name += f", tree of depth {drafts.depth}" if drafts.depth else ""
            name += ", chosen" * ((length, option) == chosen)
            lengths = {**plan.draft_lens, sequence: length}
            plans.append((name, lengths, {**plan.choices, sequence: option}))
    return _evaluated(step, plans)


def _lengths(option: DraftOption) -> Sequence[int]:
    """The draft lengths to show: of trees, 0, 1, 3, 7, .. nodes."""
    lengths = range(option.max_draft_len + 1)
    return [num for num in lengths if num & (num + 1) == 0] if option.depth else lengths


def _evaluated(
    step: StepRecord,
    plans: Sequence[tuple[str, Mapping[SequenceId, int], Mapping[SequenceId, int]]],
) -> list[Candidate]:
    """plans: as name, lengths and options by sequence. The best candidate is marked."""
    views, settings = step.decision.views, step.decision.settings
    found = []
    for name, lengths, choices in plans:
        in_order = [lengths[view.sequence] for view in views]
        plan = evaluate(views, in_order, step.decision.cost, choices, settings)
        tokens, seconds = plan.expected_tokens, plan.expected_s
        found.append(Candidate(name, tuple(in_order), tokens, seconds, plan.goodput))
    reading = PREFILLING_TOKENS * settings.num_prefilling
    best = max(found, key=lambda one: (one.expected_tokens + reading) / one.expected_s)
    return [replace(one, is_best=one is best) for one in found]


def window(steps: Sequence[StepRecord]) -> WindowReport:
    """Compare the plans of these steps with the actual results."""
    decoding = [step for step in steps if step.batch_size and not step.num_prefill_tokens]
    expected_s = [step.decision.plan.expected_s for step in decoding]
    realised_s = [step.total_s for step in decoding]
    pairs = zip(realised_s, expected_s, strict=True)
    errors = [abs(actual - expected) / expected for actual, expected in pairs if expected > 0]
    trials = [trial for step in decoding for trial in _trials(step)]
    num_trials = max(1, len(trials))
    return WindowReport(
        num_steps=len(decoding),
        expected_tokens=sum(step.decision.plan.expected_tokens for step in decoding),
        realised_tokens=sum(step.num_generated for step in decoding),
        expected_s=sum(expected_s),
        realised_s=sum(realised_s),
        time_error=sum(errors) / max(1, len(errors)),
        num_switches=_num_switches(decoding),
        num_trials=len(trials),
        predicted=sum(prob for prob, _ in trials) / num_trials,
        observed=sum(is_accepted for _, is_accepted in trials) / num_trials,
    )


def _trials(step: StepRecord) -> list[tuple[float, bool]]:
    """Predicted probability of each verified draft, and whether it was accepted."""
    plan, found = step.decision.plan, list[tuple[float, bool]]()
    drafted = {view.sequence: plan.option(view) for view in step.decision.views}
    for event in step.events:
        option = drafted.get(event.sequence)
        if option is not None and not option.depth:  # probabilities of a tree are those of nodes
            # Drafts after the first rejected one were not tested.
            num_trials = min(event.num_accepted + 1, event.num_drafted)
            probs = map(float, option.accept_probs[:num_trials])
            found += [(prob, j < event.num_accepted) for j, prob in enumerate(probs)]
    return found


def _num_switches(steps: Sequence[StepRecord]) -> int:
    lengths = [step.decision.plan.draft_lens for step in steps]
    return sum(
        (before[sequence] > 0) != (length > 0)
        for before, after in pairwise(lengths)
        for sequence, length in after.items()
        if sequence in before
    )
