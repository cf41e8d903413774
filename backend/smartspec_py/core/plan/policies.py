"""The policies by name. Each chooses the draft lengths of its sequences in a step.

| name | draft length |
|---|---|
| `none` | 0 |
| `fixed:K` | K |
| `batch_table` | the same for all sequences, by batch size (Su et al.) |
| `goodput_global` | the same for all sequences, with the best goodput (SmartSpec) |
| `goodput` | chosen per sequence, with the best goodput |

The draft length is limited by the sequence's `max_draft_len`. If prompt lookup finds no match, the
draft length is 0 under every policy. The sequences of a step may have different policies. Policies
choose in the order of the table. Each policy treats earlier choices as fixed and assumes no drafts
for the sequences of later policies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Protocol

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.problem import PlanProblem, problem_of
from smartspec_py.core.plan.ranking import uniform_scores
from smartspec_py.core.plan.search import Outcome, best_of_each, outcome
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView

MAX_FIXED_DRAFT_LEN = 64
"""The largest K of `fixed:K`; an engine's own limit is usually far smaller."""

POLICY_NAMES = (
    f"none, fixed:K with K in 1..{MAX_FIXED_DRAFT_LEN}, batch_table, goodput_global, or goodput"
)
"""The valid policy names, for error messages."""


@dataclass(frozen=True)
class BatchTable:
    """The draft length by batch size.

    rows: batch sizes, ascending, at least 1. draft_lens: one draft length per batch size, at least
    0. Raises ValueError for other values.
    """

    rows: tuple[int, ...]
    draft_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] < 1 or any(a >= b for a, b in pairwise(self.rows)):
            raise ValueError(f"rows must ascend from 1 or more, got {self.rows}")
        if len(self.draft_lens) != len(self.rows) or min(self.draft_lens) < 0:
            raise ValueError("draft_lens must have one number, 0 or more, per entry of rows")

    def draft_len(self, batch_size: int) -> int:
        """The entry of the smallest batch size in the table that is not smaller than batch_size.

        Rounding up is safer, because drafts that are too long for a batch cost more than drafts
        that are too short. Beyond the table, the last entry is used.
        """
        return self.draft_lens[min(bisect_left(self.rows, batch_size), len(self.rows) - 1)]


@dataclass(frozen=True)
class PlannerSettings:
    """Inputs of the planner in addition to views and costs.

    batch_table: table for sequences with the policy `batch_table`.
    num_background: sequences that generate one token in the same pass but are not planned. The
        engine already has the order to generate a burst of tokens for them.
    num_prefilling: requests in prefill during the step. They gain nothing from drafts.
    last_num_tokens: tokens of the previous target pass. A pass with a different number costs
        `CostModel.change_s` more. 0 charges every pass. None charges no pass, which is the cost of
        a draft length that stays the same.
    forced: draft lengths by sequence that replace the choice of its policy, limited by
        `max_draft_len`.
    """

    batch_table: BatchTable | None = None
    num_background: int = 0
    num_prefilling: int = 0
    last_num_tokens: int | None = None
    forced: Mapping[SequenceId, int] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses for all its sequences in a step at once. Policies with a lower turn choose first."""

    @property
    def name(self) -> str: ...

    @property
    def turn(self) -> int: ...

    def choose(self, problem: PlanProblem, settings: PlannerSettings) -> Outcome: ...


@dataclass(frozen=True)
class FixedLength:
    """`none` (draft length 0) and `fixed:K`."""

    draft_len: int
    turn: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return f"fixed:{self.draft_len}" if self.draft_len else "none"

    def choose(self, problem: PlanProblem, settings: PlannerSettings) -> Outcome:
        return outcome(problem, problem.uniform(self.draft_len))


@dataclass(frozen=True)
class ByBatchSize:
    """`batch_table`: Su et al., "The Synergy of Speculative Decoding and Batching in Serving Large
    Language Models" (arXiv 2310.18813). Raises ValueError without a table."""

    name: ClassVar[str] = "batch_table"
    turn: ClassVar[int] = 1

    def choose(self, problem: PlanProblem, settings: PlannerSettings) -> Outcome:
        if settings.batch_table is None:
            raise ValueError("the policy batch_table needs a batch_table in the planner's settings")
        draft_len = settings.batch_table.draft_len(problem.batch_size)
        return outcome(problem, problem.uniform(draft_len))


@dataclass(frozen=True)
class OneForAll:
    """`goodput_global`: the policy of SmartSpec. It scores every draft length k from 0 and uses the
    best for all sequences."""

    name: ClassVar[str] = "goodput_global"
    turn: ClassVar[int] = 2

    def choose(self, problem: PlanProblem, settings: PlannerSettings) -> Outcome:
        scores = uniform_scores(problem.with_options(problem.first_options))
        return outcome(problem, problem.uniform(int(scores.argmax())))


@dataclass(frozen=True)
class OneForEach:
    """`goodput`: chooses a draft length per sequence, and a drafting method if it has several."""

    name: ClassVar[str] = "goodput"
    turn: ClassVar[int] = 3

    def choose(self, problem: PlanProblem, settings: PlannerSettings) -> Outcome:
        return best_of_each(problem)


_SIBLINGS: tuple[Policy, ...] = (FixedLength(0), ByBatchSize(), OneForAll(), OneForEach())
_BY_NAME = {policy.name: policy for policy in _SIBLINGS}


@lru_cache(maxsize=256)
def parse_policy(name: str) -> Policy:
    """The policy of this name. Raises ValueError for an unknown name; its message lists the valid
    names."""
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    kind, _, length = name.partition(":")
    if kind == "fixed" and length.isascii() and length.isdigit():
        draft_len = int(length)
        if 1 <= draft_len <= MAX_FIXED_DRAFT_LEN:
            return FixedLength(draft_len)
    raise ValueError(POLICY_NAMES)


def batch_table_of(
    cost: CostModel,
    accept_prob: float,
    rows: Sequence[int],
    max_draft_len: int,
    context_len: int = 0,
) -> BatchTable:
    """Compute the table by grid search: for each batch size, the fastest k in 0..max_draft_len.

    accept_prob: one probability for all positions. The paper does not use measured acceptance
    either.
    """
    lengths = [_grid_search(cost, accept_prob, n, max_draft_len, context_len) for n in rows]
    return BatchTable(tuple(rows), tuple(lengths))


def _grid_search(
    cost: CostModel, accept_prob: float, batch_size: int, max_draft_len: int, context_len: int
) -> int:
    row = SequenceView(
        sequence=0,
        context_len=context_len,
        remaining=1,
        policy="batch_table",
        options=(DraftOption(max_draft_len, (accept_prob,) * max_draft_len),),
    )
    return int(uniform_scores(problem_of([row] * batch_size, cost)).argmax())
