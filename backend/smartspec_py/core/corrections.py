"""Learns from live steps how costs differ from the profile: a few factors, never the tables.

Parts of a step that were timed apart are learned apart. With T0 the target pass of one token a row
and T the pass as it was, both of the profile,

    target  = base * T0 + slope * (T - T0) + extra_s        base 1, slope 1, extra_s 0 in a profile
    draft   = draft_factor * (passes + catch-up)            1
    host    = host_s + host_row_s * rows                    as in the profile, mostly 0
    prefill = prefill_factor * what the chunk adds          1

Each is a least-squares fit of relative errors with exponential forgetting and a ridge towards the
profile that is not forgotten. So evidence that is not renewed fades and the profile returns; and
where steps are all alike (one k, one number of rows), the ridge decides what is to blame: the base,
in the main. The fit is kept inside bounds, so that no factor is ever negative.

A stall moves nothing: an error far from the median of the last few hardly counts. A change that
lasts becomes that median, and then the fit forgets fast until it is followed.

Time is counted in steps; nothing here reads a clock, and memory does not grow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smartspec_py.core.cost import CostModel

NOISE = 0.05
"""Standard deviation of a pass's seconds, relative. Sets what a step weighs against the ridge."""

FORGETTING = 0.99
"""Kept of the evidence at each step: it is 100 steps long, as far apart as probes are."""

CHANGE_FORGETTING = 0.75
"""The same while costs have visibly changed: what was learned before is gone in a dozen steps."""

MIN_CHANGE = 0.08
"""Median relative error of the last RECENT steps that is a change: 3 of its standard deviations."""

CHANGE_DEVIATIONS = 2.5
"""The same in mean absolute deviations of the machine, where that is more. The median of five has
0.67 of them as its standard deviation, so noise passes it about once in 5,000 steps."""

RECENT = 5
"""Errors whose median is believed: up to two of them may be stalls."""

FAR = 0.25
"""Relative error beside the median from which a step counts less, by the fourth power: 5 standard
deviations. Of twice that a sixteenth is left, and of a stall nothing; a probe that contradicts the
steps around it by a third is still heard."""

LEAST_SCALE = 0.1
"""Of what was measured: an error of a prediction that is smaller is relative to this."""

BOUNDS = (0.1, 10.0)
"""Of every factor: a profile that is wrong by more is not to be mended by factors."""

TARGET_SDS = (1.0, 0.5, 0.3)
"""How far base, slope and extra_s (in passes of one token) may be off before anything was seen, as
standard deviations. Where steps are all alike, their squares share out the blame."""

HOST_SDS = (1.0, 0.02)
"""The same of host_s and host_row_s, in passes of one token."""

UNCERTAIN = 0.05
"""Standard deviation of what drafts add to the target pass, relative to the pass, from which a
contrasting step is wanted: it is the noise of a single pass."""

UNSEEN_STEPS = 500
"""Steps without speculation after which a profile may be wrong about it without being found out."""

SOLVE_EVERY = 4
"""Steps between two solutions of a fit while costs do not change: what a step adds to 100 others
is less than its noise, and solving is most of what a fit takes."""

CLEAR_PREFILL = 0.2
"""Least share of a pass that a chunk must have for the pass to tell of it."""

