"""Measures how long an engine's passes take, before it serves.

The passes that plans need most are timed first: one request with drafts, the largest batch, and
one prompt chunk. The others follow while there is time (`limits.profile_s`). A pass that was not
timed is inferred from those that were, by its number of tokens (`_Target.seconds`). Live steps
correct the rest (`core.learn.corrections`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from smartspec_py.constants import LEAST_CHUNK
from smartspec_py.core.cost import CostModel, PassTable, interpolate
from smartspec_py.core.plan.trees import MAX_STEP_NODES
from smartspec_py.engines.base import Profilable
from smartspec_py.engines.phases import MEASURING, Steps

logger = logging.getLogger(__name__)

NUM_ROUNDS = 5
ENOUGH_S = 0.1
"""A pass that was timed for so many seconds, and twice, is not timed again: chance matters less."""

LONG_S = 0.2
"""If a pass takes longer, those with as many rows and tokens per row or more are timed only if they
are among the first. Such passes are limited by arithmetic, so each token costs the same."""

MOST_OF_CONTEXT = 0.5
"""Share of a pass of one token that its context can take at most, where passes are timed. A
disturbance while the largest batch is timed would otherwise make passes with less context free."""

ROWS_SHARE = 0.25
"""Least share of the largest batch that its rows must take beside their tokens, or noise would
count."""

FEW_ROWS = 4
"""Rows of a pass with drafts that is among the first."""

ROW_GRID = (1, 2, 4, 8, 16, 32, 64, 128)
TOKEN_GRID = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""With AVX2 and weights of 8 bits, a pass over 5 tokens takes 1.7 times as long as one over 4."""

TREE_GRID = (16, 32)
"""Tokens of a row with a tree. Passes with more of them than trees of a step have are inferred."""
PROMPT_GRID = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WORTH_DOUBLING = 0.9
"""Starting at LEAST_CHUNK, the prompt chunk is doubled while the time per token falls to this
factor or less. Then one larger pass delays the other requests less than two smaller passes. Result
on two cores of an Intel Xeon with AMX: 256 tokens in bfloat16 and 128 in float32."""

DRAFT_PREFILL_TOKENS = (16, 80)
"""Tokens of two passes of the draft model. Their difference gives the cost of one token."""

OTHER_SHAPES, LEAST_CHANGE = (4, 5, 6, 7), 0.02
"""Tokens of passes that are run to find out what another number costs: more than an engine keeps
warm. If that is a smaller share of a pass, it is taken as 0."""

SHAPE_CHANGE_S = 0.5
"""No more rounds of these passes start after so many seconds."""


@dataclass(frozen=True)
class ProfileShape:
    """The range of passes that a server can run.

    context_len: tokens of context to measure at.
    prefill_chunk: prompt tokens in a pass. None: the profile chooses it, see WORTH_DOUBLING.
    max_prompt: most prompt tokens that one request can have.
    max_nodes: most drafts of a request that are a tree; 0 if there are only chains.
    """

    max_sequences: int
    max_draft_len: int
    context_len: int
    prefill_chunk: int | None
    max_prompt: int
    max_nodes: int = 0


class _Pass(NamedTuple):
    """See `Profilable`."""

    batch_size: int
    tokens_per_row: int
    context_len: int
    num_logits: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.tokens_per_row


IsOver = Callable[[], bool]
"""Whether the time for measuring is over."""


