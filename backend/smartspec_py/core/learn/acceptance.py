"""Estimates the probability that a draft is accepted, given that all earlier drafts are accepted.

A cohort is a group of drafts with similar acceptance, such as the drafts for requests of the same
workload, or prompt lookups with similar matches. For cohort c and position j of a step,

    p[c, j] = (position_trials mean_c + accepted[c, j]) / (position_trials + trials[c, j])

Acceptance depends on the position. After an accepted draft, the next one is more likely to be
accepted. A single rate would underestimate later positions. mean_c is the acceptance rate of the
cohort over all positions, shrunk towards a prior. The prior is the rate given by the proposer for
this cohort, or else the rate of all other cohorts. So the estimate of a rare cohort starts from a
good value.

A request may differ from its cohort. Its number of accepted drafts is compared with the number
expected by p. The odds of p are multiplied by

    f = (w/2 + accepted) / (w/2 + expected) * (w/2 + trials - expected) / (w/2 + trials - accepted)

to the power of x. x is the share of the cohort's evidence that comes from other requests. Otherwise
evidence from the request itself would count twice, because the cohort already contains it.

The best weight w of the request's own evidence differs between workloads, and so does the rate at
which texts change. Therefore there are several experts, each with its own w and memory. The
estimate is the mean of the experts, weighted by how well each predicted the results so far.

Counts decay by a constant factor at every step, and more slowly at steps without drafts. Evidence
that is not renewed loses its weight. So the estimate of a request without drafts returns to its
cohort, a cohort returns to the other cohorts, and all return to `initial_mean`. Speculation is
therefore never disabled forever.

Time is counted in steps; this module does not read a clock.
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
    """Acceptance rate assumed before any observation. Published draft models have 0.5 to 0.9."""

    initial_trials: float = 8.0
    """Weight of the prior in a cohort's mean, in trials. It equals two steps of a few requests."""

    position_trials: float = 64.0
    """Weight of the cohort's mean in the rate of a position, in trials. It is large because
    positions differ less than cohorts, and later positions have few trials."""

    experts: tuple[tuple[float, float], ...] = ((8.0, 0.85), (8.0, 0.98), (64.0, 0.99))
    """For each expert, the weight w in trials, and the decay factor of a request's counts at a step
    with drafts. The first expert detects a change of the text within ten steps. The second suits
    requests that differ a lot. The third assumes that requests differ only by chance. Together
    they predict as well as the best of them (docs/research/log). At a step without drafts, all
    experts use the decay factor of the last one, because such a step is no evidence."""

    forgetting: float = 0.999
    """Decay factor of a cohort's counts, and of the log-likelihoods of experts, per step of a
    request with drafts. The half-life is 693 such steps."""

    idle_forgetting: float = 0.998
    """Decay factor of a cohort's counts at a step without drafts for the cohort. It does not depend
    on the number of requests, because all of them resume drafting at once. With 0.999 per request,
    32 requests resumed every 50 steps. That lost 2.5 % of goodput on a workload where speculation
    does not pay off (docs/research/log)."""

    max_cohorts: int = 256
    """Largest number of cohorts. Beyond it, the least recently used cohort is removed."""


