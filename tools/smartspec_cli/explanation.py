"""Explains the plan of a step, and compares expected with actual results over a window of steps.

Pure: works on step records. Every plan here uses the cost model and the settings of the step's own
decision, as in `steps.decide`. Nothing is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from smartspec_py.core.plan.planner import evaluate
from smartspec_py.core.plan.problem import PREFILLING_TOKENS
from smartspec_py.core.types import SequenceId
from smartspec_py.serving.step import StepRecord

NUM_BINS = 10
"""Number of bins of predicted acceptance in a reliability table."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible plan of a step. Its tuples follow the order of the step's views.

    options: the draft option of each sequence, 0 for the first; see `SequenceView.options`.
    expected_s: in seconds. goodput: in tokens per second.
    is_best: the candidate in its list with the most tokens per second. This count includes the
    value of the step for prompts in prefill.
    """

    name: str
    draft_lens: tuple[int, ...]
    options: tuple[int, ...]
    expected_tokens: float
    expected_s: float
    is_best: bool = False

    @property
    def goodput(self) -> float:
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Verified drafts whose predicted acceptance probability is in one bin.

    predicted: mean prediction. observed: share of accepted drafts. num_trials: number of drafts.
    """

    predicted: float
    observed: float
    num_trials: int


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Expected and actual results of the steps in a window.

    num_steps: steps without prompt chunks, which plans do not include. Sums are over these steps.
    time_error: mean of |realised - expected| / expected seconds of a step. num_switches: how often
    speculation of a sequence started or stopped.
    """

    num_steps: int = 0
    expected_tokens: float = 0.0
    realised_tokens: int = 0
    expected_s: float = 0.0
    realised_s: float = 0.0
    time_error: float = 0.0
    num_switches: int = 0
    reliability: list[ReliabilityBin] = field(default_factory=list)


def candidates(step: StepRecord) -> list[Candidate]:
    """The chosen plan, and one plan per draft length that all sequences share.

    A sequence with a smaller maximum uses that maximum. Each sequence uses its chosen option.
    """
    lengths, options = _chosen(step)
    plan_, views = step.decision.plan, step.decision.views
    caps = [plan_.option(view).max_draft_len for view in views]
    alike = [
        (f"all {length}", [min(length, cap) for cap in caps])
        for length in range(max(caps, default=0) + 1)
    ]
    named = [("chosen", lengths), *alike]
    return _judged(step, [(name, found, options) for name, found in named])


def options(step: StepRecord, sequence: SequenceId) -> list[Candidate]:
    """All draft lengths and options of one sequence; the other sequences keep their plan.

    Raises KeyError if the step's plan does not include the sequence.
    """
    lengths, chosen = _chosen(step)
    views = step.decision.views
    index = {view.sequence: i for i, view in enumerate(views)}[sequence]
    view = views[index]
    found = []
    for option in range(len(view.options)):
        # Length 0 is the same plan for all options, so only the first option has it.
        for length in range(min(option, 1), view.options[option].max_draft_len + 1):
            name = f"{length}, option {option}" if option else str(length)
            if (length, option) == (lengths[index], chosen[index]):
                name += ", chosen"
            found.append(
                (name, _with(lengths, index, length), _with(chosen, index, option)),
            )
    return _judged(step, found)


def window(steps: Sequence[StepRecord]) -> WindowReport:
    """Compare the plans of these steps with the actual results."""
    decoding = [step for step in steps if step.batch_size and not step.num_prefill_tokens]
    if not decoding:
        return WindowReport()
    expected_s = [step.decision.plan.expected_s for step in decoding]
    errors = [
        abs(step.total_s - expected) / expected
        for step, expected in zip(decoding, expected_s, strict=True)
        if expected > 0
    ]
    reliability = _reliability(decoding)
    return WindowReport(
        num_steps=len(decoding),
        expected_tokens=sum(step.decision.plan.expected_tokens for step in decoding),
        realised_tokens=sum(step.num_generated for step in decoding),
        expected_s=sum(expected_s),
        realised_s=sum(step.total_s for step in decoding),
        time_error=sum(errors) / max(1, len(errors)),
        num_switches=_num_switches(decoding),
        reliability=[bin_ for bin_ in reliability if bin_ is not None],
    )


def _chosen(step: StepRecord) -> tuple[list[int], list[int]]:
    """Draft lengths and options of the recorded plan, in the order of the views."""
    plan_, sequences = step.decision.plan, [view.sequence for view in step.decision.views]
    lengths = [plan_.draft_lens[sequence] for sequence in sequences]
    return lengths, [plan_.choices.get(sequence, 0) for sequence in sequences]


def _with(values: Sequence[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def _judged(
    step: StepRecord, plans: Sequence[tuple[str, Sequence[int], Sequence[int]]]
) -> list[Candidate]:
    """Evaluate the plans, given as name, lengths and options. The best candidate is marked."""
    views, settings = step.decision.views, step.decision.settings
    found = []
    for name, lengths, chosen in plans:
        by_sequence = {view.sequence: option for view, option in zip(views, chosen, strict=True)}
        plan_ = evaluate(views, lengths, step.decision.cost, by_sequence, settings)
        found.append(
            Candidate(name, tuple(lengths), tuple(chosen), plan_.expected_tokens, plan_.expected_s)
        )
    reading = PREFILLING_TOKENS * settings.num_prefilling
    best = max(found, key=lambda one: (one.expected_tokens + reading) / one.expected_s)
    return [replace(one, is_best=one is best) for one in found]


def _reliability(steps: Sequence[StepRecord]) -> list[ReliabilityBin | None]:
    """One bin per tenth of predicted acceptance; None for an empty bin. Trees are left out: their
    predictions are about paths."""
    predicted, accepted, trials = [0.0] * NUM_BINS, [0] * NUM_BINS, [0] * NUM_BINS
    for step in steps:
        decision = step.decision
        drafted = {view.sequence: decision.plan.option(view) for view in decision.views}
        for event in step.events:
            option = drafted.get(event.sequence)
            if option is None or option.is_tree:
                continue  # without an option, its tokens were planned in an earlier step
            probs = option.accept_probs
            # Drafts after the first rejected one were not tested.
            for j in range(min(event.num_accepted + 1, event.num_drafted)):
                bin_ = _bin(float(probs[j]))
                predicted[bin_] += float(probs[j])
                accepted[bin_] += j < event.num_accepted
                trials[bin_] += 1
    return [
        ReliabilityBin(p / n, a / n, n) if n else None
        for p, a, n in zip(predicted, accepted, trials, strict=True)
    ]


def _bin(prob: float) -> int:
    return min(int(prob * NUM_BINS), NUM_BINS - 1)


def _num_switches(steps: Sequence[StepRecord]) -> int:
    lengths = [step.decision.plan.draft_lens for step in steps]
    return sum(
        (before[sequence] > 0) != (length > 0)
        for before, after in pairwise(lengths)
        for sequence, length in after.items()
        if sequence in before
    )
