"""Says why a step was planned as it was, and how well plans came true over a window.

Pure: works on what was recorded (the views that the planner saw, the cost model that it used, its
plan) and on what then happened. Expectations are the planner's own; nothing is learned here.

The regret of a window is an estimate: it asks what the planner would have chosen, had it known by
how much costs and acceptance were off in this very window, and what the choices made are worth by
that knowledge. On oracle traces, where every accepted length is known, the simulator gives the
exact one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from smartspec_py.core.cost import CostModel
from smartspec_py.core.goodput import accept_trials
from smartspec_py.core.planner import evaluate, plan
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView, SpecPlan

NUM_BINS = 10
"""Of predicted acceptance, in a reliability table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought one sequence. num_drafted may be less than was planned."""

    sequence: SequenceId
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """target_s, draft_s: as measured. total_s: of the whole step, host included."""

    views: Sequence[SequenceView]
    plan: SpecPlan
    cost: CostModel
    outcomes: Sequence[Outcome]
    num_prefill_tokens: int
    draft_s: float
    target_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was possible. expected_s in seconds, goodput in tokens a second."""

    name: str
    draft_lens: tuple[int, ...]
    expected_tokens: float
    expected_s: float

    @property
    def goodput(self) -> float:
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Drafts that were put to the test, of those predicted to be accepted with about this
    probability: mean prediction, share accepted, how many."""

    predicted: float
    observed: float
    num_trials: int


@dataclass(frozen=True, slots=True)
class WindowReport:
    """num_steps: without prompt chunks, which plans leave out; sums are over these.

    time_error: mean of |realised - expected| / expected seconds of a step. regret: estimated share
    of goodput lost. num_switches: times that a sequence began or stopped being speculated on.
    """

    num_steps: int = 0
    expected_tokens: float = 0.0
    realised_tokens: int = 0
    expected_s: float = 0.0
    realised_s: float = 0.0
    time_error: float = 0.0
    regret: float = 0.0
    num_switches: int = 0
    reliability: list[ReliabilityBin] = field(default_factory=list)


def candidates(step: RecordedStep) -> list[Candidate]:
    """The plan that was chosen, and every length for all sequences alike, as far as each may."""
    chosen = [step.plan.draft_lens[view.sequence] for view in step.views]
    longest = max((view.max_draft_len for view in step.views), default=0)
    alike = [
        (f"all {length}", [min(length, view.max_draft_len) for view in step.views])
        for length in range(longest + 1)
    ]
    named = [("chosen", chosen), *alike]
    return [_candidate(step, name, lengths) for name, lengths in named]


def options(step: RecordedStep, sequence: SequenceId) -> list[Candidate]:
    """Every length of one sequence, the others as they were chosen. Raises KeyError where the
    sequence was not planned in this step."""
    chosen = [step.plan.draft_lens[view.sequence] for view in step.views]
    index = {view.sequence: i for i, view in enumerate(step.views)}[sequence]
    found = []
    for length in range(step.views[index].max_draft_len + 1):
        lengths = [*chosen[:index], length, *chosen[index + 1 :]]
        mark = ", chosen" if length == chosen[index] else ""
        found.append(_candidate(step, f"{length}{mark}", lengths))
    return found


def window(steps: Sequence[RecordedStep]) -> WindowReport:
    """How well the plans of these steps came true."""
    decoding = [step for step in steps if step.views and not step.num_prefill_tokens]
    if not decoding:
        return WindowReport()
    expected_s = [step.plan.expected_s for step in decoding]
    errors = [
        abs(step.total_s - expected) / expected
        for step, expected in zip(decoding, expected_s, strict=True)
        if expected > 0
    ]
    reliability = _reliability(decoding)
    return WindowReport(
        num_steps=len(decoding),
        expected_tokens=sum(step.plan.expected_tokens for step in decoding),
        realised_tokens=sum(o.num_accepted + 1 for step in decoding for o in step.outcomes),
        expected_s=sum(expected_s),
        realised_s=sum(step.total_s for step in decoding),
        time_error=sum(errors) / max(1, len(errors)),
        regret=_regret(decoding, reliability),
        num_switches=_num_switches(decoding),
        reliability=[bin_ for bin_ in reliability if bin_ is not None],
    )


def _candidate(step: RecordedStep, name: str, draft_lens: Sequence[int]) -> Candidate:
    found = evaluate(step.views, draft_lens, step.cost)
    return Candidate(name, tuple(draft_lens), found.expected_tokens, found.expected_s)


def _option(view: SequenceView, plan_: SpecPlan) -> SequenceView | DraftOption:
    choice = plan_.choices.get(view.sequence, 0)
    return view if choice == 0 else view.alternatives[choice - 1]


def _reliability(steps: Sequence[RecordedStep]) -> list[ReliabilityBin | None]:
    """By tenths of predicted acceptance; None where nothing fell."""
    predicted, accepted, trials = [0.0] * NUM_BINS, [0] * NUM_BINS, [0] * NUM_BINS
    for step in steps:
        views = {view.sequence: view for view in step.views}
        for outcome in step.outcomes:
            probs = _option(views[outcome.sequence], step.plan).accept_probs
            for j in range(accept_trials(outcome.num_drafted, outcome.num_accepted)):
                bin_ = _bin(float(probs[j]))
                predicted[bin_] += float(probs[j])
                accepted[bin_] += j < outcome.num_accepted
                trials[bin_] += 1
    return [
        ReliabilityBin(p / n, a / n, n) if n else None
        for p, a, n in zip(predicted, accepted, trials, strict=True)
    ]


def _bin(prob: float) -> int:
    return min(int(prob * NUM_BINS), NUM_BINS - 1)


def _num_switches(steps: Sequence[RecordedStep]) -> int:
    return sum(
        (before.plan.draft_lens[sequence] > 0) != (length > 0)
        for before, after in pairwise(steps)
        for sequence, length in after.plan.draft_lens.items()
        if sequence in before.plan.draft_lens
    )


def _regret(steps: Sequence[RecordedStep], reliability: Sequence[ReliabilityBin | None]) -> float:
    """1 - (goodput of what was chosen) / (goodput of what would have been), both by what the
    window showed of costs and acceptance."""
    target = _ratio([(s.target_s, _target_s(s)) for s in steps])
    draft = _ratio([(s.draft_s, _draft_s(s)) for s in steps])
    tokens, seconds, best_tokens, best_s = 0.0, 0.0, 0.0, 0.0
    for step in steps:
        cost = replace(
            step.cost,
            target_base=step.cost.target_base * target,
            target_slope=step.cost.target_slope * target,
            target_extra_s=step.cost.target_extra_s * target,
            draft_factor=step.cost.draft_factor * draft,
        )
        views = [_recalibrated(view, step.plan, reliability) for view in step.views]
        made = evaluate(views, [step.plan.draft_lens[view.sequence] for view in views], cost)
        best = plan(views, cost)
        tokens, seconds = tokens + made.expected_tokens, seconds + made.expected_s
        best_tokens, best_s = best_tokens + best.expected_tokens, best_s + best.expected_s
    if best_s <= 0 or seconds <= 0:
        return 0.0
    return max(0.0, 1 - (tokens / seconds) / (best_tokens / best_s))


def _recalibrated(
    view: SequenceView, plan_: SpecPlan, reliability: Sequence[ReliabilityBin | None]
) -> SequenceView:
    """Its chosen option alone, with each probability moved by what its bin was off."""
    option = _option(view, plan_)
    probs = []
    for prob in map(float, option.accept_probs):
        bin_ = reliability[_bin(prob)]
        moved = prob if bin_ is None else prob + bin_.observed - bin_.predicted
        probs.append(min(max(moved, 0.0), 1.0))
    return replace(
        view,
        accept_probs=tuple(probs),
        max_draft_len=option.max_draft_len,
        draft_lag=option.draft_lag,
        has_draft_passes=option.has_draft_passes,
        alternatives=(),
    )


def _target_s(step: RecordedStep) -> float:
    num_rows = len(step.views)
    mean_context = sum(view.context_len for view in step.views) / num_rows
    num_tokens = num_rows + sum(step.plan.draft_lens.values())
    return step.cost.target_s(num_rows, num_tokens, mean_context)


def _draft_s(step: RecordedStep) -> float:
    lengths = [
        step.plan.draft_lens[view.sequence]
        for view in step.views
        if _option(view, step.plan).has_draft_passes
    ]
    passes = range(1, max(lengths, default=0) + 1)
    return sum(step.cost.draft_s(sum(length >= p for length in lengths)) for p in passes)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured over predicted; 1 where nothing was predicted or measured."""
    measured, predicted = sum(m for m, _ in pairs), sum(p for _, p in pairs)
    return measured / predicted if predicted > 0 and measured > 0 else 1.0
