"""Estimates the probability that a draft is accepted, given that all earlier drafts are accepted.

A cohort is a group of drafts with similar acceptance, such as the drafts for requests of the same
workload, or prompt lookups with similar matches. mean_c is the acceptance rate of cohort c, shrunk
towards a prior. The prior is the rate given by the proposer for this cohort, or else the rate of
all other cohorts. So the estimate of a rare cohort starts from a good value.

The guesses of heads get worse with each position j of a step. For them,

    p[c, j] = (POSITION_TRIALS mean_c + accepted[c, j]) / (POSITION_TRIALS + trials[c, j])

For other proposers, p[c, j] = mean_c at every position.

A request may differ from its cohort. Its number of accepted drafts is compared with the number
expected by p. The odds of p are multiplied by

    f = (w/2 + accepted) / (w/2 + expected) * (w/2 + trials - expected) / (w/2 + trials - accepted)

to the power of x. x is the share of the cohort's evidence that comes from other requests. Otherwise
evidence from the request itself would count twice, because the cohort already contains it.

The best weight w of the request's own evidence differs between workloads, and so does the rate at
which texts change. Therefore there are a quick and a slow expert, each with its own w and memory.
The estimate is their mean, weighted by how well each predicted the results so far.

Counts decay by a constant factor at every step, and more slowly at steps without drafts. Evidence
that is not renewed loses its weight. So the estimate of a request without drafts returns to its
cohort, a cohort returns to the other cohorts, and all return to INITIAL_MEAN. Speculation is
therefore never disabled forever.

Time is counted in steps; this module does not read a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


INITIAL_MEAN = 0.7
"""Acceptance rate assumed before any observation. Published draft models have 0.5 to 0.9."""

INITIAL_TRIALS = 8.0
"""Weight of the prior in a cohort's mean, in trials. It equals two steps of a few requests."""

POSITION_TRIALS = 64.0
"""Weight of the cohort's mean in the rate of a position, in trials. It is large because positions
differ less than cohorts, and later positions have few trials."""

EXPERTS = ((8.0, 0.85), (8.0, 0.98))
"""For each expert, the weight w in trials, and the decay factor of a request's counts at a step
with drafts. The quick one detects a change of the text within ten steps. The slow one averages over
50. At a step without drafts, both use the slow decay factor, because such a step is no evidence."""

FORGETTING = 0.999
"""Decay factor of a cohort's counts, and of the log-likelihoods of experts, per step of a request
with drafts. The half-life is 693 such steps."""

IDLE_FORGETTING = 0.998
"""Decay factor of a cohort's counts at a step without drafts for the cohort. It does not depend on
the number of requests, because all of them resume drafting at once."""

MAX_COHORTS = 256
"""Largest number of cohorts. Beyond it, the least recently used cohort is removed."""


class Trial(NamedTuple):
    """One decoding step of a sequence. num_drafted, num_accepted: 0 without drafts. cohort: of the
    drafts."""

    sequence: int
    num_drafted: int
    num_accepted: int
    cohort: str = ""