LARGEST_ERROR = 1.0
"""What a step at most adds to the mean error: a stall is no prediction's fault."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step ran and took, in seconds.

    num_rows, num_tokens: sequences that decoded, and their tokens with the drafts.
    context_len: mean tokens of context a row.
    draft_rows: rows of each draft pass, as run; none where drafts were looked up.
    target_s: the target's pass, prompt chunks included.
    draft_s: the draft passes together, catch-up included.
    host_s: what the step took beside both.
    num_prefill_tokens: prompt tokens that shared the pass.
    num_catch_up_tokens: tokens that stale draft caches read first.
    num_charged_tokens: tokens of the texts that were verified, drafts included; see
        `CostModel.max_charged_tokens`.
    """

    num_rows: int
    num_tokens: int
    context_len: float
    draft_rows: tuple[int, ...]
    target_s: float
    draft_s: float
    host_s: float
    num_prefill_tokens: int = 0
    num_catch_up_tokens: int = 0
    num_charged_tokens: int = 0

    @property
    def total_s(self) -> float:
        return self.target_s + self.draft_s + self.host_s


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the profile says of a step, in seconds: the features of the fits. passes_s: draft
    passes and catch-up."""

    one_token_s: float
    drafts_s: float
    passes_s: float
    prefill_s: float


def predicted(profile: CostModel, step: StepCost) -> Predicted:
    """Seconds of a step as the profile has them, without what was learned."""
    rows = max(1, step.num_rows)
    num_tokens = max(rows, step.num_tokens)
    one_token_s = profile.target.one_token_s(rows, step.context_len)
    drafts_s = 0.0
    if num_tokens > rows:
        drafts_s = profile.target.pass_s(rows, num_tokens, step.context_len) - one_token_s
        drafts_s += profile.extra_iterations_s(step.num_charged_tokens)
    passes_s = sum(profile.draft_s(rows) for rows in step.draft_rows)
    if step.draft_rows:
        passes_s += profile.catch_up_s * step.num_catch_up_tokens
    prefill_s = profile.prefill_s(step.num_prefill_tokens) if step.num_prefill_tokens else 0.0
    return Predicted(one_token_s, drafts_s, passes_s, prefill_s)


class CostCorrections:
    """`observe` takes in a step, `corrected` is the profile with what was learned so far."""

    def __init__(self, profile: CostModel) -> None:
        self._profile = profile
        # Seconds in which extra_s and host time are counted, so that sizes are those of factors.
        self._unit_s = max(profile.target.one_token_s(1), 1e-9)
        low, high = BOUNDS
        self._target = _Fit((1.0, 1.0, 0.0), TARGET_SDS, (low, low, 0.0), high)
        host = (profile.host_s / self._unit_s, profile.host_row_s / self._unit_s)
        self._host = _Fit(host, HOST_SDS, (0.0, 0.0), math.inf)
        self._draft = _Fit((1.0,), (1.0,), (low,), high)
        self._prefill = _Fit((1.0,), (1.0,), (low,), high)
        self._fits = (self._target, self._host, self._draft, self._prefill)
        self._corrected_by = tuple(fit.values for fit in self._fits)
        self._corrected = profile
        self._drafts_share = 0.0
        self._num_unspeculated = 0
        self._was_speculating = False
        self._errors = (0.0, 0.0)
        self._errors_weight = 0.0

    @property
    def corrected(self) -> CostModel:
        """Shares the profile's tables: making one costs microseconds."""
        return self._corrected

    @property
    def mean_errors(self) -> tuple[float, float]:
        """Mean absolute relative error of the predicted seconds of recent steps: by the profile,
        and as corrected before the step was learned from. Steps with prompt chunks are left out."""
        weight = max(self._errors_weight, 1e-9)
        return self._errors[0] / weight, self._errors[1] / weight

    def wants_contrast(self, is_speculating: bool) -> bool:
        """Whether a step of the other kind than planned would teach something that matters.

        Steps that all draft alike do not tell the base from the slope; a step without drafts does.
        Steps that never draft tell nothing of what drafting costs. The caller runs such a step
        where its budget for probes allows.
        """
        if not is_speculating:
            return self._num_unspeculated >= UNSEEN_STEPS
        return self._target.deviation(1) * self._drafts_share > UNCERTAIN

    def observe(self, step: StepCost) -> Predicted:
        """Learn from a step; parts of it that cannot be told apart teach nothing. Returns what the
        profile says of it, which others learn from as well."""
        known = predicted(self._profile, step)
        target, host = self._target_features(known), self._host_features(step)
        target_s, draft_s = self._target.predict(target), self._draft.predict((known.passes_s,))
        whole_s = target_s + draft_s + self._host.predict(host)
        is_pure = step.num_rows > 0 and step.num_prefill_tokens == 0
        if is_pure:
            self._note_errors(step, known, whole_s)
            self._note_drafts(step, known)
            is_other = (step.num_tokens > step.num_rows) != self._was_speculating
            self._was_speculating ^= is_other
            self._target.observe(target, step.target_s, target_s, is_other)
            # Relative to the step, which it is to predict: host time alone may be next to nothing.
            self._host.observe(host, step.host_s, max(whole_s, LEAST_SCALE * step.total_s))
        else:
            self._num_unspeculated += 1
            self._target.fade()
            self._host.fade()
        if known.passes_s > 0.0:
            self._draft.observe((known.passes_s,), step.draft_s, draft_s)
        else:
            self._draft.fade()
        self._observe_prefill(step, known, target_s)
        values = tuple(fit.values for fit in self._fits)
        if values != self._corrected_by:
            self._corrected, self._corrected_by = self._make_corrected(), values
        return known

    def _target_features(self, known: Predicted) -> tuple[float, float, float]:
        return known.one_token_s, known.drafts_s, self._unit_s

    def _host_features(self, step: StepCost) -> tuple[float, float]:
        return self._unit_s, self._unit_s * step.num_rows

    def _note_errors(self, step: StepCost, known: Predicted, corrected_s: float) -> None:
        took_s = step.total_s
        if took_s <= 0.0:
            return
        profile_s = known.one_token_s + known.drafts_s + known.passes_s
        profile_s += self._profile.step_host_s(step.num_rows)
        by_profile, corrected = (
            min(abs(seconds / took_s - 1.0), LARGEST_ERROR) for seconds in (profile_s, corrected_s)
        )
        old_by_profile, old_corrected = self._errors
        self._errors = (
            FORGETTING * old_by_profile + by_profile,
            FORGETTING * old_corrected + corrected,
        )
        self._errors_weight = FORGETTING * self._errors_weight + 1.0

    def _note_drafts(self, step: StepCost, known: Predicted) -> None:
        self._num_unspeculated += 1
        if step.num_tokens > step.num_rows:
            self._num_unspeculated = 0
            share = known.drafts_s / max(known.one_token_s + known.drafts_s, 1e-9)
            self._drafts_share += (1 - FORGETTING) * (share - self._drafts_share)

    def _observe_prefill(self, step: StepCost, known: Predicted, rest_s: float) -> None:
        """rest_s: what the pass would have taken without its chunks."""
        chunk_s = self._prefill.predict((known.prefill_s,))
        if chunk_s > CLEAR_PREFILL * rest_s:
            self._prefill.observe((known.prefill_s,), step.target_s - rest_s, rest_s + chunk_s)
        else:
            self._prefill.fade()

    def _make_corrected(self) -> CostModel:
        base, slope, extra = self._target.values
        host, host_row = self._host.values
        (draft,), (prefill,) = self._draft.values, self._prefill.values
        return replace(
            self._profile,
            host_s=host * self._unit_s,
            host_row_s=host_row * self._unit_s,
            catch_up_s=draft * self._profile.catch_up_s,
            target_base=base,
            target_slope=slope,
            target_extra_s=extra * self._unit_s,
            draft_factor=draft,
            prefill_factor=prefill,
        )


