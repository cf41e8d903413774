"""An exhaustive search over the plans of a small step, and random steps to plan.

It shares no code with the planner: expected tokens and seconds of every plan are worked out from
the views and the cost model alone, by the formulas of docs/research/control.md.
"""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.trees import tree_options
from smartspec_py.core.types import DraftOption, SequenceView

RECOVERY_TOKENS = 32
TOKENS_A_STEP = 2.0


@dataclass(frozen=True)
class EveryPlan:
    """All plans of a step, one a line; arrays of [plans]. num_met: targets that are met."""

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    num_met: NDArray[np.int64]

    @property
    def best_goodput(self) -> float:
        return float((self.tokens / self.seconds).max())

    @property
    def most_met(self) -> int:
        return int(self.num_met.max())

    def best_score(self, score: Callable[[object, object], object], num_met: int = 0) -> float:
        """Of the plans that meet at least so many targets."""
        allowed = self.num_met >= num_met
        return float(np.max(score(self.tokens[allowed], self.seconds[allowed])))  # type: ignore[arg-type]


def every_plan(views: Sequence[SequenceView], cost: CostModel) -> EveryPlan:
    """Every way and every length of every sequence: the product of what each can do."""
    can_do = [_can_do(view) for view in views]
    picked = np.indices([len(one) for one in can_do]).reshape(len(views), -1)
    # [what, sequence, plan]: drafts, passes, tokens, draft prefill, fixed seconds.
    parts = np.array([np.array(one)[pick].T for one, pick in zip(can_do, picked, strict=True)])
    drafts, passes, gained, prefills, fixed_s = parts.transpose(1, 0, 2)
    batch_size = len(views)
    context_len = sum(view.context_len for view in views) / batch_size
    num_tokens = batch_size + drafts.sum(axis=0)
    seconds = cost.targets_s(batch_size, num_tokens, context_len)
    seconds = seconds + cost.host_s
    for number in range(1, int(passes.max(initial=0)) + 1):
        seconds = seconds + cost.draft_pass_s[(passes >= number).sum(axis=0)]
    late_s: float | NDArray[np.float64] = 0.0
    for view, prefill, fixed in zip(views, prefills, fixed_s, strict=True):
        spread = prefill / max(1.0, view.remaining / TOKENS_A_STEP)
        seconds = seconds + cost.draft_prefill_s * spread + fixed
        late_s = late_s + cost.draft_prefill_s * (prefill - spread)
    seconds = seconds + cost.draft_host_s * (drafts > 0).sum(axis=0)
    return EveryPlan(
        (1 + gained).sum(axis=0), seconds, _num_met(views, 1 + gained, seconds + late_s)
    )


def _can_do(view: SequenceView) -> list[tuple[float, float, float, float, float]]:
    """(drafts, passes, tokens gained, prefill, fixed seconds) of a sequence's ways and lengths."""
    found = [(0.0, 0.0, 0.0, 0.0, 0.0)]
    for way in view.options:
        gained, survives = 0.0, 1.0
        for k in range(1, way.max_draft_len + 1):
            survives *= way.accept_probs[k - 1]
            gained += survives
            found.append(
                (
                    k,
                    (way.depth or k) * way.has_draft_passes,
                    gained,
                    way.draft_prefill_len,
                    way.draft_s,
                )
            )
    return found


def _num_met(
    views: Sequence[SequenceView], tokens: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.int64]:
    met = np.zeros(len(seconds), dtype=np.int64)
    for view, own in zip(views, tokens, strict=True):
        if view.slo_s_per_token is None:
            met += 1
        else:
            ahead = view.slack_s / max(1, min(view.remaining, RECOVERY_TOKENS))
            met += seconds <= (view.slo_s_per_token + ahead) * own
    return met


