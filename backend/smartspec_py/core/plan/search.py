"""Searches for individual draft lengths: one per sequence.

The plan is the best prefix of ranked slots (`ranking`), for the best of a few selections of
options. If the plan misses latency targets, the search also tries plans that may meet more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np

from smartspec_py.core.plan.problem import IMPOSSIBLE, Choice, Ints, PlanProblem
from smartspec_py.core.plan.ranking import best_prefix, uniform_scores

NUM_TIMES = 6
"""Largest number of step durations that are tried if latency targets are missed."""


@dataclass(frozen=True)
class Outcome:
    """A choice with its expected tokens and seconds.

    num_met: number of sequences that meet their latency target. Sequences without a target are
    counted too.
    """

    choice: Choice
    tokens: float
    seconds: float
    num_met: int

    @property
    def key(self) -> tuple[int, float]:
        """Sort key; larger is better."""
        return self.num_met, self.tokens / self.seconds


BY_KEY = attrgetter("key")


def outcome(problem: PlanProblem, choice: Choice) -> Outcome:
    tokens, seconds = problem.tokens(choice), problem.seconds(choice)
    num_met = problem.num_sequences
    if problem.limits_s is not None:
        allowed_s = problem.allowed_s[choice.options, choice.lengths]
        num_met = int(np.count_nonzero(allowed_s >= seconds))
    return Outcome(choice, tokens, seconds, num_met)


def best_of_each(problem: PlanProblem) -> Outcome:
    """Choose a drafting method and a draft length for each sequence.

    A sequence meets its latency target if the seconds of the step, divided by the sequence's
    expected tokens in the step, are at most `PlanProblem.limits_s`. The search prefers the plan
    that meets the most targets, and among those the plan with the best goodput. A target that no
    plan can meet has no effect. A target is given up if that lets more of the others be met.
    """
    if not problem.depth:
        return outcome(problem, problem.nothing())
    if problem.num_sequences == 1:
        return outcome(problem, _best_alone(problem))
    fastest = outcome(problem, _fastest(problem))
    if fastest.num_met == problem.num_sequences:
        return fastest
    return _meeting_targets(problem, fastest)


def _best_alone(problem: PlanProblem) -> Choice:
    """The best option and draft length of a single sequence, by full search.

    It is faster than the general search. Planning time matters most in steps of one sequence.
    """
    lengths = np.arange(problem.depth + 1)
    rows = problem.held_rows
    passes_s = np.append(0.0, (problem.pass_s[rows + 1] - problem.pass_s[rows]).cumsum())
    seconds = problem.has_passes[:, None] * passes_s
    seconds[:, 1:] += problem.fixed_s[:, None]
    seconds += problem.verify_s.take(lengths, mode="clip") + problem.pass_s[rows].sum()
    scores = (problem.gains + problem.held_tokens) / seconds
    if problem.limits_s is not None:
        is_met = problem.allowed_s >= seconds
        scores = np.where(is_met | ~is_met.any(), scores, IMPOSSIBLE)
    option, length = divmod(int(scores.argmax()), problem.depth + 1)
    return Choice(np.array([option]), np.array([length]))


def _fastest(problem: PlanProblem) -> Choice:
    """The choice with the most tokens per second, without latency targets."""
    if problem.has_one_option:
        return best_prefix(problem)[0]
    return max(_of_selections(problem), key=itemgetter(1))[0]


def _of_selections(problem: PlanProblem) -> Iterator[tuple[Choice, float]]:
    """The best choice and its score for each of a few selections of options."""
    tried: list[Ints] = []
    for options in _selections(problem):
        if not any(np.array_equal(options, others) for others in tried):
            tried.append(options)
            choice, score = best_prefix(problem.with_options(options))
            yield Choice(options, choice.lengths), score


def _selections(problem: PlanProblem) -> Iterator[Ints]:
    """Selections of one option per sequence, each of shape [B].

    They are the first option, the best option at average costs, and the best option without draft
    passes (of sequences that have one).
    """
    yield problem.first_options
    price = float(uniform_scores(problem.with_options(problem.first_options)).max())
    verify_s = problem.verify_s
    draft_s = np.full(len(problem.sequence_of), verify_s[-1] - verify_s[0])
    draft_s /= max(1, len(verify_s) - 1)
    draft_s += problem.has_passes * problem.pass_s[problem.batch_size] / problem.batch_size
    worth = problem.gains - price * draft_s[:, None] * np.arange(problem.depth + 1)
    worth[:, 1:] -= price * problem.fixed_s[:, None]
    best = worth.max(axis=1)
    last = np.append(problem.first_options[1:], len(problem.sequence_of)) - 1
    for handicap in (0.0, problem.depth + 1.0):
        order = np.lexsort((best - handicap * problem.has_passes, problem.sequence_of))
        yield order[last]


def _meeting_targets(problem: PlanProblem, fastest: Outcome) -> Outcome:
    """The plan that meets the most latency targets among a few candidates.

    For a given duration of the step, each sequence needs a minimum draft length to meet its target.
    A candidate is the fastest plan with draft lengths limited to some maximum and then raised to
    the minimum for some duration. In the tests, 599 of 600 steps meet as many targets as the best
    possible plan. Their goodput is 0.3 % lower on average.
    """
    tried = (outcome(problem, choice) for choice in _needs(problem, fastest.choice))
    return max((fastest, *tried), key=BY_KEY)


def _needs(problem: PlanProblem, fastest: Choice) -> Iterator[Choice]:
    yield problem.nothing()
    for allowed_s in _step_times(problem):
        options, lengths = _least_drafts(problem, allowed_s)
        for most in range(problem.depth + 1):
            shorter = np.minimum(fastest.lengths, most)
            is_more = lengths > shorter
            chosen = np.where(is_more, options, fastest.options)
            yield Choice(chosen, np.where(is_more, lengths, shorter))


def _step_times(problem: PlanProblem) -> list[float]:
    """Up to NUM_TIMES durations of the step, in seconds, at which some target is just met."""
    times = problem.allowed_s
    times = np.unique(times[np.isfinite(times) & (times > problem.verify_s[0])])
    picked = np.linspace(0, len(times) - 1, min(len(times), NUM_TIMES)).round().astype(np.int64)
    return [float(t) for t in times[picked]]


def _least_drafts(problem: PlanProblem, seconds: float) -> tuple[Ints, Ints]:
    """The minimum draft length with which each sequence meets its target, and the option.

    seconds: the assumed duration of the step. Returns two arrays of shape [B], options and lengths.
    The length is 0 if a sequence has no target or cannot meet it.
    """
    is_met = problem.allowed_s >= seconds
    lengths = np.where(is_met.any(axis=1), is_met.argmax(axis=1), problem.depth + 1)
    order = np.lexsort((lengths, problem.sequence_of))[problem.first_options]
    return order, np.where(lengths[order] > problem.depth, 0, lengths[order])
