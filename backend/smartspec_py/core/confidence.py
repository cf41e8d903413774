"""What a proposer's own confidence says of its drafts: when to stop, and which to verify.

A draft comes with the log-odds of its token under the draft model's own logits. How often drafts of
such a confidence are accepted is counted while serving (`ConfidenceCalibrator`): drafts are tried
in order, so what is learned is the probability that a draft is accepted given that those before it
were, and the product over a sequence's first j drafts is its survival s_i(j). A `DraftJudge` uses
it twice in a step. With the price P of a second, in tokens (the recent token goodput):

- before each pass of the draft model, `going_on`: a sequence's next draft is of a confidence that
  is as common as it was so far, h(c), accepted with a(c), and can still be left out. It is worth

      sum over c of h(c) max(0, s_i a(c) - P slot)          slot: seconds of one more verified draft

  The n sequences go on that are worth most and pay best for a pass of n rows, if any do.
- when drafting is over and its time sunk, `trimmed`: each sequence has its first k_i drafts
  verified so that held tokens + sum of s_i(1) + .. + s_i(k_i), less P times seconds, is largest. A
  slot costs the same whoever takes it and s_i(j) does not rise with j, so the best prefix of the
  slots ranked by survival is the best choice there is.

Why the feature is the probability of the drafted token, without temperature: of what a pass gives
it tells most about acceptance, greedily and with the shared noise of coupled draws. There a token
that noise carried to the top is one that a surer target does not draw; how far it led with the
noise counted in tells less (docs/results/confidence.md).

Where drafts may be left out: greedy and coupled texts do not depend on drafts at all. But a draft
that is verified by rejection was drawn from q, and the text has the target's distribution only if
what was drawn is handed in whatever it is: to leave out a token because q gave it little would let
it through more often than p has it. To end a draft *behind* a token, as `going_on` does, depends on
nothing but tokens that are all verified, and is exact in either case.

What was left out was not tried. Nothing is biased by that here, since it was chosen by the
confidence that acceptance is learned for; evidence that is not renewed fades, and drafts of
that confidence are tried again.

Time is counted in steps; nothing here reads a clock. Memory does not grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.goodput import Objective
from smartspec_py.core.types import SamplingParams, Verification

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LOWEST, STEP, NUM_KNOTS = -6.0, 0.75, 25
"""Confidences are told apart from -6 to 12 (a probability of 0.0025, and 6e-6 short of 1):
acceptance is learned at knots, and linear between them."""

KNOTS: Floats = LOWEST + STEP * np.arange(NUM_KNOTS)

BELIEF = 1.0 / (1.0 + np.exp(-KNOTS))
"""Acceptance where nothing was seen: the proposer is taken at its word."""

BELIEF_TRIALS = 2.0
"""Weight of that at each knot, in trials."""

PRIOR_TRIALS = 4.0
"""Weight at each knot of its neighbours, and for a kind of all kinds, in trials."""

EVENLY: Floats = np.full(NUM_KNOTS, 1.0 / NUM_KNOTS)
"""How common confidences are where nothing was seen."""

NEIGHBOURS: Floats = 0.5 ** np.abs(np.subtract.outer(np.arange(NUM_KNOTS), np.arange(NUM_KNOTS)))
"""What a trial at one knot counts at another as its neighbour."""

FORGETTING = 0.998
"""Kept of all counts at each step: half of the evidence is 346 steps old."""

RECENT = 0.98
"""Kept of tokens and seconds at each step: the price of a second follows the load in 50 steps."""

REFRESH_STEPS = 8
"""Steps after which what was counted is used: it changes less than it costs to look at."""

MAX_KINDS = 256
"""Kinds that are told apart; of more, the one that was used longest ago is forgotten."""

RATIO = Objective()

LAST = (NUM_KNOTS - 1) * (1 - 1e-9)
"""The largest place of a confidence among the knots: short of the last, so that one is above it."""

_ALL = 0
"""The row of all kinds together."""


def may_be_left_out(sampling: SamplingParams) -> bool:
    """Whether a draft may stay unverified because of what was drafted; see above."""
    return sampling.is_greedy or sampling.verification is Verification.COUPLED


class ConfidenceCalibrator:
    """Of one proposer: from confidence to the probability that the draft is accepted, given that
    those before it in its step were. By kind of request, as in `core.acceptance`.

    Batches are arrays [B, K], a line for each sequence; what stands behind its drafts is not read.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[str, int] = OrderedDict()
        shape = (1 + MAX_KINDS, NUM_KNOTS)
        self._accepted, self._trials = np.zeros(shape), np.zeros(shape)
        self._probs = np.tile(BELIEF, (shape[0], 1))
        self._shares = np.tile(EVENLY, (shape[0], 1))
        self._news: list[tuple[Ints, Floats, Bools]] = []  # rows, confidences, whether accepted

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those told apart now."""
        return tuple(self._rows)

    def rows(self, kinds: Sequence[str]) -> Ints:
        """What the methods below know these kinds by, until the next `observe`; [B]."""
        return np.array([self._rows.get(kind, _ALL) for kind in kinds], dtype=np.int64)

    def accept_probs(self, rows: Ints, confidences: Floats) -> Floats:
        """Conditional acceptance probabilities; confidences: [B] or [B, K], rows: [B]."""
        knots, shares = _places(confidences)
        places = knots + (rows * NUM_KNOTS).reshape(-1, *(1,) * (confidences.ndim - 1))
        below = self._probs.take(places)
        found: Floats = below + shares * (self._probs.take(places + 1) - below)
        return found

    def spread(self, rows: Ints) -> tuple[Floats, Floats]:
        """Acceptance at the knots, and the share of the trials that were there; [B, NUM_KNOTS]."""
        return self._probs[rows], self._shares[rows]

    def observe(
        self, kinds: Sequence[str], confidences: Floats, num_verified: Ints, num_accepted: Ints
    ) -> None:
        """Learn from a step; counts of drafts, [B]. Those behind a rejected one were not tried."""
        positions = np.arange(confidences.shape[1])
        is_trial = positions <= np.minimum(num_accepted, num_verified - 1)[:, None]
        sequences, tried = is_trial.nonzero()
        rows = np.array([self._row(kind) for kind in kinds], dtype=np.int64)
        is_accepted = tried < num_accepted[sequences]
        self._news.append((rows[sequences], confidences[is_trial], is_accepted))
        if len(self._news) == REFRESH_STEPS:
            self._count_news()
            self._refresh()

    def state(self) -> dict[str, Any]:
        """What was counted, as JSON has it: of all kinds together first."""
        rows = ["", *self._rows]
        return {
            "kinds": rows,
            "accepted": self._accepted[: len(rows)].tolist(),
            "trials": self._trials[: len(rows)].tolist(),
        }

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Begin with that much of the evidence of a `state`. Raises ValueError where that has other
        knots."""
        _, *kinds = state["kinds"]
        self._rows = OrderedDict((kind, row) for row, kind in enumerate(kinds, start=1))
        self._accepted[: 1 + len(kinds)] = kept * np.array(state["accepted"])
        self._trials[: 1 + len(kinds)] = kept * np.array(state["trials"])
        self._refresh()

    def _count_news(self) -> None:
        """All news count alike: they are a few steps old."""
        rows, confidences, is_accepted = map(np.concatenate, zip(*self._news, strict=True))
        self._news.clear()
        knots, above = _places(confidences)
        places, below = rows * NUM_KNOTS + knots, 1.0 - above
        self._fade_and_add(self._trials, places, above, below)
        self._fade_and_add(self._accepted, places, above * is_accepted, below * is_accepted)

    def _fade_and_add(self, counts: Floats, places: Ints, above: Floats, below: Floats) -> None:
        """places: of the knot below each trial; what it adds there and to the knot above."""
        used = counts[: 1 + len(self._rows)]
        used *= FORGETTING**REFRESH_STEPS
        added = np.bincount(places, below, used.size)
        added[1:] += np.bincount(places, above, used.size)[:-1]
        added = added.reshape(used.shape)
        added[_ALL] = added.sum(axis=0)
        used += added

    def _refresh(self) -> None:
        num_used = 1 + len(self._rows)
        accepted, trials = self._accepted[:num_used], self._trials[:num_used]
        near = accepted[_ALL] @ NEIGHBOURS + BELIEF_TRIALS * BELIEF
        near /= trials[_ALL] @ NEIGHBOURS + BELIEF_TRIALS
        everything = (PRIOR_TRIALS * near + accepted[_ALL]) / (PRIOR_TRIALS + trials[_ALL])
        found = (PRIOR_TRIALS * everything + accepted) / (PRIOR_TRIALS + trials)
        found[_ALL] = everything
        self._probs[:num_used] = _risen(found)
        common = trials + PRIOR_TRIALS * EVENLY
        self._shares[:num_used] = common / common.sum(axis=1, keepdims=True)

    def _row(self, kind: str) -> int:
        found = self._rows.get(kind)
        if found is None:
            if len(self._rows) < MAX_KINDS:
                found = 1 + len(self._rows)
            else:
                _, found = self._rows.popitem(last=False)
                self._trials[_ALL] -= self._trials[found]
                self._accepted[_ALL] -= self._accepted[found]
                self._trials[found] = self._accepted[found] = 0.0
            self._rows[kind] = found
            self._probs[found], self._shares[found] = self._probs[_ALL], self._shares[_ALL]
        self._rows.move_to_end(kind)
        return found


