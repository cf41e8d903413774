"""Estimates the probability that a draft is accepted, given that all earlier drafts are accepted.

An acceptance group is a set of drafts with similar acceptance, such as the drafts for requests of
the same workload, or prompt lookups with similar matches. mean_c is the acceptance rate of group c,
shrunk towards a prior. The prior is the rate given by the proposer for this group, or else the rate
of all other groups. So the estimate of a rare group starts from a good value.

The guesses of heads get worse with each position j of a step. For them,

    p[c, j] = (POSITION_TRIALS mean_c + accepted[c, j]) / (POSITION_TRIALS + trials[c, j])

For other proposers, p[c, j] = mean_c at every position.

A request may differ from its group. Its number of accepted drafts is compared with the number
expected by p. The odds of p are multiplied by

    f = (w/2 + accepted) / (w/2 + expected) * (w/2 + trials - expected) / (w/2 + trials - accepted)

to the power of x. x is the share of the group's evidence that comes from other requests. Otherwise
evidence from the request itself would count twice, because the group already contains it.

The best weight w of the request's own evidence differs between workloads, and so does the rate at
which texts change. Therefore there are a quick and a slow expert, each with its own w and memory.
The estimate is their mean, weighted by how well each predicted the results so far.

Counts decay by a constant factor at every step, and more slowly at steps without drafts. Evidence
that is not renewed loses its weight. So the estimate of a request without drafts returns to its
group, a group returns to the other groups, and all return to INITIAL_MEAN. Speculation is
therefore never disabled forever.

Time is counted in steps; this module does not read a clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

INITIAL_MEAN = 0.7
"""Acceptance rate assumed before any observation. Published draft models have 0.5 to 0.9."""

INITIAL_TRIALS = 8.0
"""Weight of the prior in a group's mean, in trials. It equals two steps of a few requests."""

POSITION_TRIALS = 64.0
"""Weight of the group's mean in the rate of a position, in trials. It is large because positions
differ less than groups, and later positions have few trials."""

EXPERTS = ((8.0, 0.85), (8.0, 0.98))
"""For each expert, the weight w in trials, and the decay factor of a request's counts at a step
with drafts. The quick one detects a change of the text within ten steps. The slow one averages over
50. At a step without drafts, both use the slow decay factor, because such a step is no evidence."""

FORGETTING = 0.999
"""Decay factor of a group's counts, and of the log-likelihoods of experts, per step of a request
with drafts. The half-life is 693 such steps."""

IDLE_FORGETTING = 0.998
"""Decay factor of a group's counts at a step without drafts for the group. It does not depend on
the number of requests, because all of them resume drafting at once."""

MAX_GROUPS = 256
"""Largest number of groups. Beyond it, the least recently used group is removed."""


class Trial(NamedTuple):
    """One decoding step of a sequence. num_drafted, num_accepted: 0 without drafts. group: of the
    drafts."""

    sequence: int
    num_drafted: int
    num_accepted: int
    group: str = ""


@dataclass(slots=True)
class _Group:
    """Decayed counts by position."""

    accepted: list[float]
    trials: list[float]

    def faded(self, kept: float) -> _Group:
        return _Group([kept * num for num in self.accepted], [kept * num for num in self.trials])

    def add(self, num_accepted: int, num_trials: int) -> None:
        """The result of one step of one sequence."""
        if len(self.trials) == 1:
            self.accepted[0] += num_accepted
            self.trials[0] += num_trials
            return
        for position in range(num_trials):
            self.trials[position] += 1
            self.accepted[position] += position < num_accepted


class _Rates(NamedTuple):
    """p of a group by position, one for all if they share it. trials: of the group, with those of
    the prior."""

    probs: Sequence[float]
    trials: float


class _Counts(NamedTuple):
    """Decayed counts of a request, as an expert counts."""

    accepted: float = 0.0
    expected: float = 0.0
    trials: float = 0.0