def measure(
    target: Profilable,
    draft: Profilable | None,
    shape: ProfileShape,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> CostModel:
    """Measure a cost model.

    Target passes are measured over rows x tokens and over prompt tokens, draft passes over rows.
    budget_s: after this many seconds, only passes that cannot be inferred are still timed, once
    each. clock: seconds, any origin.
    """
    until_s = clock() + budget_s

    def is_over() -> bool:
        return clock() >= until_s

    shape_change_s = _shape_change_s(target, clock, is_over)
    decoding = _Target(_Timer(target, is_warm=shape_change_s > 0.0), shape)
    prompts = _Prompts(_Timer(target), shape)
    drafts = None if draft is None else _Drafts(draft, target, shape)
    parts: list[_Part] = [decoding, prompts, *([drafts] if drafts else [])]
    steps = Steps(MEASURING, len(parts) * (1 + NUM_ROUNDS))
    for part in parts:
        part.time_first()
        steps.add()
    for _ in range(NUM_ROUNDS):
        for part in parts:
            part.time_more(is_over)
            steps.add()
    if is_over():
        logger.info("limits.profile_s has passed: some costs are from fewer passes, or inferred")
    cost = CostModel(decoding.table(), shape_change_s=shape_change_s, prompt=prompts.table())
    if drafts is None:
        return cost
    return replace(cost, draft=drafts.table(), draft_prefill_s=drafts.draft_prefill_s)


def _shape_change_s(engine: Profilable, clock: Callable[[], float], is_over: IsOver) -> float:
    """`CostModel.shape_change_s`: a pass behind several of other shapes, and behind its own."""
    behind_others, again, start = [], [], clock()
    for number in range(NUM_ROUNDS):
        if number and (is_over() or clock() - start > SHAPE_CHANGE_S):
            break
        for num_tokens in OTHER_SHAPES:
            engine.time_pass(1, num_tokens, 0, 1)
        behind_others.append(engine.time_pass(1, OTHER_SHAPES[0] - 1, 0, 1))
        again.append(engine.time_pass(1, OTHER_SHAPES[0] - 1, 0, 1))
    shape_change_s = min(behind_others) - min(again)
    return shape_change_s if shape_change_s > LEAST_CHANGE * min(again) else 0.0


def _grid(grid: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*(value for value in grid if value < largest), largest)


class _Timer:
    """Times an engine's passes; `best_s` has the best time of each pass so far.

    Disturbances only make a pass longer, so the best time is the time of the pass itself.

    is_warm: whether each pass is timed behind one of the same size.

    behind: an engine whose passes run between the passes of this one. Its weights replace those of
    this engine in the CPU's caches. Therefore each measurement runs `behind` once and then averages
    two passes of this engine, and only the first of them finds the caches in this state.
    """

    def __init__(
        self, engine: Profilable, behind: Profilable | None = None, is_warm: bool = False
    ) -> None:
        self.best_s: dict[_Pass, float] = {}
        self._engine, self._behind, self._is_warm = engine, behind, is_warm
        self._seconds: dict[_Pass, list[float]] = {}

    def time(self, passes: Iterable[_Pass], is_over: IsOver = lambda: False) -> None:
        """Time each pass once more, unless that is not worth it, see ENOUGH_S and LONG_S."""
        for pass_ in passes:
            if is_over():
                return
            seconds = self._seconds.setdefault(pass_, [])
            if len(seconds) < NUM_ROUNDS and (len(seconds) < 2 or sum(seconds) <= ENOUGH_S):
                seconds.append(self._pass_s(pass_, is_first=not seconds))
                self.best_s[pass_] = min(seconds)

    def run(self, pass_: _Pass) -> None:
        """Run a pass without timing it."""
        self._engine.time_pass(*pass_)

    def is_long(self, pass_: _Pass) -> bool:
        """Whether a pass that this one includes takes longer than LONG_S."""
        return any(
            seconds > LONG_S
            and known.batch_size <= pass_.batch_size
            and known.tokens_per_row <= pass_.tokens_per_row
            for known, seconds in self.best_s.items()
        )

    def _pass_s(self, pass_: _Pass, is_first: bool) -> float:
        if is_first or self._is_warm:
            # The first pass of a size is slower; of a long one, by a small share.
            seconds = self._engine.time_pass(*pass_)
            if is_first and seconds > LONG_S:
                return seconds
        if self._behind is None:
            return self._engine.time_pass(*pass_)
        self._behind.time_pass(1, 1, 0)
        return (self._engine.time_pass(*pass_) + self._engine.time_pass(*pass_)) / 2


class _Part(Protocol):
    """The passes of one table."""

    def time_first(self) -> None:
        """Time the passes from which the others can be inferred."""

    def time_more(self, is_over: IsOver) -> None:
        """Time each pass that is worth it once more."""


class _Target:
    """The target's passes over rows x tokens."""

    def __init__(self, timer: _Timer, shape: ProfileShape) -> None:
        self._timer, self._context_len = timer, shape.context_len
        self._shorter = shape.context_len // 4
        self._rows = _grid(ROW_GRID, shape.max_sequences)
        chains = _grid(TOKEN_GRID, shape.max_draft_len + 1)
        most, longest = self._rows[-1], chains[-1]
        trees = [num for num in (*TREE_GRID, shape.max_nodes + 1) if num > longest]
        self._tokens = (*chains, *(trees if shape.max_nodes else ()))
        self._one_row = [self._pass(1, num) for num in chains]
        # Large batches show the effect of context best: they read the most keys and values.
        self._batch = self._pass(most, 1)
        self._later = self._pass(min(FEW_ROWS, most), longest)
        self._large = [*self._with_shorter(self._batch), *self._with_shorter(self._later)]
        all_passes = [
            self._pass(r, num)
            for r in self._rows
            for num in self._tokens
            if num <= longest or r * num <= MAX_STEP_NODES
        ]
        by_size = sorted(all_passes, key=lambda pass_: (pass_.tokens_per_row > 1, pass_.num_tokens))
        self._passes = list(dict.fromkeys([*self._one_row, *self._large, *by_size]))

    def _pass(self, batch_size: int, tokens_per_row: int) -> _Pass:
        return _Pass(batch_size, tokens_per_row, self._context_len)

    def _with_shorter(self, pass_: _Pass) -> tuple[_Pass, _Pass]:
        return pass_, pass_._replace(context_len=self._shorter)

    def _saved_s(self, pass_: _Pass) -> float:
        """Seconds that the pass takes less at the shorter context."""
        known, shorter = (self._timer.best_s[each] for each in self._with_shorter(pass_))
        return known - shorter

    def time_first(self) -> None:
        """Large passes come at once behind an untimed one, so that an engine takes the same memory
        for all of them: the system gives it when it is written first. With recurrent states, 32
        rows of a model of 0.75 B took 6.1 s, and then 1.7 s (AMD EPYC Zen 3)."""
        self._timer.run(self._batch)
        self._timer.time(self._large)
        self._timer.time(self._one_row)

    def time_more(self, is_over: IsOver) -> None:
        timer = self._timer
        for pass_ in self._passes:
            if pass_ in timer.best_s or not timer.is_long(pass_):
                timer.time([pass_], is_over)

    def table(self) -> PassTable:
        num_less = max(1, self._context_len - self._shorter)
        context_s = max(0.0, self._saved_s(self._batch)) / (self._batch.batch_size * num_less)
        one_token_s = self._timer.best_s[self._pass(1, 1)]
        context_s = min(context_s, MOST_OF_CONTEXT * one_token_s / max(1, self._context_len))
        num_later = self._later.num_tokens - self._later.batch_size
        saved_s = self._saved_s(self._later) - context_s * self._later.batch_size * num_less
        context_token_s = max(0.0, saved_s) / (num_less * max(1, num_later))
        seconds = self.seconds(context_s, context_token_s)
        grid = tuple(tuple(seconds[r, num] for num in self._tokens) for r in self._rows)
        return PassTable(
            rows=self._rows,
            tokens_per_row=self._tokens,
            seconds=grid,
            context_len=self._context_len,
            context_s=context_s,
            context_token_s=context_token_s,
        )

    def seconds(self, context_s: float, context_token_s: float) -> dict[tuple[int, int], float]:
        """Of each number of rows and tokens per row, timed or inferred.

        A pass without what its rows cost takes as long as any with as many tokens in total. So

            T(r, n) = T(r, m) + free(r n) - free(r m) + cost(r, n) - cost(r, m)

        where m is the largest timed number of tokens per row below n. free is the time of the timed
        passes without the cost of their rows, linear between their numbers of tokens. A row costs
        the reading of its context, and row_s.
        """
        timed = {
            (pass_.batch_size, pass_.tokens_per_row): seconds
            for pass_, seconds in self._timer.best_s.items()
            if pass_.context_len == self._context_len
        }

        def context(rows: int, num: int) -> float:
            return (context_s * rows + context_token_s * rows * (num - 1)) * self._context_len

        row_s = _row_s(timed, context, most_rows=self._rows[-1])

        def cost(rows: int, num: int) -> float:
            return context(rows, num) + rows * row_s

        sizes, free, _ = _by_size(timed, cost)
        grid = {}
        for rows in self._rows:
            start = 0, 0.0
            for num in self._tokens:
                if (rows, num) in timed:
                    grid[rows, num] = timed[rows, num]
                    start = num, grid[rows, num]
                    continue
                seconds = interpolate(rows * num, sizes, free) + cost(rows, num)
                if start[0]:
                    seconds += start[1] - cost(rows, start[0])
                    seconds -= interpolate(rows * start[0], sizes, free)
                grid[rows, num] = max(seconds, start[1], 0.0)
        return grid


Timed = Mapping[tuple[int, int], float]
"""Seconds of passes by rows and tokens per row."""


def _by_size(
    timed: Timed, cost: Callable[[int, int], float]
) -> tuple[list[int], list[float], list[float]]:
    """The numbers of tokens of these passes; and for each, means of the seconds without the cost of
    the rows, and of the number of rows."""
    found: dict[int, list[tuple[float, int]]] = {}
    for (rows, num), seconds in timed.items():
        found.setdefault(rows * num, []).append((seconds - cost(rows, num), rows))
    sizes = sorted(found)
    means = [
        [sum(column) / len(column) for column in zip(*found[size], strict=True)] for size in sizes
    ]
    return sizes, [free for free, _ in means], [rows for _, rows in means]


def _row_s(timed: Timed, context: Callable[[int, int], float], most_rows: int) -> float:
    """What each row costs beside its context, as with a recurrent state: the difference between the
    largest batch and passes of as many tokens with fewer rows. 0 if it is small, see ROWS_SHARE."""
    batch_s = timed[most_rows, 1] - context(most_rows, 1)
    others = {key: seconds for key, seconds in timed.items() if key != (most_rows, 1)}
    if not others:
        return 0.0
    sizes, free, rows = _by_size(others, context)
    num_more = most_rows - interpolate(most_rows, sizes, rows)
    more_s = batch_s - interpolate(most_rows, sizes, free)
    return more_s / num_more if num_more > 0 and more_s > ROWS_SHARE * batch_s else 0.0


class _Prompts:
    """Passes that read prompts: one row, logits for the last position only. The last number of
    tokens in the table is the prompt chunk."""

    def __init__(self, timer: _Timer, shape: ProfileShape) -> None:
        self._timer, self._shape = timer, shape
        self._chunk = min(shape.prefill_chunk or LEAST_CHUNK, shape.max_prompt)

    def time_first(self) -> None:
        self._timer.time(map(_prompt, _grid((1, 16), self._chunk)))

    def time_more(self, is_over: IsOver) -> None:
        self._timer.time(map(_prompt, _grid(PROMPT_GRID, self._chunk)), is_over)
        most = min(self._shape.max_prompt, PROMPT_GRID[-1])
        best_s = self._timer.best_s
        while self._shape.prefill_chunk is None and 2 * self._chunk <= most:
            once, twice = _prompt(self._chunk), _prompt(2 * self._chunk)
            if is_over() or best_s[once] > LONG_S:
                break
            self._timer.time([twice])
            if best_s[twice] > WORTH_DOUBLING * 2 * best_s[once]:
                break
            self._chunk *= 2

    def table(self) -> PassTable:
        timed = {pass_.tokens_per_row: seconds for pass_, seconds in self._timer.best_s.items()}
        tokens = [num for num in sorted(timed) if num <= self._chunk]
        return PassTable((1,), tuple(tokens), (tuple(timed[num] for num in tokens),))


class _Drafts:
    """Passes of the draft model: of one token per row, and of tokens that its cache lacks."""

    def __init__(self, draft: Profilable, target: Profilable, shape: ProfileShape) -> None:
        self._timer, self._reading = _Timer(draft, behind=target), _Timer(draft)
        self._rows = _grid(ROW_GRID, shape.max_sequences)
        self._context_len = shape.context_len

    def _pass(self, rows: int) -> _Pass:
        return _Pass(rows, 1, self._context_len)

    def time_first(self) -> None:
        self._reading.time(map(_prompt, DRAFT_PREFILL_TOKENS))
        self._timer.time(map(self._pass, dict.fromkeys((1, self._rows[-1]))))

    def time_more(self, is_over: IsOver) -> None:
        self._timer.time(map(self._pass, self._rows), is_over)
        self._reading.time(map(_prompt, DRAFT_PREFILL_TOKENS), is_over)

    @property
    def draft_prefill_s(self) -> float:
        """Of one token in a pass that reads the tokens missing from the draft cache."""
        few_s, many_s = (self._reading.best_s[_prompt(num)] for num in DRAFT_PREFILL_TOKENS)
        return max(0.0, many_s - few_s) / (DRAFT_PREFILL_TOKENS[1] - DRAFT_PREFILL_TOKENS[0])

    def table(self) -> PassTable:
        timed = {pass_.batch_size: seconds for pass_, seconds in self._timer.best_s.items()}
        known = sorted(timed)
        seconds = [timed[num] for num in known]
        each = [(interpolate(num, known, seconds),) for num in self._rows]
        return PassTable(self._rows, (1,), tuple(each), self._context_len)


def _prompt(num_tokens: int) -> _Pass:
    return _Pass(1, num_tokens, 0, num_logits=1)
