"""The policies by name: siblings that choose draft lengths for their sequences of a step.

| name | draft length |
|---|---|
| `none` | 0 |
| `fixed:K` | K |
| `batch_table` | one for all, by the number of sequences in the step (Su et al.) |
| `goodput_global` | one for all, the best by goodput (SmartSpec) |
| `goodput` | one for each, the best by goodput |

Each is capped by what makes sense for the sequence, so that one for which prompt lookup finds
nothing gets 0 under any of them. A step may mix them: every policy takes what those above it have
chosen as given, and those below it as without drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Protocol

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.ranking import uniform, uniform_scores
from smartspec_py.core.plan.search import Outcome, best_of_each, outcome
from smartspec_py.core.plan.step import Step, step_of
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView

MAX_FIXED_DRAFT_LEN = 64
"""The largest K of `fixed:K`; an engine's own limit is usually far smaller."""

POLICY_NAMES = (
    f"none, fixed:K with K in 1..{MAX_FIXED_DRAFT_LEN}, batch_table, goodput_global, or goodput"
)
"""What a policy may be called, for error messages."""


@dataclass(frozen=True)
class BatchTable:
    """The draft length by batch size. rows: batch sizes, ascending from at least 1. draft_lens: one
    for each. Raises ValueError where they are not that."""

    rows: tuple[int, ...]
    draft_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] < 1 or any(a >= b for a, b in pairwise(self.rows)):
            raise ValueError(f"rows must ascend from at least 1, got {self.rows}")
        if len(self.draft_lens) != len(self.rows) or min(self.draft_lens) < 0:
            raise ValueError("draft_lens must hold a number from 0 for each of rows")

    def draft_len(self, batch_size: int) -> int:
        """That of the next larger batch in the table, since longer drafts are the dearer mistake in
        a batch that is larger than they were meant for; beyond the table that of its last."""
        return self.draft_lens[min(bisect_left(self.rows, batch_size), len(self.rows) - 1)]


@dataclass(frozen=True)
class PlannerSettings:
    """What the planner needs beside views and costs.

    batch_table: for sequences under `batch_table`. num_background: sequences that generate a token
    in the same pass without being planned, because the engine was given a burst of tokens for them
    to generate. num_prefilling: requests whose prompts are read beside the step, and that gain
    nothing by drafts. last_num_tokens: of the target's pass before; a pass with another number is
    charged `CostModel.change_s`. 0 charges every pass, None charges none: that is what a length
    costs that stays. forced: draft lengths by sequence that take the place of what its policy would
    choose, capped by what makes sense for it.
    """

    batch_table: BatchTable | None = None
    num_background: int = 0
    num_prefilling: int = 0
    last_num_tokens: int | None = None
    forced: Mapping[SequenceId, int] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses for all sequences of a step at once. turn: the order in which policies choose."""

    @property
    def name(self) -> str: ...

    @property
    def turn(self) -> int: ...

    def choose(self, step: Step, settings: PlannerSettings) -> Outcome: ...


@dataclass(frozen=True)
class FixedLength:
    """`none` (0) and `fixed:K`."""

    draft_len: int
    turn: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return f"fixed:{self.draft_len}" if self.draft_len else "none"

    def choose(self, step: Step, settings: PlannerSettings) -> Outcome:
        return outcome(step, uniform(step, self.draft_len))


@dataclass(frozen=True)
class ByBatchSize:
    """`batch_table`: Su et al., "The Synergy of Speculative Decoding and Batching in Serving Large
    Language Models" (arXiv 2310.18813). Raises ValueError without a table."""

    name: ClassVar[str] = "batch_table"
    turn: ClassVar[int] = 1

    def choose(self, step: Step, settings: PlannerSettings) -> Outcome:
        if settings.batch_table is None:
            raise ValueError("the policy batch_table needs a batch_table in the planner's settings")
        draft_len = settings.batch_table.draft_len(step.batch_size)
        return outcome(step, uniform(step, draft_len))


@dataclass(frozen=True)
class OneForAll:
    """`goodput_global`: SmartSpec's, one k a step, every k from 0 scored."""

    name: ClassVar[str] = "goodput_global"
    turn: ClassVar[int] = 2

    def choose(self, step: Step, settings: PlannerSettings) -> Outcome:
        one_way = step
        if len(step.owners) > step.num_sequences:
            one_way = step.with_ways(step.first_ways)
        draft_len = int(uniform_scores(one_way).argmax())
        return outcome(step, uniform(step, draft_len))


@dataclass(frozen=True)
class OneForEach:
    """`goodput`: a length, and where there are several ways to draft a way, for each sequence."""

    name: ClassVar[str] = "goodput"
    turn: ClassVar[int] = 3

    def choose(self, step: Step, settings: PlannerSettings) -> Outcome:
        return best_of_each(step)


_SIBLINGS: tuple[Policy, ...] = (FixedLength(0), ByBatchSize(), OneForAll(), OneForEach())
_BY_NAME = {policy.name: policy for policy in _SIBLINGS}


@lru_cache(maxsize=256)
def parse_policy(name: str) -> Policy:
    """The policy of this name. Raises ValueError, whose message is what is allowed, without one."""
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
    """The table by grid search: for each batch size the fastest k in 0..max_draft_len.

    accept_prob: one for all positions, as in the paper, which has no feedback from acceptance.
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
    return int(uniform_scores(step_of([row] * batch_size, cost)).argmax())
