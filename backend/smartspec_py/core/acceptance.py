"""Estimates of the probability that a draft is accepted: per request, by position, by kind.

How good a request drafts is one number, r = (w m + accepted) / (w + trials), where m is the mean of
its kind and w the weight of that prior: as large as requests of the kind, once they are over, have
shown to be alike. A kind is whatever tells requests apart beforehand (their
temperature, or what the client calls its workload); the mean of a kind is itself shrunk, lightly,
to that of the others, so that a rare kind begins with what is known, and cannot move the others.

How acceptance changes with the position is learned for each kind, a_j, likewise shrunk to m: a
draft that was right so far is more likely to be right again than the first one, so that one rate
for all positions underrates deep drafts. The estimate for position j of a request is a_j with its
log-odds shifted by t times those of r against the mean of a_j over the drafts that were tried.

t is how far the difference of a request from its kind is trusted. Drafts of one step stand and fall
together, so that they tell less than as many trials would, and the planner drafts deep just where
an estimate is too high: trusted in full, deep drafts brought 0.72 to 0.86 of what was expected of
them. So what was expected of the drafts that were made is held against what came of them, and t is
the slope of a logistic regression of the one on the other, followed step by step.

Counts are forgotten by a constant factor at every step, more slowly at steps without speculation:
evidence that is not renewed fades, a request that was switched off drifts back to its kind, that
drifts back to the others, and those to `INITIAL_MEAN`. So "off" is never for good. A request whose
text changes begins anew, with less trust in its kind (`request_counts`).

Time is counted in steps; nothing here reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.request_counts import RequestCounts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INITIAL_MEAN = 0.7
"""Assumed before anything was seen: published draft models range over 0.5 to 0.9."""

PRIOR_TRIALS = 32.0
"""Largest weight of its kind in a request's own estimate, in trials. Requests that a
draft model drafts for differ less than a dozen steps of one of them do: at 4 trials the plan
followed that noise, and lost 2 to 4 % of goodput on the shipped pair (docs/log.md)."""

LEAST_PRIOR_TRIALS = 2.0
"""The smallest such weight: for kinds whose requests have shown to differ as much as they can. What
prompt lookup finds is right nearly always where a text repeats its prompt, and else never."""

SPREAD_REQUESTS = 4.0
"""Weight of what is assumed of that beforehand, in requests that are over."""

SPREAD_FORGETTING = 0.98
"""Kept of what requests that are over have shown of it, at each that follows."""

SPREAD_TRIALS = 4.0
"""Trials from which a request that is over tells of it."""

INITIAL_TRIALS = 8.0
"""Weight of INITIAL_MEAN in the mean of the others, and of that in that of a kind, in trials."""

POSITION_TRIALS = 16.0
"""Weight of the mean of a kind in the rate of a position, in trials."""

MAX_POSITIONS = 64
"""Positions that are told apart; no engine drafts deeper."""

MAX_KINDS = 256
"""Kinds that are told apart; of more, the one that was used longest ago is forgotten."""

MIN_PROB = 1e-6
"""Estimates stay this far from 0 and 1, so that their log-odds are finite."""

SHARED_FORGETTING = 0.999
"""Kept of the shared counts for each step of a request that drafted: half is 693 of them old."""

IDLE_FORGETTING = 0.998
"""Kept of the shared counts at a step in which nobody of the kind drafted, however many there are.

Estimates drift to INITIAL_MEAN so that "off" is never for good. But it is all requests at once that
resume then, reading what their draft caches have missed; at 0.999 for each of 32 requests they did
so every 50 steps, and lost 2.5 % of goodput where not to speculate was right (docs/log.md). At this
rate what 1,000 trials have shown stands for about 2,000 steps. Probes look at it in between."""

TRUST_PRIOR = 4.0
"""Weight of t = 1, as information (the sum of p (1 - p) x^2 over drafts, x being their request's
distance in log-odds): 64 drafts at even odds of requests whose odds are 1.6 times their kind's."""

MAX_TRUST = 1.25

_RENORMALISE = 1e100


@dataclass(slots=True)
class _Counts:
    accepted: float = 0.0
    trials: float = 0.0

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.trials *= kept

    def add(self, accepted: float, trials: float) -> None:
        self.accepted += accepted
        self.trials += trials

    def mean_with(self, prior_mean: float, prior_trials: float) -> float:
        return (prior_trials * prior_mean + self.accepted) / (prior_trials + self.trials)