class RecentGoodput:
    """Tokens a second of the last steps: the price of a second. 0.0 before there was one."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def price(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def observe(self, num_tokens: int, step_s: float) -> None:
        """step_s: of a step without prompt chunks, which bring no tokens."""
        self._tokens = RECENT * self._tokens + num_tokens
        self._seconds = RECENT * self._seconds + step_s


@dataclass(frozen=True)
class StepPrices:
    """What a step's drafts cost. verify_s: seconds of target pass and host by the number of drafts
    that are verified, from 0 to the most there can be. pass_s: seconds of a draft pass by its rows.
    Both with whatever else is in the step. price: tokens that a second is worth."""

    verify_s: Floats
    pass_s: Floats
    price: float


class DraftJudge:
    """Judges the drafts that one proposer makes in one step for sequences 0..B-1.

    Before each pass `going_on`, after it `hear`; then `num_to_verify`, and `observe` what came of
    it. Sequences that are not free draft and verify as they are asked to.
    """

    def __init__(
        self,
        calibrator: ConfidenceCalibrator,
        kinds: Sequence[str],
        is_free: Sequence[bool],
        may_leave_out: Sequence[bool],
        max_draft_len: int,
        prices: StepPrices,
    ) -> None:
        """kinds, is_free, may_leave_out (see `may_be_left_out`): of each sequence."""
        self._calibrator, self._prices = calibrator, prices
        self._kinds, self._rows = kinds, calibrator.rows(kinds)
        self._is_free = np.array(is_free, dtype=bool)
        self._are_all_free = bool(self._is_free.all())
        self._is_held = ~(self._is_free & np.array(may_leave_out, dtype=bool))
        self._confidences = np.zeros((len(kinds), max_draft_len))
        self._survivals = np.ones((len(kinds), max_draft_len + 1))
        self._num_passes = self._num_drafted = 0

    def going_on(self, members: Sequence[int]) -> list[bool]:
        """Which of these sequences, that were in all passes so far, should be in the next."""
        index = np.array(members, dtype=np.int64)
        if self._are_all_free:
            goes = self._worth_a_pass(index, 0)
        else:
            is_free = self._is_free[index]
            free, goes = index[is_free], ~is_free
            if len(free):
                goes[is_free] = self._worth_a_pass(free, len(index) - len(free))
        found: list[bool] = goes.tolist()
        return found

    def hear(self, members: Sequence[int], confidences: Sequence[float]) -> None:
        """Take in the draft that each of these sequences got in a pass."""
        depth, index = self._num_passes, np.array(members, dtype=np.int64)
        found = np.array(confidences, dtype=np.float64)
        accepted = self._calibrator.accept_probs(self._rows[index], found)
        self._confidences[index, depth] = found
        self._survivals[index, depth + 1] = self._survivals[index, depth] * accepted
        self._num_passes += 1
        self._num_drafted += len(members)

    def num_to_verify(self, num_drafted: Sequence[int]) -> Ints:
        """How many of its drafts each sequence should have verified, [B]."""
        drafted = np.array(num_drafted, dtype=np.int64)
        free = np.where(self._is_held, 0, drafted)
        num_held, num_all = int((drafted - free).sum()), int(drafted.sum())
        verify_s = self._prices.verify_s[num_held : num_all + 1]
        objective = Objective(self._prices.price)
        kept = trimmed(self._survivals[:, 1:], free, verify_s, objective=objective)
        return np.where(self._is_held, drafted, kept)

    def observe(self, num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        verified, accepted = np.array(num_verified), np.array(num_accepted)
        self._calibrator.observe(self._kinds, self._confidences, verified, accepted)

    def _worth_a_pass(self, free: Ints, num_bound: int) -> Bools:
        prices, num_drafted = self._prices, self._num_drafted + num_bound
        slots_s = prices.verify_s[num_drafted + len(free)] - prices.verify_s[num_drafted]
        slot = prices.price * float(slots_s) / len(free)
        spread = self._calibrator.spread(self._rows[free])
        worth = draft_worth(self._survivals[free, self._num_passes], *spread, slot)
        pass_s = prices.pass_s[num_bound : num_bound + len(free) + 1]
        return worth_a_pass(worth, prices.price * (pass_s - pass_s[0]))


def draft_worth(survivals: Floats, accept_probs: Floats, shares: Floats, slot: float) -> Floats:
    """Tokens that one more draft of each sequence brings, [B], less what verifying it costs.

    survivals: [B], of what was drafted so far. accept_probs, shares: [B, NUM_KNOTS], acceptance of
    a draft by its confidence, and how common that is. slot: the price of verifying a draft, tokens.
    """
    gains = survivals[:, None] * accept_probs
    gains -= slot
    np.maximum(gains, 0.0, out=gains)
    found: Floats = np.einsum("ij,ij->i", gains, shares)
    return found


def worth_a_pass(worth: Floats, prices: Floats) -> Bools:
    """The sequences, [B], whose worth less the price of a pass is largest together; none where a
    pass pays for nobody. prices: [B + 1], of a pass by its rows, tokens; the first is 0."""
    order = (-worth).argsort(kind="stable")
    net = np.empty(len(worth) + 1)
    net[0] = 0.0
    worth[order].cumsum(out=net[1:])
    net -= prices[: len(net)]
    goes = np.zeros(len(worth), dtype=bool)
    goes[order[: int(net.argmax())]] = True
    return goes


def trimmed(
    survivals: Floats,
    lengths: Ints,
    verify_s: Floats,
    sunk_s: float = 0.0,
    held_tokens: float = 0.0,
    objective: Objective = RATIO,
) -> Ints:
    """How many of its drafts to verify for each sequence, [B]: the choice with the largest score.

    survivals: [B, K], of drafted tokens; what stands behind a sequence's `lengths` is not read.
    verify_s: seconds of target pass and host by the number of drafts that are verified, from 0 to
    all. sunk_s: of drafting. held_tokens: what the step brings without any of these drafts. Either
    moves nothing where the objective has a price.
    """
    is_drafted = np.arange(survivals.shape[1]) < lengths[:, None]
    worth = np.where(is_drafted, survivals, -1.0)
    # By position, then sequence: among equals the order of the sort is that of the drafts.
    order = (-worth.T).ravel().argsort(kind="stable")[: int(lengths.sum())]
    tokens = np.empty(len(order) + 1)
    tokens[0] = held_tokens
    tokens[1:] = worth.T.ravel()[order]
    np.add.accumulate(tokens, out=tokens)
    best = int(objective.score(tokens, verify_s + sunk_s).argmax())
    found: Ints = np.bincount(order[:best] % len(lengths), minlength=len(lengths))
    return found


def _places(confidences: Floats) -> tuple[Ints, Floats]:
    """The knot below each confidence, and how far it is on the way to the next, 0 to 1."""
    scaled = (confidences - LOWEST) * (1.0 / STEP)
    np.minimum(np.maximum(scaled, 0.0, out=scaled), LAST, out=scaled)
    knots = scaled.astype(np.int64)
    scaled -= knots
    return knots, scaled


def _risen(probs: Floats) -> Floats:
    """The same, made to rise along a line: the mean of the lowest line that is nowhere below and
    does not fall, and the highest that is nowhere above."""
    above = np.maximum.accumulate(probs, axis=-1)
    below = np.minimum.accumulate(probs[..., ::-1], axis=-1)[..., ::-1]
    found: Floats = 0.5 * (above + below)
    return found