class AcceptanceTracker:
    """The estimates for one proposer.

    `observe` adds results, `accept_probs` returns estimates, and `release` removes a request. The
    first two handle all sequences of a step in one call, which is faster.
    """

    def __init__(self, assumed: Mapping[str, float] | None = None, num_positions: int = 1) -> None:
        """assumed: prior acceptance rates by cohort. Other cohorts use the rate of the rest.
        num_positions: positions with rates of their own; 1 if all positions share a rate."""
        self._assumed = assumed or {}
        self._weights, self._memories = np.array(EXPERTS).T / ((2.0,), (1.0,))
        self._unknown = np.zeros((2, num_positions))
        self._cohorts: OrderedDict[str, Floats] = OrderedDict()
        """Decayed counts of each cohort, the least recently used first: accepted and trials by
        position, shape [2, num_positions]."""
        self._totals = np.zeros(2)
        """The counts of all cohorts."""
        self._likelihoods = np.zeros(len(EXPERTS))
        self._requests: dict[int, Floats] = {}
        """Decayed counts of each request by expert: accepted, expected and trials, shape
        [3, experts]."""
        self._nothing = np.zeros((3, len(EXPERTS)))

    @property
    def sequences(self) -> set[int]:
        """Sequences with counts of their own."""
        return set(self._requests)

    def accept_probs(
        self, sequences: Sequence[int], num_positions: int, cohorts: Sequence[str] | None = None
    ) -> Floats:
        """Acceptance probabilities of positions 0..num_positions - 1 of a step.

        cohorts: the cohort of each sequence; None if there is only one cohort. Returns shape
        [len(sequences), num_positions].
        """
        names, each = _grouped(cohorts or [""] * len(sequences))
        rates, trials = self._rates(names, num_positions)
        probs = self._expert_probs(self._counts_of(sequences), rates[each], trials[each])
        trust = np.exp(self._likelihoods - self._likelihoods.max())
        mean: Floats = probs @ (trust / trust.sum())
        return mean

    def observe(self, results: Sequence[Trial]) -> None:
        """Add the results of one decoding step of each of these sequences."""
        sequences, num_drafted, num_accepted, cohorts = zip(*results, strict=True)
        names, each = _grouped(cohorts)
        if not any(num_drafted):
            self._observe_idle(sequences, names)
            return
        accepted = np.array(num_accepted, dtype=np.int64)
        trials = accepted + (accepted < np.array(num_drafted, dtype=np.int64))
        positions = np.arange(int(trials.max()))
        is_tried, is_accepted = positions < trials[:, None], positions < accepted[:, None]
        cohort_rates, cohort_trials = self._rates(names, len(positions))
        rates, counts = cohort_rates[each], self._counts_of(sequences)
        probs = self._expert_probs(counts, rates, cohort_trials[each])
        self._score_experts(probs, is_accepted, is_tried)
        expected = (rates * is_tried).sum(axis=1)
        kept = np.where(trials[:, None] > 0, self._memories, self._memories[-1])
        observed = np.stack([accepted, expected, trials], axis=1)
        counts = counts * kept[:, None] + observed[..., None]
        self._requests.update(zip(sequences, counts, strict=True))
        for index, name in enumerate(names):
            self._observe_cohort(name, is_accepted[each == index], is_tried[each == index])

    def release(self, sequence: int) -> None:
        """Remove the sequence. Its results remain in the counts of its cohorts."""
        self._requests.pop(sequence, None)

    def state(self) -> dict[str, Any]:
        """The counts that are shared by requests, as JSON values."""
        cohorts = {
            name: [np.trim_zeros(row, "b").tolist() for row in counts]
            for name, counts in self._cohorts.items()
        }
        return {"experts": self._likelihoods.tolist(), "cohorts": cohorts}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start from a saved `state`. kept: factor for its evidence. Raises ValueError if the state
        has another number of experts or of positions."""
        num = len(self._likelihoods)
        if len(state["experts"]) != num:
            raise ValueError(f"the state has {len(state['experts'])} experts, not {num}")
        self._likelihoods = kept * np.array(state["experts"])
        for name, of_cohort in state["cohorts"].items():
            counts = self._unknown.copy()
            for row, values in zip(counts, of_cohort, strict=True):
                row[: len(values)] = kept * np.array(values)
            self._set_counts(name, counts)

    def _mean(self, cohort: str) -> tuple[float, float]:
        """The mean acceptance rate of the cohort, over all positions, and its trials."""
        counts = self._cohorts.get(cohort, self._unknown).sum(axis=1)
        assumed = self._assumed.get(cohort)
        if assumed is None:
            accepted, trials = self._totals - counts
            assumed = (INITIAL_TRIALS * INITIAL_MEAN + accepted) / (INITIAL_TRIALS + trials)
        mean = (INITIAL_TRIALS * assumed + counts[0]) / (INITIAL_TRIALS + counts[1])
        return float(mean), float(counts[1])

    def _rates(self, cohorts: Sequence[str], num_positions: int) -> tuple[Floats, Floats]:
        """p of each cohort, shape [len(cohorts), num_positions], and its trials."""
        means, trials = np.array([self._mean(name) for name in cohorts]).T
        rates = np.repeat(means[:, None], num_positions, axis=1)
        if self._unknown.shape[1] > 1:
            counts = np.stack([self._cohorts.get(name, self._unknown) for name in cohorts])
            accepted, tried = counts[:, :, :num_positions].transpose(1, 0, 2)
            rates = (POSITION_TRIALS * rates + accepted) / (POSITION_TRIALS + tried)
        return rates, trials

    def _expert_probs(self, counts: Floats, rates: Floats, cohort_trials: Floats) -> Floats:
        """The estimate of each expert, shape [n, K, experts]. counts: of the requests, shape
        [n, 3, experts]. rates: p, shape [n, K]."""
        accepted, expected, trials = counts.transpose(1, 0, 2)
        weights = self._weights
        factors = (weights + accepted) / (weights + expected)
        factors *= (weights + trials - expected) / (weights + trials - accepted)
        known = INITIAL_TRIALS + cohort_trials[:, None]
        factors **= np.maximum(1.0 - trials / known, 0.0)
        odds = (rates / (1 - rates))[..., None] * factors[:, None]
        probs: Floats = odds / (1 + odds)
        return probs

    def _score_experts(self, probs: Floats, is_accepted: Bools, is_tried: Bools) -> None:
        likely = np.where(is_accepted[..., None], probs, 1 - probs)
        self._likelihoods *= FORGETTING ** np.count_nonzero(is_tried[:, 0])
        self._likelihoods += np.log(likely[is_tried]).sum(axis=0)

    def _counts_of(self, sequences: Sequence[int]) -> Floats:
        """The counts of these requests, shape [n, 3, experts]."""
        return np.array([self._requests.get(sequence, self._nothing) for sequence in sequences])

    def _observe_idle(self, sequences: Sequence[int], cohorts: Sequence[str]) -> None:
        """`observe` for a step without drafts: counts only decay. cohorts: without repeats."""
        for sequence in sequences:
            if sequence in self._requests:
                self._requests[sequence] *= self._memories[-1]
        for name in cohorts:
            self._set_counts(name, IDLE_FORGETTING * self._cohorts.get(name, self._unknown))

    def _observe_cohort(self, name: str, is_accepted: Bools, is_tried: Bools) -> None:
        """is_accepted, is_tried: of the sequences of this cohort, [n, K]."""
        num_drafting = int(np.count_nonzero(is_tried[:, 0]))
        kept = FORGETTING**num_drafting if num_drafting else IDLE_FORGETTING
        added = np.stack([is_accepted.sum(axis=0), is_tried.sum(axis=0)])
        counts = kept * self._cohorts.get(name, self._unknown)
        if counts.shape[1] == 1:
            added = added.sum(axis=1, keepdims=True)
        counts[:, : added.shape[1]] += added
        self._set_counts(name, counts)

    def _set_counts(self, cohort: str, counts: Floats) -> None:
        self._totals += counts.sum(axis=1) - self._cohorts.get(cohort, self._unknown).sum(axis=1)
        self._cohorts[cohort] = counts
        self._cohorts.move_to_end(cohort)
        if len(self._cohorts) > MAX_COHORTS:
            _, oldest = self._cohorts.popitem(last=False)
            self._totals -= oldest.sum(axis=1)


def _grouped(cohorts: Sequence[str]) -> tuple[list[str], Ints]:
    """The different cohorts, and for each sequence the index of its cohort among them."""
    indices = {name: index for index, name in enumerate(dict.fromkeys(cohorts))}
    return list(indices), np.array([indices[name] for name in cohorts])