@dataclass(slots=True)
class _Kind:
    """Shared counts, and by position, of which new evidence weighs `weight`, which grows, instead
    of the old being made less: the same, and it costs less. profile: kept until the next evidence.
    prior_trials: see `AcceptanceTracker`. num_over, variance: requests that are over, and the sum
    of their squared distances from the mean as far as chance does not explain them; both fade.
    """

    counts: _Counts = field(default_factory=_Counts)
    accepted: Floats = field(default_factory=lambda: np.zeros(MAX_POSITIONS))
    trials: Floats = field(default_factory=lambda: np.zeros(MAX_POSITIONS))
    weight: float = 1.0
    profile: tuple[Floats, float] | None = None
    prior_trials: float = PRIOR_TRIALS
    num_over: float = 0.0
    variance: float = 0.0

    def note_over(self, rate: float, trials: float, mean: float) -> None:
        """A request of this kind is over, in which so much was accepted. What its distance from the
        mean is expected to be by chance alone, mean (1 - mean) / trials, tells of no difference."""
        if trials >= SPREAD_TRIALS:
            self.num_over = SPREAD_FORGETTING * self.num_over + 1.0
            self.variance *= SPREAD_FORGETTING
            self.variance += (rate - mean) ** 2 - mean * (1 - mean) / trials

    def weight_of_mean(self, mean: float) -> float:
        """What the mean weighs in a request's estimate: n trials where requests differ like a beta
        distribution of n trials, whose variance is mean (1 - mean) / (n + 1)."""
        most = mean * (1 - mean)
        prior = SPREAD_REQUESTS * most / (self.prior_trials + 1)
        variance = (prior + self.variance) / (SPREAD_REQUESTS + self.num_over)
        found = most / max(variance, MIN_PROB) - 1
        return min(max(found, LEAST_PRIOR_TRIALS), PRIOR_TRIALS)

    def observe(self, accepted: Ints, trials: Ints) -> None:
        """One step of each of n requests, of which so many drafts were kept and tried; [n] each."""
        num_tried = np.count_nonzero(trials)
        kept = SHARED_FORGETTING**num_tried if num_tried else IDLE_FORGETTING
        self.counts.fade(kept)
        self.counts.add(int(accepted.sum()), int(trials.sum()))
        self.profile = None
        self.weight /= kept
        self.accepted += self.weight * _num_reaching(accepted)
        self.trials += self.weight * _num_reaching(trials)
        if self.weight > _RENORMALISE:
            self.accepted /= self.weight
            self.trials /= self.weight
            self.weight = 1.0

    def shared_profile(self, mean: float) -> tuple[Floats, float]:
        """Odds of acceptance by position, [MAX_POSITIONS], and those of the mean rate that they
        amount to: a request that is like all others is given them as they are."""
        if self.profile is None:
            prior = POSITION_TRIALS * self.weight
            rates = (prior * mean + self.accepted) / (prior + self.trials)
            num_trials = float(self.trials.sum())
            typical = float(rates @ self.trials) / num_trials if num_trials else mean
            self.profile = _odds(rates), float(_odds(np.array([typical]))[0])
        return self.profile


def _num_reaching(counts: Ints) -> Floats:
    """How many of the counts are above position 0, 1, ..; shape [MAX_POSITIONS]."""
    at_least: Floats = np.bincount(counts, minlength=MAX_POSITIONS + 1)[::-1].cumsum()[::-1]
    return at_least[1 : MAX_POSITIONS + 1]


@dataclass(slots=True)
class _Trust:
    """See t at the top; information: that of the drafts seen, faded, beside the prior's."""

    slope: float = 1.0
    information: float = 0.0

    def probs(self, factors: Floats, odds: Floats) -> Floats:
        """factors: odds of requests over those of their kinds, [n]. odds: of those by position,
        [n, K], or [1, K] of the only one. Returns [n, K]."""
        shifted = factors[:, None] ** self.slope * odds
        found: Floats = shifted / (1 + shifted)
        return found

    def observe(self, factors: Floats, odds: Floats, accepted: Ints, trials: Ints) -> None:
        """Of n requests in one step; a step of Newton's method."""
        is_tried = np.arange(trials.max()) < trials[:, None]
        probs = self.probs(factors, odds[:, : is_tried.shape[1]])
        distance = np.log(factors)
        missed = accepted - (probs * is_tried).sum(axis=1)
        certain = (probs * (1 - probs) * is_tried).sum(axis=1)
        self.information *= SHARED_FORGETTING ** np.count_nonzero(trials)
        self.information += float(certain @ distance**2)
        self.slope += float(missed @ distance) / (TRUST_PRIOR + self.information)
        self.slope = min(max(self.slope, 0.0), MAX_TRUST)


@dataclass(slots=True)
class _Step:
    """The kinds of a step's n sequences. means: of each kind. which: for each sequence the index of
    its own; None where all are of one."""

    kinds: list[_Kind]
    means: Floats
    which: Ints | None

    def each(self, of_kinds: Floats) -> Floats:
        """A row of each sequence, [n, ..], or the only one, [1, ..], from a row of each kind."""
        return of_kinds if self.which is None else of_kinds[self.which]

    def shared(self, num_positions: int) -> tuple[Floats, Floats]:
        """Odds by position and of the mean rate, of each sequence's kind: [n, num_positions], [n],
        or [1, num_positions] and [1]."""
        pairs = zip(self.kinds, self.means.tolist(), strict=True)
        odds, typical = zip(*[kind.shared_profile(mean) for kind, mean in pairs], strict=True)
        cut = np.array([by_position[:num_positions] for by_position in odds])
        return self.each(cut), self.each(np.array(typical))


