"""The grid search of Su et al. (arXiv 2310.18813): runs every draft length at every batch size.

The server's own loop decodes each batch. All sequences start in the same step, because a short run
before left their prompts in the cache. Only steps count in which every sequence drafted exactly k
tokens and no prompt was read, by the target or by the draft. So prompt processing, which is paid
once per request, is not included, and the batch size is constant. Every k gets the same prompts, in
an order that rotates from round to round, because the speed of a shared machine changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from smartspec_bench.prompts import Prompt
from smartspec_py.engines.base import SHORT_LAG
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.request import GenerateParams, RequestError
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import StepRecord
from smartspec_sim.goodput import accept_trials
from smartspec_testing.local import generate

WARM_TOKENS = 3


class GridSearchError(Exception):
    """The search cannot continue; the message says why."""


@dataclass(frozen=True)
class SearchPlan:
    """Settings of the search. sizes: batch sizes. num_prompts: least number for each size; small
    batches run several times. max_seconds: no round starts that would end later, except the first.
    """

    sizes: Sequence[int]
    max_draft_len: int
    num_prompts: int
    max_tokens: int
    temperature: float
    num_rounds: int
    max_seconds: float

    @property
    def num_runs(self) -> int:
        """Of a round."""
        return (self.max_draft_len + 1) * sum(self.num_groups(size) for size in self.sizes)

    def num_groups(self, size: int) -> int:
        """Number of batches of this size that the prompts fill."""
        return -(-self.num_prompts // size)


@dataclass(frozen=True)
class Tally:
    """Steps of one batch size and draft length. num_sequences, num_context: sequences and their
    context tokens, counted in every step. num_trials, num_accepted: verified drafts, and accepted
    drafts."""

    num_steps: int = 0
    num_sequences: int = 0
    num_generated: int = 0
    num_trials: int = 0
    num_accepted: int = 0
    num_context: int = 0
    total_s: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.num_steps + other.num_steps,
            self.num_sequences + other.num_sequences,
            self.num_generated + other.num_generated,
            self.num_trials + other.num_trials,
            self.num_accepted + other.num_accepted,
            self.num_context + other.num_context,
            self.total_s + other.total_s,
        )

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated / self.total_s

    @property
    def step_s(self) -> float:
        return self.total_s / self.num_steps


@dataclass(frozen=True)
class Found:
    """Results of the search: rounds[size, draft_len], one tally per round."""

    rounds: Mapping[tuple[int, int], Sequence[Tally]]
    sizes: Sequence[int]
    max_draft_len: int

    def tokens_per_s(self, size: int) -> list[float]:
        """Tokens per second by draft length from 0; medians over the rounds."""
        return [statistics.median(t.tokens_per_s for t in cell) for cell in self._cells(size)]

    def step_s(self, size: int) -> list[float]:
        """Seconds per step by draft length from 0; medians over the rounds."""
        return [statistics.median(t.step_s for t in cell) for cell in self._cells(size)]

    def best_draft_len(self, size: int) -> int:
        """The draft length with the most tokens/s; the shortest if several are equal."""
        speeds = self.tokens_per_s(size)
        return speeds.index(max(speeds))

    @property
    def spread(self) -> float:
        """Spread of the rounds of a cell relative to their median, for the middle cell. Smaller
        differences are not significant. 0 if there is one round."""
        cells = ([tally.tokens_per_s for tally in cell] for cell in self.rounds.values())
        return statistics.median((max(c) - min(c)) / statistics.median(c) for c in cells)

    @property
    def num_rounds(self) -> int:
        return len(next(iter(self.rounds.values())))

    @property
    def accept_prob(self) -> float:
        """Acceptance probability of a draft if those before it were accepted; over all drafts."""
        total = self._sum(range(1, self.max_draft_len + 1))
        return total.num_accepted / max(1, total.num_trials)

    @property
    def context_len(self) -> int:
        """Mean tokens of context."""
        total = self._sum(range(self.max_draft_len + 1))
        return round(total.num_context / total.num_sequences)

    def mean_accepted(self) -> list[float]:
        """Accepted drafts per step and sequence, by draft length from 1; over all batch sizes."""
        totals = [self._sum([k]) for k in range(1, self.max_draft_len + 1)]
        return [total.num_accepted / total.num_sequences for total in totals]

    def _cells(self, size: int) -> Iterator[Sequence[Tally]]:
        return (self.rounds[size, k] for k in range(self.max_draft_len + 1))

    def _sum(self, draft_lens: Iterable[int]) -> Tally:
        some = [t for k in draft_lens for size in self.sizes for t in self.rounds[size, k]]
        return sum(some, Tally())


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    powers = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return [*powers, most]


def search(
    server: Server,
    plan: SearchPlan,
    prompts: Callable[[], Iterator[Prompt]],
    advance: Callable[[str], None],
) -> Found:
    """Run the grid. prompts: returns the same prompts at each call, as many as requested. advance:
    called before each run. Raises GridSearchError if a prompt cannot be served or no step counts.
    """
    keys = [(size, k) for size in plan.sizes for k in range(plan.max_draft_len + 1)]
    rounds: dict[tuple[int, int], list[Tally]] = {key: [] for key in keys}
    start = time.monotonic()
    for number in range(plan.num_rounds):
        began = time.monotonic()
        for key, tally in _round(server, plan, prompts, number, advance).items():
            rounds[key].append(tally)
        now = time.monotonic()
        if now - start + (now - began) > plan.max_seconds:
            break
    return Found(rounds, plan.sizes, plan.max_draft_len)


def _round(
    server: Server,
    plan: SearchPlan,
    prompts: Callable[[], Iterator[Prompt]],
    number: int,
    advance: Callable[[str], None],
) -> dict[tuple[int, int], Tally]:
    draft_lens = range(plan.max_draft_len + 1)
    found = {(size, k): Tally() for size in plan.sizes for k in draft_lens}
    for size in plan.sizes:
        texts = prompts()
        for group in range(plan.num_groups(size)):
            batch = list(islice(texts, size))
            _run(server, _requests(batch, plan, 1, WARM_TOKENS))
            shift = (number + group) % len(draft_lens)
            for k in (*draft_lens[shift:], *draft_lens[:shift]):
                advance(f"round {number + 1}: batch of {size}, k = {k}")
                records = _run(server, _requests(batch, plan, k, plan.max_tokens))
                found[size, k] += tally_of(records, size, k)
    for (size, k), tally in found.items():
        if tally.num_steps == 0:
            raise GridSearchError(
                f"no step of a batch of {size} drafted {k} tokens for each: allow more --max-tokens"
            )
    return found


def _requests(
    batch: Sequence[Prompt], plan: SearchPlan, draft_len: int, max_tokens: int
) -> list[GenerateParams]:
    """All sequences continue to max_tokens, so that the batch size is constant."""
    return [
        GenerateParams(
            text=prompt.text,
            max_tokens=max_tokens,
            temperature=plan.temperature,
            seed=index + 1,
            policy=f"fixed:{draft_len}" if draft_len else "none",
            proposer=DRAFT_MODEL,
            end_id=-1,
        )
        for index, prompt in enumerate(batch)
    ]


def _run(server: Server, requests: Sequence[GenerateParams]) -> tuple[StepRecord, ...]:
    server.loop.records.clear()
    try:
        sinks = generate(server, requests)
    except RequestError as error:
        raise GridSearchError(f"a prompt cannot be served: {error}") from error
    for sink in sinks:
        if sink.error is not None:
            raise GridSearchError(f"a text could not be generated: {sink.error[1]}")
    return tuple(server.loop.records)


def tally_of(records: Iterable[StepRecord], size: int, draft_len: int) -> Tally:
    """Steps that count: `size` sequences, no prompt, `draft_len` drafts for each."""
    return sum((_tally(r) for r in records if _counts(r, size, draft_len)), Tally())


def _counts(record: StepRecord, size: int, draft_len: int) -> bool:
    is_full = record.batch_size == size and record.num_drafted == size * draft_len
    lags = (view.options[0].draft_lag for view in record.decision.views)
    catches_up = draft_len > 0 and any(lag > SHORT_LAG for lag in lags)
    is_reading = record.num_prefill_tokens > 0 or catches_up
    return is_full and not is_reading


def _tally(record: StepRecord) -> Tally:
    return Tally(
        num_steps=1,
        num_sequences=record.batch_size,
        num_generated=record.num_generated,
        num_trials=sum(accept_trials(e.num_drafted, e.num_accepted) for e in record.events),
        num_accepted=sum(event.num_accepted for event in record.events),
        num_context=sum(view.context_len for view in record.decision.views),
        total_s=record.total_s,
    )
