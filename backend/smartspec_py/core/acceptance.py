"""Estimates of the probability that a draft is accepted: per request, by position, by kind.

How good a request drafts is one number, r = (w m + accepted) / (w + trials), where m is the mean of
its kind and w the weight of that prior. A kind is whatever tells requests apart beforehand (their
temperature, or what the client calls its workload); the mean of a kind is itself shrunk, lightly,
to that of the others, so that a rare kind begins with what is known, and cannot move the others.

How acceptance changes with the position is learned for each kind, a_j, likewise shrunk to m: a
draft that was right so far is more likely to be right again than the first one, so that one rate
for all positions underrates deep drafts. The estimate for position j of a request is a_j with its
log-odds shifted by those of r against the mean of a_j over the drafts that were tried.

Counts are forgotten by a constant factor at every step, also at steps without speculation: evidence
that is not renewed fades, a request that was switched off drifts back to its kind, that drifts back
to the others, and those to `INITIAL_MEAN`. So "off" is never for good. Where the text of a request
changes, waiting for its old counts to fade takes too long: two CUSUM tests (Page, 1954) watch for
odds three times lower and three times higher, and on alarm the request begins anew with what it
showed since the change, and with less trust in its kind.

Time is counted in steps; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from smartspec_py.core.goodput import accept_trials

INITIAL_MEAN = 0.7
"""Assumed before anything was seen: published draft models range over 0.5 to 0.9."""

PRIOR_TRIALS = 32.0
"""Weight of its kind in a request's own estimate, in trials. Requests of one kind differ less than
a dozen steps of one of them do: at 4 trials the plan followed that noise, and lost 2 to 4 % of
goodput on the shipped pair (docs/log.md)."""

CHANGED_PRIOR_TRIALS = 8.0
"""The same for a request whose text has changed: it has shown that it is not like its kind."""

INITIAL_TRIALS = 8.0
"""Weight of INITIAL_MEAN in the mean of the others, and of that in that of a kind, in trials."""

POSITION_TRIALS = 16.0
"""Weight of the mean of a kind in the rate of a position, in trials."""

MAX_POSITIONS = 64
"""Positions that are told apart; no engine drafts deeper."""

MAX_KINDS = 64
"""Kinds that are told apart; of more, the one that was used longest ago is forgotten."""

MIN_PROB = 1e-6
"""Estimates stay this far from 0 and 1, so that their log-odds are finite."""

REQUEST_FORGETTING = 0.98
"""Kept of a request's counts at each of its steps: half of the evidence is 34 steps old."""

SHARED_FORGETTING = 0.999
"""Kept of the shared counts for each step of a request: half is 693 request steps old."""

CHANGE_ODDS = 3.0
"""The change that the tests look for: odds so many times as high, or as low."""

LOG_CHANGE = math.log(CHANGE_ODDS)

ALARM = 5.0
"""Log-likelihood ratio at which a change is believed: simulated, one false alarm in about 1,000
steps of 4 drafts; 0.8 -> 0.5 is seen after 12 steps (median), 0.3 -> 0.8 after 9."""

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
    """Shared counts, and by position. New evidence weighs `weight`, which grows, instead of the old
    being made less: the same, and it costs nothing at each step."""

    counts: _Counts = field(default_factory=_Counts)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    trials: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    weight: float = 1.0
    deepest: int = 0
    profile: tuple[list[float], float] | None = None

    def observe(self, num_accepted: int, num_trials: int) -> None:
        self.counts.fade(SHARED_FORGETTING)
        self.counts.add(num_accepted, num_trials)
        self.profile = None
        self.weight /= SHARED_FORGETTING
        self.deepest = max(self.deepest, num_trials)
        for position in range(num_trials):
            self.trials[position] += self.weight
        for position in range(num_accepted):
            self.accepted[position] += self.weight
        if self.weight > _RENORMALISE:
            self.accepted = [value / self.weight for value in self.accepted]
            self.trials = [value / self.weight for value in self.trials]
            self.weight = 1.0

    def shared_profile(self, mean: float) -> tuple[list[float], float]:
        """Odds of acceptance by position, and those of the mean rate that they amount to: a request
        that is like all others is given them as they are. Kept until the next evidence."""
        if self.profile is None:
            prior = POSITION_TRIALS * self.weight
            tried = list(zip(self.accepted, self.trials, strict=True))[: self.deepest]
            rates = [(prior * mean + accepted) / (prior + trials) for accepted, trials in tried]
            num_trials = sum(trials for _, trials in tried)
            typical = mean
            if num_trials > 0:
                weighed = sum(rate * trials for rate, (_, trials) in zip(rates, tried, strict=True))
                typical = weighed / num_trials
            untried = [_odds(mean)] * (MAX_POSITIONS - self.deepest)
            self.profile = [_odds(rate) for rate in rates] + untried, _odds(typical)
        return self.profile