@dataclass(frozen=True)
class Kind:
    """What random steps are made of.

    jitter: points of a table lie up to this part above their line. draft_prefill_s: seconds for
    each token. is_mixed: half of the sequences are looked up for. has_options: they may choose.
    has_trees: what they draft may be a tree of up to 6 nodes.
    is_stepped: tables rise by steps of some tokens, as of a kernel that pads. has_targets: some
    sequences have a latency target.
    """

    jitter: float = 0.0
    draft_prefill_s: float = 0.0
    is_mixed: bool = False
    has_options: bool = False
    has_trees: bool = False
    is_stepped: bool = False
    has_targets: bool = False
    draft_host_s: float = 0.0
    max_rows: int = 5
    max_draft_len: int = 4


def random_cost(rng: random.Random, kind: Kind) -> CostModel:
    draft_s = rng.choice([0.01, 0.03, 0.1, 0.3])
    tokens = (1, 2, 3, 4, 5, *((6, 7) if kind.has_trees else ()))
    return CostModel(
        target=_random_table(rng, kind, (1, 2, 3, 4, 5), tokens, 1.0),
        draft=_random_table(rng, kind, (1, 2, 3, 5), (1,), draft_s),
        host_s=0.13,
        draft_host_s=kind.draft_host_s,
        draft_prefill_s=kind.draft_prefill_s * rng.choice([0.2, 1.0]),
    )


def _random_table(
    rng: random.Random, kind: Kind, rows: tuple[int, ...], tokens: tuple[int, ...], base_s: float
) -> PassTable:
    """base_s, flat or with a slope for each token, and the jitter above that."""
    slope = rng.choice([0.0, 0.02, 0.1, 0.3]) * base_s
    tile = rng.choice([2, 4, 8]) if kind.is_stepped else 1
    return PassTable(
        rows,
        tokens,
        tuple(
            tuple(
                (base_s + slope * -(-r * n // tile) * tile) * (1 + kind.jitter * rng.random())
                for n in tokens
            )
            for r in rows
        ),
    )


def random_views(rng: random.Random, kind: Kind) -> list[SequenceView]:
    views = [_random_view(rng, kind, i) for i in range(rng.randint(1, kind.max_rows))]
    if kind.has_targets:
        views = [_with_target(rng, view) for view in views]
    return views


def _random_view(rng: random.Random, kind: Kind, sequence: int) -> SequenceView:
    """A third of the draft caches are behind; acceptance may rise with the position."""
    options = [_random_option(rng, kind, not (kind.is_mixed and rng.random() < 0.5))]
    if kind.has_options and rng.random() < 0.7:
        options.append(_random_option(rng, kind, not options[0].has_draft_passes))
    if kind.has_trees:
        [trees] = tree_options(options[:1], rng.uniform(0.1, 0.7), 6, rng.choice([0.0, 0.01]))
        options += trees
    return SequenceView(sequence, 10, rng.randint(1, 64), "goodput", tuple(options))


def _random_option(rng: random.Random, kind: Kind, has_draft_passes: bool) -> DraftOption:
    first, rise = rng.uniform(0.05, 0.98), rng.choice([0.0, 0.0, 0.1, -0.1])
    draft_len = rng.choice([rng.randint(0, kind.max_draft_len), kind.max_draft_len])
    probs = [min(max(first + rise * j, 0.01), 0.99) for j in range(draft_len)]
    prefill_len = rng.choice([0, 0, rng.randint(1, 100)]) if has_draft_passes else 0
    return DraftOption(draft_len, tuple(probs), prefill_len, has_draft_passes)


def _with_target(rng: random.Random, view: SequenceView) -> SequenceView:
    if rng.random() < 0.4:
        return view
    slo = rng.choice([0.3, 0.5, 0.7, 1.0, 1.5, 2.5])
    return replace(view, slo_s_per_token=slo, slack_s=rng.choice([0.0, 3.0, -3.0]))


def expected_tokens(accept_probs: Sequence[float], draft_len: int) -> float:
    """Tokens of one sequence in a step with k drafts: 1 + a_1 + a_1 a_2 + .. + a_1 .. a_k."""
    return 1.0 + sum(accumulate(accept_probs[:draft_len], operator.mul))