class _Fit:
    """measured = sum of features * values, by recursive least squares over up to three values.

    The values minimise, within bounds,

        sum over steps of  weight * forgetting^age * (error / scale)^2
        + sum over values of (NOISE * (value - prior) / sd)^2

    In information form: the ridge stands beside the evidence and outlasts it, and the matrix that
    is solved is never singular. Plain floats: at this size arrays cost ten times as much.
    """

    def __init__(
        self,
        prior: Sequence[float],
        sds: Sequence[float],
        low: Sequence[float],
        high: float,
    ) -> None:
        size = len(prior)
        self._prior, self._low, self._high = tuple(prior), tuple(low), high
        self._ridge = [(NOISE / sd) ** 2 for sd in sds]
        self._evidence = [[0.0] * size for _ in range(size)]
        self._pull = [0.0] * size
        self._recent = deque([0.0] * RECENT, maxlen=RECENT)
        self._median = 0.0
        self._mean_deviation = 0.0
        self._num_steps = 0
        self._deviations: dict[int, float] = {}
        self.values = self._prior

    def predict(self, features: Sequence[float]) -> float:
        return sum(x * value for x, value in zip(features, self.values, strict=True))

    def observe(
        self, features: Sequence[float], measured: float, scale: float, at_once: bool = False
    ) -> None:
        """scale: what errors are relative to, in the unit of `measured`. at_once: the values are
        wanted with this step in them."""
        # A profile taken on a loud machine can predict nothing, or less, for a pass that took time.
        scale = max(scale, LEAST_SCALE * measured, 1e-9)
        x = [feature / scale for feature in features]
        predicted = self.predict(x)
        error, weight = self._tamed(measured / scale - predicted)
        self._forget(CHANGE_FORGETTING if self._has_changed else FORGETTING)
        target = predicted + error - sum(a * b for a, b in zip(x, self._prior, strict=True))
        for i, x_i in enumerate(x):
            self._pull[i] += weight * x_i * target
            row = self._evidence[i]
            for j, x_j in enumerate(x):
                row[j] += weight * x_i * x_j
        self._solve_in_turn(at_once)

    def fade(self) -> None:
        """A step that tells nothing: what is known gets a step older."""
        if self.values != self._prior:
            self._forget(FORGETTING)
            self._solve_in_turn()

    def deviation(self, index: int) -> float:
        """Standard deviation of one of the values, by the evidence and the ridge."""
        found = self._deviations.get(index)
        if found is None:
            unit = [float(i == index) for i in range(len(self._prior))]
            variance = _solve(self._matrix(), unit)[index]
            found = self._deviations[index] = NOISE * math.sqrt(variance)
        return found

    def _solve_in_turn(self, at_once: bool = False) -> None:
        """The first SOLVE_EVERY steps, and every so many from then on."""
        self._num_steps += 1
        is_due = self._num_steps <= SOLVE_EVERY or self._num_steps % SOLVE_EVERY == 0
        if is_due or at_once or self._has_changed:
            self.values = self._solution()
            self._deviations.clear()

    @property
    def _has_changed(self) -> bool:
        return abs(self._median) > max(MIN_CHANGE, CHANGE_DEVIATIONS * self._mean_deviation)

    def _tamed(self, error: float) -> tuple[float, float]:
        """The error as far as it is to be believed, and what it weighs."""
        self._recent.append(error)
        self._median = sorted(self._recent)[RECENT // 2]
        beside = error - self._median
        near = min(max(beside, -FAR), FAR)
        self._mean_deviation += (1 - FORGETTING) * (abs(near) - self._mean_deviation)
        weight = 1.0 if near == beside else (FAR / beside) ** 4
        return self._median + near, weight

    def _forget(self, kept: float) -> None:
        self._pull = [kept * value for value in self._pull]
        self._evidence = [[kept * value for value in row] for row in self._evidence]

    def _matrix(self) -> list[list[float]]:
        matrix = [row[:] for row in self._evidence]
        for i, ridge in enumerate(self._ridge):
            matrix[i][i] += ridge
        return matrix

    def _solution(self) -> tuple[float, ...]:
        """Values that fall outside are put on their bounds, and the others are solved for again."""
        matrix, pull = self._matrix(), self._pull[:]
        pinned: dict[int, float] = {}
        while True:
            found = [p + d for p, d in zip(self._prior, _solve(matrix, pull), strict=True)]
            for i, bound in pinned.items():
                found[i] = bound
            kept = [min(max(v, low), self._high) for v, low in zip(found, self._low, strict=True)]
            outside = [i for i, (v, k) in enumerate(zip(found, kept, strict=True)) if v != k]
            if not outside:
                return tuple(found)
            for i in outside:
                pinned[i] = kept[i]
                _pin(matrix, pull, i, kept[i] - self._prior[i])


def _pin(matrix: list[list[float]], pull: list[float], index: int, value: float) -> None:
    """Change the equations so that the solution at index is this value, and the others adapt."""
    for i, row in enumerate(matrix):
        pull[i] -= row[index] * value
        row[index] = 0.0
    matrix[index] = [float(i == index) for i in range(len(pull))]
    pull[index] = value


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a positive definite system, by elimination; arguments are left as they are."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