class AcceptanceTracker:
    """Keeps one estimate for each live sequence. `observe` writes, `accept_probs` reads; both take
    all sequences of a step at once, since a step has few microseconds for each."""

    def __init__(self, prior_trials: float = PRIOR_TRIALS) -> None:
        """prior_trials: how alike requests of a kind are taken to be before it is known, as the
        weight of their mean; from LEAST_PRIOR_TRIALS to PRIOR_TRIALS."""
        self._prior_trials = prior_trials
        self._all = _Counts()  # the sum over all kinds
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        self._requests = RequestCounts()
        self._trust = _Trust()
        self._kind_of: dict[int, str] = {}

    @property
    def shared_mean(self) -> float:
        """Of all kinds together."""
        return self._all.mean_with(INITIAL_MEAN, INITIAL_TRIALS)

    @property
    def sequences(self) -> set[int]:
        """Those of which an estimate of their own is kept."""
        return self._requests.sequences

    def mean_of(self, kind: str) -> float:
        """What is expected of a request of this kind that has shown nothing yet."""
        found = self._kinds.get(kind)
        return self.shared_mean if found is None else self._mean_of(found)

    def _mean_of(self, kind: _Kind) -> float:
        own, everything = kind.counts, self._all
        accepted, trials = everything.accepted - own.accepted, everything.trials - own.trials
        others = (INITIAL_TRIALS * INITIAL_MEAN + accepted) / (INITIAL_TRIALS + trials)
        return own.mean_with(others, INITIAL_TRIALS)

    def accept_prob(self, sequence: int, kind: str = "") -> float:
        """Conditional acceptance probability of the sequence over all positions, in (0, 1)."""
        return float(self._requests.rates([sequence], np.array([self.mean_of(kind)]))[0])

    def accept_probs(
        self, sequences: Sequence[int], num_positions: int, kinds: Sequence[str] | None = None
    ) -> Floats:
        """The same for each of the first positions of a step; shape [len(sequences),
        num_positions]. kinds: of each sequence; None where nothing tells them apart."""
        step = self._step(kinds)
        odds, typical = step.shared(num_positions)
        return self._trust.probs(self._factors(sequences, step, typical), odds)

    def _factors(self, sequences: Sequence[int], step: _Step, typical: Floats) -> Floats:
        """Odds of each over those of its kind."""
        return _odds(self._requests.rates(sequences, step.each(step.means))) / typical

    def observe(
        self,
        sequences: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        kinds: Sequence[str] | None = None,
    ) -> None:
        """Take in one decoding step of each of these sequences; both counts are 0 where none was
        drafted. kinds: as in `accept_probs`; a sequence has one kind."""
        if not sequences:
            return
        step = self._step(kinds)
        accepted = np.array(num_accepted, dtype=np.int64)
        trials = accepted + (accepted < np.array(num_drafted, dtype=np.int64))
        if trials.any():
            odds, typical = step.shared(int(trials.max()))
            factors = self._factors(sequences, step, typical)
            self._trust.observe(factors, odds, accepted, trials)
        pairs = zip(step.kinds, step.means.tolist(), strict=True)
        weights = np.array([kind.weight_of_mean(mean) for kind, mean in pairs])
        means = step.each(step.means)
        self._requests.observe(sequences, accepted, trials, means, step.each(weights))
        self._kind_of.update(zip(sequences, kinds or [""] * len(sequences), strict=True))
        for index, kind in enumerate(step.kinds):
            ours = slice(None) if step.which is None else step.which == index
            before = kind.counts.accepted, kind.counts.trials
            kind.observe(accepted[ours], trials[ours])
            self._all.add(kind.counts.accepted - before[0], kind.counts.trials - before[1])
        self._forget_kinds()

    def _step(self, kinds: Sequence[str] | None) -> _Step:
        names = list(dict.fromkeys(kinds)) if kinds else [""]
        found = [self._kind(name) for name in names]
        means = np.array([self._mean_of(kind) for kind in found])
        if kinds is None or len(names) == 1:
            return _Step(found, means, None)
        order = {name: index for index, name in enumerate(names)}
        return _Step(found, means, np.array([order[kind] for kind in kinds]))

    def release(self, sequence: int) -> None:
        """Forget the sequence, but for how far it was from its kind."""
        kind = self._kinds.get(self._kind_of.pop(sequence, ""))
        accepted, trials = self._requests.release(sequence)
        if kind is not None and trials > 0:
            kind.note_over(accepted / trials, trials, self._mean_of(kind))

    def _kind(self, kind: str) -> _Kind:
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind(prior_trials=self._prior_trials)
        self._kinds.move_to_end(kind)
        return found

    def _forget_kinds(self) -> None:
        """Those that are too many. Behind a step, since one may bring many at once."""
        while len(self._kinds) > MAX_KINDS:
            _, oldest = self._kinds.popitem(last=False)
            self._all.add(-oldest.counts.accepted, -oldest.counts.trials)


def _odds(prob: Floats) -> Floats:
    prob = np.minimum(np.maximum(prob, MIN_PROB), 1 - MIN_PROB)
    found: Floats = prob / (1 - prob)
    return found