@dataclass(slots=True)
class _Change:
    """One CUSUM test: its statistic, and what was counted since it last was 0."""

    statistic: float = 0.0
    since: _Counts = field(default_factory=_Counts)

    def observe(self, log_likelihood_ratio: float, num_accepted: int, num_trials: int) -> bool:
        """Whether the change is believed now."""
        self.statistic += log_likelihood_ratio
        if self.statistic > 0:
            self.since.add(num_accepted, num_trials)
            return self.statistic > ALARM
        self.statistic = 0.0
        if self.since.trials:
            self.since = _Counts()
        return False


@dataclass(slots=True)
class _Request:
    counts: _Counts = field(default_factory=_Counts)
    prior_trials: float = PRIOR_TRIALS
    worse: _Change = field(default_factory=_Change)
    better: _Change = field(default_factory=_Change)

    def observe(self, rate: float, num_accepted: int, num_trials: int) -> None:
        """rate: what was estimated before this step.

        With odds c times as high, an acceptance is c / (1 + (c - 1) rate) times as likely and a
        rejection 1 / (1 + (c - 1) rate) times; likewise, from the other side, with odds c times as
        low.
        """
        self.counts.fade(REQUEST_FORGETTING)
        self.counts.add(num_accepted, num_trials)
        if num_trials == 0:
            return
        num_rejected, grown = num_trials - num_accepted, CHANGE_ODDS - 1
        worse = num_rejected * LOG_CHANGE - num_trials * math.log(1 + grown * (1 - rate))
        better = num_accepted * LOG_CHANGE - num_trials * math.log(1 + grown * rate)
        if self.worse.observe(worse, num_accepted, num_trials):
            self._begin_anew(self.worse)
        elif self.better.observe(better, num_accepted, num_trials):
            self._begin_anew(self.better)

    def _begin_anew(self, change: _Change) -> None:
        self.counts, self.prior_trials = change.since, CHANGED_PRIOR_TRIALS
        self.worse, self.better = _Change(), _Change()


class AcceptanceTracker:
    """Keeps one estimate for each live sequence. `observe` writes, `accept_probs` reads."""

    def __init__(self) -> None:
        self._all = _Counts()  # the sum over all kinds
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        self._requests: dict[int, _Request] = {}

    @property
    def shared_mean(self) -> float:
        """Of all kinds together."""
        return self._all.mean_with(INITIAL_MEAN, INITIAL_TRIALS)

    @property
    def sequences(self) -> set[int]:
        """Those of which an estimate of their own is kept."""
        return set(self._requests)

    def mean_of(self, kind: str) -> float:
        """What is expected of a request of this kind that has shown nothing yet."""
        found = self._kinds.get(kind)
        if found is None:
            return self.shared_mean
        own, everything = found.counts, self._all
        accepted, trials = everything.accepted - own.accepted, everything.trials - own.trials
        others = (INITIAL_TRIALS * INITIAL_MEAN + accepted) / (INITIAL_TRIALS + trials)
        return own.mean_with(others, INITIAL_TRIALS)

    def accept_prob(self, sequence: int, kind: str = "") -> float:
        """Conditional acceptance probability of the sequence over all positions, in (0, 1)."""
        return self._rate(self._requests.get(sequence), self.mean_of(kind))

    def accept_probs(self, sequence: int, num_positions: int, kind: str = "") -> tuple[float, ...]:
        """The same for each of the first positions of a step."""
        mean = self.mean_of(kind)
        odds, typical = self._kind(kind).shared_profile(mean)
        factor = _odds(self._rate(self._requests.get(sequence), mean)) / typical
        return tuple([x / (1 + x) for x in [factor * y for y in odds[:num_positions]]])

    def observe(self, sequence: int, num_drafted: int, num_accepted: int, kind: str = "") -> None:
        """Take in one decoding step of the sequence; both counts are 0 where none was drafted. A
        sequence has one kind."""
        found = self._kind(kind)
        request = self._requests.get(sequence)
        if request is None:
            request = self._requests[sequence] = _Request()
        num_trials = accept_trials(num_drafted, num_accepted)
        rate = self._rate(request, self.mean_of(kind)) if num_trials else 0.0
        request.observe(rate, num_accepted, num_trials)
        accepted, trials = found.counts.accepted, found.counts.trials
        found.observe(num_accepted, num_trials)
        self._all.add(found.counts.accepted - accepted, found.counts.trials - trials)
        self._kinds.move_to_end(kind)

    def release(self, sequence: int) -> None:
        self._requests.pop(sequence, None)

    @staticmethod
    def _rate(request: _Request | None, mean: float) -> float:
        """mean: of its kind."""
        return mean if request is None else request.counts.mean_with(mean, request.prior_trials)

    def _kind(self, kind: str) -> _Kind:
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) == MAX_KINDS:
                _, oldest = self._kinds.popitem(last=False)
                self._all.add(-oldest.counts.accepted, -oldest.counts.trials)
            found = self._kinds[kind] = _Kind()
        return found


def _odds(prob: float) -> float:
    prob = min(max(prob, MIN_PROB), 1 - MIN_PROB)
    return prob / (1 - prob)