class AcceptanceTracker:
    """The estimates for one proposer.

    `observe` adds results, `accept_probs` returns estimates, and `release` removes a request. The
    first two handle all sequences of a step in one call, which is faster.
    """

    def __init__(
        self,
        assumed: Mapping[str, float] | None = None,
        settings: AcceptanceSettings = AcceptanceSettings(),
    ) -> None:
        """assumed: prior acceptance rates by cohort. Other cohorts use the rate of the rest."""
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
        """Decayed counts per request and expert: accepted, expected and trials. Shape [requests, 3,
        experts]; row 0 stays 0, for requests without observations."""

    @property
    def sequences(self) -> set[int]:
        """Sequences with counts of their own."""
        return set(self._requests)

    def mean_of(self, cohort: str = "") -> float:
        """Expected acceptance rate of a new request of this cohort."""
        return float(self._means([cohort])[0])

    def accept_probs(
        self, sequences: Sequence[int], num_positions: int, cohorts: Sequence[str] | None = None
    ) -> Floats:
        """Acceptance probabilities of positions 0..num_positions - 1 of a step.

        cohorts: the cohort of each sequence; None if there is only one cohort. Returns shape
        [len(sequences), num_positions].
        """
        names, each = _grouped(cohorts or [""] * len(sequences))
        rates, trials = self._rates(names, num_positions)
        rows = self._rows_of(sequences)
        return self._mean_of_experts(self._expert_probs(rows, rates[each], trials[each]))

    def observe(
        self,
        sequences: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        cohorts: Sequence[str] | None = None,
    ) -> None:
        """Add the results of one decoding step of each of these sequences.

        num_drafted, num_accepted: 0 for a sequence without drafts. cohorts: as in `accept_probs`,
        for the drafts of this step.
        """
        if not sequences:
            return
        names, each = _grouped(cohorts or [""] * len(sequences))
        if not any(num_drafted):
            self._observe_idle(sequences, names)
            return
        accepted = np.array(num_accepted, dtype=np.int64)
        trials = accepted + (accepted < np.array(num_drafted, dtype=np.int64))
        positions = np.arange(int(trials.max()))
        is_tried, is_accepted = positions < trials[:, None], positions < accepted[:, None]
        cohort_rates, cohort_trials = self._rates(names, len(positions))
        rates, rows = cohort_rates[each], self._rows_of(sequences)
        probs = self._expert_probs(rows, rates, cohort_trials[each])
        self._score_experts(probs, is_accepted, is_tried)
        for index in np.flatnonzero(rows == 0):
            sequence = sequences[index]  # it may be there twice, with events of a burst
            rows[index] = self._requests.get(sequence) or self._begin(sequence)
        expected = (rates * is_tried).sum(axis=1)
        kept = np.where(trials[:, None] > 0, self._memories, self._memories[-1])
        observed = np.stack([accepted, expected, trials], axis=1)
        self._shown[rows] = self._shown[rows] * kept[:, None] + observed[..., None]
        self._observe_cohorts(names, each, is_accepted, is_tried)

    def release(self, sequence: int) -> None:
        """Remove the sequence. Its results remain in the counts of its cohorts."""
        row = self._requests.pop(sequence, None)
        if row is not None:
            self._free.append(row)

    def state(self) -> dict[str, Any]:
        """The counts that are shared by requests, as JSON values."""
        return {
            "experts": self._likelihoods.tolist(),
            "cohorts": {
                name: [np.trim_zeros(counts[row], "b").tolist() for counts in self._counts]
                for name, row in self._rows.items()
            },
        }

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start from a saved `state`. kept: factor for its evidence. Raises ValueError if the state
        has another number of experts."""
        num = len(self._likelihoods)
        if len(state["experts"]) != num:
            raise ValueError(f"the state has {len(state['experts'])} experts, not {num}")
        self._likelihoods = kept * np.array(state["experts"])
        for name, of_one in state["cohorts"].items():
            row = self._row(name)
            for counts, values in zip(self._counts, of_one, strict=True):
                counts[row, : len(values)] = kept * np.array(values)

    @property
    def _counts(self) -> tuple[Floats, Floats]:
        return self._accepted, self._trials

    def _means(self, cohorts: Sequence[str]) -> Floats:
        """The mean acceptance rate of each of these cohorts, over all positions."""
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
        """p of each cohort, shape [len(cohorts), num_positions], and its trials."""
        rows = [self._row(name) for name in cohorts]
        weight = self._settings.position_trials
        rates = weight * self._means(cohorts)[:, None] + self._accepted[rows, :num_positions]
        rates /= weight + self._trials[rows, :num_positions]
        return rates, self._trials[rows].sum(axis=1)

    def _expert_probs(self, rows: Ints, rates: Floats, cohort_trials: Floats) -> Floats:
        """The estimate of each expert, shape [n, K, experts]. rates: p, shape [n, K]."""
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
        """The mean over the experts, weighted by how well they predicted earlier results."""
        trust = np.exp(self._likelihoods - self._likelihoods.max())
        found: Floats = probs @ (trust / trust.sum())
        return found

    def _score_experts(self, probs: Floats, is_accepted: Bools, is_tried: Bools) -> None:
        likely = np.where(is_accepted[..., None], probs, 1 - probs)
        self._likelihoods *= self._settings.forgetting ** np.count_nonzero(is_tried[:, 0])
        self._likelihoods += np.log(likely[is_tried]).sum(axis=0)

    def _rows_of(self, sequences: Sequence[int]) -> Ints:
        """The row of each sequence in `_shown`; 0 for sequences without observations."""
        return np.array([self._requests.get(sequence, 0) for sequence in sequences])

    def _begin(self, sequence: int) -> int:
        if not self._free:
            size = len(self._shown)
            self._shown = np.concatenate([self._shown, np.zeros_like(self._shown)])
            self._free.extend(range(size, 2 * size))
        row = self._requests[sequence] = self._free.pop()
        self._shown[row] = 0.0
        return row

    def _observe_idle(self, sequences: Sequence[int], cohorts: Sequence[str]) -> None:
        """`observe` for a step without drafts: counts only decay. cohorts: without repeats."""
        rows = self._rows_of(sequences)
        self._shown[rows] *= self._memories[-1]
        seen = [self._row(name) for name in cohorts]
        for counts in self._counts:
            counts[seen] *= self._settings.idle_forgetting

    def _observe_cohorts(
        self, cohorts: Sequence[str], each: Ints, is_accepted: Bools, is_tried: Bools
    ) -> None:
        """cohorts, each: as from `_grouped`. is_accepted, is_tried: [n, K]."""
        rows = [self._row(name) for name in cohorts]
        members = (np.arange(len(rows))[:, None] == each).astype(np.float64)
        num_drafting = members @ is_tried[:, 0]
        busy, idle = self._settings.forgetting, self._settings.idle_forgetting
        kept = np.where(num_drafting > 0, busy**num_drafting, idle)
        for counts, is_counted in zip(self._counts, (is_accepted, is_tried), strict=True):
            counts[rows] *= kept[:, None]
            counts[rows, : is_counted.shape[1]] += members @ is_counted

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


def _grouped(cohorts: Sequence[str]) -> tuple[list[str], Ints]:
    """The different cohorts, and for each sequence the index of its cohort among them."""
    indices = {name: index for index, name in enumerate(dict.fromkeys(cohorts))}
    return list(indices), np.array([indices[name] for name in cohorts])
