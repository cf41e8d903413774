"""Estimates of the probability that a draft is accepted, given that those before it were.

Drafts that are expected to be alike are a cohort: those for requests of the same workload, or
look-ups whose matches are alike. Of cohort c, at position j of a step,

    p[c, j] = (position_trials mean_c + accepted[c, j]) / (position_trials + trials[c, j])

A draft that was right so far is more likely to be right again than the first one, so one rate for
all positions would underrate deep drafts. mean_c is the rate of the cohort over all positions,
shrunk to what is assumed of it: of a cohort that the proposer describes what it says, of another
one the rate of all others. So a rare cohort begins with what is known.

A request that is not like its cohorts is told by what was accepted of its drafts beside what was
expected of them by p. The odds of all its drafts are those of p times

    f = (w/2 + accepted) / (w/2 + expected) * (w/2 + trials - expected) / (w/2 + trials - accepted)

to the power of the share of its cohort's evidence that is not its own: what a cohort has learned
from one request alone is not held against that request again.

How much its own evidence should weigh (w), and how soon its text changes, differs from one use to
another. So there are several experts, each with a weight and a memory of its own, and the estimate
is the mean of theirs, weighted by how well each would have predicted what came so far.

Counts are forgotten by a constant factor at every step, more slowly at steps without drafts. So
evidence that is not renewed fades, a request that was switched off drifts back to its cohort, that
to the others, and those to `initial_mean`: "off" is never for good.

Time is counted in steps; nothing here reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.plan.policies import MAX_FIXED_DRAFT_LEN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class AcceptanceSettings:
    initial_mean: float = 0.7
    """Assumed before anything was seen: published draft models range over 0.5 to 0.9."""

    initial_trials: float = 8.0
    """Weight of what is assumed of a cohort in its mean, in trials: two steps of a few requests."""

    position_trials: float = 64.0
    """Weight of the mean of a cohort in the rate of a position, in trials: positions differ less
    than cohorts do, and deep ones are tried seldom."""

    experts: tuple[tuple[float, float], ...] = ((8.0, 0.85), (8.0, 0.98), (64.0, 0.99))
    """Of each the weight w in trials, and what it keeps of a request's counts at a step with
    drafts. The first sees a change of text within ten steps, the second requests that differ much;
    for the last they are alike but for chance. Together they predict as well as the best of them
    (docs/research/log). Steps without drafts contradict nothing, and keep what the last one
    keeps."""

    forgetting: float = 0.999
    """Kept of a cohort's counts, and of the log-likelihoods of experts, for each step of a request
    that drafted: half is 693 of them old."""

    idle_forgetting: float = 0.998
    """Kept of a cohort's counts at a step in which nobody of it drafted, however many there are:
    all resume at once then. At 0.999 for each of 32 requests they did so every 50 steps and lost
    2.5 % of goodput where not to speculate was right (docs/research/log)."""

    max_cohorts: int = 256
    """Cohorts that are told apart; of more, the one that was used longest ago is forgotten."""


class AcceptanceTracker:
    """Of one proposer. `observe` writes, `accept_probs` reads; both take all sequences of a step at
    once, since a step has few microseconds for each. `release` forgets a request."""

    def __init__(
        self,
        assumed: Mapping[str, float] | None = None,
        settings: AcceptanceSettings = AcceptanceSettings(),
    ) -> None:
        """assumed: mean acceptance of cohorts before they were seen; of others that of the rest."""
        self._assumed = assumed or {}
        self._settings = settings
        self._weights, self._memories = np.array(settings.experts).T / ((2.0,), (1.0,))
        self._rows: OrderedDict[str, int] = OrderedDict()
        self._accepted = np.zeros((settings.max_cohorts, MAX_FIXED_DRAFT_LEN))
        self._trials = np.zeros_like(self._accepted)
        self._likelihoods = np.zeros(len(settings.experts))
        self._requests: dict[int, int] = {}
        self._free: list[int] = []
        self._shown = np.zeros((1, 3, len(settings.experts)))
        """By request: accepted, expected and trials, as each expert remembers them."""

    @property
    def sequences(self) -> set[int]:
        """Those of which an estimate of their own is kept."""
        return set(self._requests)

    def mean_of(self, cohort: str = "") -> float:
        """What is expected of a request of this cohort that has shown nothing yet."""
        return float(self._means([cohort])[0])

    def accept_probs(
        self, sequences: Sequence[int], num_positions: int, cohorts: Sequence[str] | None = None
    ) -> Floats:
        """For each of the first positions of a step; shape [len(sequences), num_positions].
        cohorts: of each sequence; None where nothing tells them apart."""
        rates, trials = self._rates(cohorts or [""] * len(sequences), num_positions)
        return self._mean_of_experts(self._expert_probs(self._rows_of(sequences), rates, trials))

    def observe(
        self,
        sequences: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        cohorts: Sequence[str] | None = None,
    ) -> None:
        """Take in one decoding step of each of these sequences; both counts are 0 where none was
        drafted. cohorts: as in `accept_probs`, of what was drafted in this step."""
        if not sequences:
            return
        names = list(cohorts or [""] * len(sequences))
        accepted = np.array(num_accepted, dtype=np.int64)
        trials = accepted + (accepted < np.array(num_drafted, dtype=np.int64))
        positions = np.arange(max(1, int(trials.max())))
        is_tried, is_accepted = positions < trials[:, None], positions < accepted[:, None]
        rates, cohort_trials = self._rates(names, len(positions))
        rows = self._rows_of(sequences)
        if is_tried.any():
            self._score_experts(
                self._expert_probs(rows, rates, cohort_trials), is_accepted, is_tried
            )
        for index in np.flatnonzero(rows == 0):
            rows[index] = self._begin(sequences[index])
        expected = (rates * is_tried).sum(axis=1)
        kept = np.where(trials[:, None] > 0, self._memories, self._memories[-1])
        observed = np.stack([accepted, expected, trials], axis=1)
        self._shown[rows] = self._shown[rows] * kept[:, None] + observed[..., None]
        self._observe_cohorts(names, is_accepted, is_tried)

    def release(self, sequence: int) -> None:
        """Forget the sequence; what it taught of its cohorts stays."""
        row = self._requests.pop(sequence, None)
        if row is not None:
            self._free.append(row)

    def state(self) -> dict[str, Any]:
        """What requests have in common, as JSON has it."""
        return {
            "experts": self._likelihoods.tolist(),
            "cohorts": {
                name: [np.trim_zeros(counts[row], "b").tolist() for counts in self._counts]
                for name, row in self._rows.items()
            },
        }

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Begin with that much of the evidence of a `state`. Raises ValueError where it is of other
        experts."""
        num = len(self._likelihoods)
        if len(state["experts"]) != num:
            raise ValueError(f"{len(state['experts'])} experts, not {num}")
        self._likelihoods = kept * np.array(state["experts"])
        for name, of_one in state["cohorts"].items():
            row = self._row(name)
            for counts, values in zip(self._counts, of_one, strict=True):
                counts[row, : len(values)] = kept * np.array(values)

    @property
    def _counts(self) -> tuple[Floats, Floats]:
        return self._accepted, self._trials

    def _means(self, cohorts: Sequence[str]) -> Floats:
        """Of each of these cohorts, over all positions."""
        num, weight = len(self._rows), self._settings.initial_trials
        accepted, trials = self._accepted[:num].sum(axis=1), self._trials[:num].sum(axis=1)
        all_accepted, all_trials = accepted.sum(), trials.sum()
        found = np.empty(len(cohorts))
        for index, name in enumerate(cohorts):
            row = self._rows.get(name)
            own_accepted, own_trials = (0.0, 0.0) if row is None else (accepted[row], trials[row])
            assumed = self._assumed.get(name)
            if assumed is None:
                others = weight * self._settings.initial_mean + all_accepted - own_accepted
                assumed = others / (weight + all_trials - own_trials)
            found[index] = weight * assumed + own_accepted
            found[index] /= weight + own_trials
        return found

    def _rates(self, cohorts: Sequence[str], num_positions: int) -> tuple[Floats, Floats]:
        """Of each sequence p, [len(cohorts), num_positions], and the trials of its cohort."""
        names = list(dict.fromkeys(cohorts))
        rows = [self._row(name) for name in names]
        weight = self._settings.position_trials
        rates = weight * self._means(names)[:, None] + self._accepted[rows, :num_positions]
        rates /= weight + self._trials[rows, :num_positions]
        trials = self._trials[rows].sum(axis=1)
        if len(names) == 1:
            return np.broadcast_to(rates, (len(cohorts), num_positions)), trials
        order = {name: index for index, name in enumerate(names)}
        each = [order[name] for name in cohorts]
        return rates[each], trials[each]

    def _expert_probs(self, rows: Ints, rates: Floats, cohort_trials: Floats) -> Floats:
        """The estimate of each expert; rates: [n, K]. Shape [n, K, experts]."""
        accepted, expected, trials = self._shown[rows].transpose(1, 0, 2)
        weights = self._weights
        factors = (weights + accepted) / (weights + expected)
        factors *= (weights + trials - expected) / (weights + trials - accepted)
        known = self._settings.initial_trials + cohort_trials[:, None]
        factors **= np.maximum(1.0 - trials / known, 0.0)
        odds = (rates / (1 - rates))[..., None] * factors[:, None]
        found: Floats = odds / (1 + odds)
        return found

    def _mean_of_experts(self, probs: Floats) -> Floats:
        """The mean over the experts, by how well they predicted."""
        trust = np.exp(self._likelihoods - self._likelihoods.max())
        found: Floats = probs @ (trust / trust.sum())
        return found

    def _score_experts(self, probs: Floats, is_accepted: Bools, is_tried: Bools) -> None:
        likely = np.where(is_accepted[..., None], probs, 1 - probs)
        self._likelihoods *= self._settings.forgetting ** np.count_nonzero(is_tried[:, 0])
        self._likelihoods += np.log(likely[is_tried]).sum(axis=0)

    def _rows_of(self, sequences: Sequence[int]) -> Ints:
        """Of each in `_shown`; 0 is that of requests that have shown nothing."""
        return np.array([self._requests.get(sequence, 0) for sequence in sequences])

    def _begin(self, sequence: int) -> int:
        if not self._free:
            size = len(self._shown)
            self._shown = np.concatenate([self._shown, np.zeros_like(self._shown)])
            self._free.extend(range(size, 2 * size))
        row = self._requests[sequence] = self._free.pop()
        self._shown[row] = 0.0
        return row

    def _observe_cohorts(self, cohorts: Sequence[str], is_accepted: Bools, is_tried: Bools) -> None:
        """is_accepted, is_tried: [n, K]."""
        rows = np.array([self._row(name) for name in cohorts])
        num_drafting = np.bincount(rows[is_tried[:, 0]], minlength=len(self._trials))
        seen = np.unique(rows)
        busy, idle = self._settings.forgetting, self._settings.idle_forgetting
        kept = np.where(num_drafting[seen] > 0, busy ** num_drafting[seen], idle)
        for counts, is_counted in zip(self._counts, (is_accepted, is_tried), strict=True):
            counts[seen] *= kept[:, None]
            np.add.at(counts[:, : is_counted.shape[1]], rows, is_counted)

    def _row(self, cohort: str) -> int:
        found = self._rows.get(cohort)
        if found is None:
            found = len(self._rows)
            if found == len(self._trials):
                _, found = self._rows.popitem(last=False)
                self._accepted[found] = self._trials[found] = 0.0
            self._rows[cohort] = found
        self._rows.move_to_end(cohort)
        return found