class AcceptanceTracker:
    """The estimates for one proposer.

    `observe` adds results, `accept_probs` returns estimates, and `release` removes a request. NumPy
    takes four times as long as these floats with one request, as long with 32, and half as long
    with 64.
    """

    def __init__(self, assumed: Mapping[str, float] | None = None, num_positions: int = 1) -> None:
        """assumed: prior acceptance rates by group. Other groups use the rate of the rest.
        num_positions: positions with rates of their own; 1 if all positions share a rate."""
        self._assumed = assumed or {}
        self._num_positions = num_positions
        self._nothing = _Group([0.0] * num_positions, [0.0] * num_positions)
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        """The least recently used first."""
        self._accepted, self._trials = 0.0, 0.0
        """The counts of all groups."""
        self._likelihoods = [0.0] * len(EXPERTS)
        self._requests: dict[int, Sequence[_Counts]] = {}
        """The counts of each request by expert."""
        self._unknown = (_Counts(),) * len(EXPERTS)

    @property
    def sequences(self) -> set[int]:
        """Sequences with counts of their own."""
        return set(self._requests)

    def accept_probs(
        self, sequences: Sequence[int], num_positions: int, groups: Sequence[str] | None = None
    ) -> list[list[float]]:
        """Acceptance probabilities of positions 0..num_positions - 1 of a step, for each sequence.

        groups: the group of each sequence; None if there is only one group.
        """
        names = groups or [""] * len(sequences)
        rates = {name: self._rates(name) for name in dict.fromkeys(names)}
        odds = {
            name: [rate / (1.0 - rate) for rate in of_group.probs[:num_positions]]
            for name, of_group in rates.items()
        }
        most = max(self._likelihoods)
        trust = [math.exp(likelihood - most) for likelihood in self._likelihoods]
        shares = [one / sum(trust) for one in trust]
        found = []
        for sequence, name in zip(sequences, names, strict=True):
            factors = _factors(self._requests.get(sequence, self._unknown), rates[name].trials)
            weighted = list(zip(shares, factors, strict=True))
            probs = [
                1.0 - sum([share / (1.0 + odd * factor) for share, factor in weighted])
                for odd in odds[name]
            ]
            found.append(probs if self._num_positions > 1 else probs * num_positions)
        return found

    def observe(self, results: Sequence[Trial]) -> None:
        """Add the results of one decoding step of each of these sequences."""
        rates = {name: self._rates(name) for name in dict.fromkeys(one.group for one in results)}
        num_drafting = dict.fromkeys(rates, 0)
        likely = [0.0] * len(EXPERTS)
        for trial in results:
            if trial.num_drafted:
                num_drafting[trial.group] += 1
                own = self._requests.get(trial.sequence, self._unknown)
                self._requests[trial.sequence] = _observed(own, trial, rates[trial.group], likely)
            elif trial.sequence in self._requests:
                own, kept = self._requests[trial.sequence], EXPERTS[-1][1]
                self._requests[trial.sequence] = [_Counts(*[kept * n for n in one]) for one in own]
        kept = FORGETTING ** sum(num_drafting.values())
        self._likelihoods = [
            kept * before + new for before, new in zip(self._likelihoods, likely, strict=True)
        ]
        for name, num in num_drafting.items():
            drafted = [one for one in results if one.group == name and one.num_drafted]
            self._observe_group(name, FORGETTING**num if num else IDLE_FORGETTING, drafted)

    def release(self, sequence: int) -> None:
        """Remove the sequence. Its results remain in the counts of its groups."""
        self._requests.pop(sequence, None)

    def state(self) -> dict[str, Any]:
        """The counts that are shared by requests, as JSON values."""
        groups = {name: [one.accepted, one.trials] for name, one in self._groups.items()}
        return {"experts": self._likelihoods, "groups": groups}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start from a saved `state`. kept: factor for its evidence. Raises ValueError if the state
        has another number of experts or of positions."""
        num = len(self._likelihoods)
        if len(state["experts"]) != num:
            raise ValueError(f"the state has {len(state['experts'])} experts, not {num}")
        self._likelihoods = [kept * float(one) for one in state["experts"]]
        for name, rows in state["groups"].items():
            counts = _Group(*([kept * float(num) for num in row] for row in rows))
            for row in (counts.accepted, counts.trials):
                if len(row) > self._num_positions:
                    raise ValueError(
                        f"the state has {len(row)} positions, more than {self._num_positions}"
                    )
                row += [0.0] * (self._num_positions - len(row))
            self._set(name, counts)

    def _rates(self, group: str) -> _Rates:
        counts = self._groups.get(group, self._nothing)
        num_accepted, num_trials = sum(counts.accepted), sum(counts.trials)
        assumed = self._assumed.get(group)
        if assumed is None:
            accepted, trials = self._accepted - num_accepted, self._trials - num_trials
            assumed = (INITIAL_TRIALS * INITIAL_MEAN + accepted) / (INITIAL_TRIALS + trials)
        known = INITIAL_TRIALS + num_trials
        mean = (INITIAL_TRIALS * assumed + num_accepted) / known
        if self._num_positions == 1:
            return _Rates([mean], known)
        pairs = zip(counts.accepted, counts.trials, strict=True)
        return _Rates(
            [(POSITION_TRIALS * mean + a) / (POSITION_TRIALS + trials) for a, trials in pairs],
            known,
        )

    def _observe_group(self, name: str, kept: float, drafted: Sequence[Trial]) -> None:
        counts = self._groups.get(name, self._nothing).faded(kept)
        for trial in drafted:
            counts.add(trial.num_accepted, _num_trials(trial))
        self._set(name, counts)

    def _set(self, name: str, counts: _Group) -> None:
        old = self._groups.get(name, self._nothing)
        self._accepted += sum(counts.accepted) - sum(old.accepted)
        self._trials += sum(counts.trials) - sum(old.trials)
        self._groups[name] = counts
        self._groups.move_to_end(name)
        if len(self._groups) > MAX_GROUPS:
            _, oldest = self._groups.popitem(last=False)
            self._accepted -= sum(oldest.accepted)
            self._trials -= sum(oldest.trials)


def _num_trials(trial: Trial) -> int:
    return trial.num_accepted + (trial.num_accepted < trial.num_drafted)


def _observed(
    own: Sequence[_Counts], trial: Trial, rates: _Rates, likely: list[float]
) -> list[_Counts]:
    """The counts after a step with drafts. likely: by expert, the log-likelihood of the results,
    to which that of this one is added."""
    num_accepted, num_trials = trial.num_accepted, _num_trials(trial)
    probs = rates.probs[:num_trials] if len(rates.probs) > 1 else [rates.probs[0]] * num_trials
    num_expected = sum(probs)
    for expert, factor in enumerate(_factors(own, rates.trials)):
        odds = [factor * rate / (1.0 - rate) for rate in probs]
        likely[expert] += sum([math.log(odd) for odd in odds[:num_accepted]])
        likely[expert] -= sum([math.log(1.0 + odd) for odd in odds])
    return [
        _Counts(
            memory * accepted + num_accepted,
            memory * expected + num_expected,
            memory * trials + num_trials,
        )
        for (_, memory), (accepted, expected, trials) in zip(EXPERTS, own, strict=True)
    ]


def _factors(own: Sequence[_Counts], group_trials: float) -> list[float]:
    """f to the power of x, by expert."""
    if not own[0].trials:
        return [1.0] * len(own)
    factors = []
    for (weight, _), (accepted, expected, trials) in zip(EXPERTS, own, strict=True):
        half = 0.5 * weight
        factor = (half + accepted) / (half + expected)
        factor *= (half + trials - expected) / (half + trials - accepted)
        factors.append(factor ** max(1.0 - trials / group_trials, 0.0))
    return factors
