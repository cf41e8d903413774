"""Clients that each have one request in the server at all times, on a virtual clock.

The number of rows is constant, and every client sends the same texts in the same order under every
policy. So policies are compared token by token: by the time in which all clients together got
tokens n to m of the same streams. Adaptive policies run in the server's own `StepLoop`. A fixed
draft length needs no loop: its steps follow from the texts, and `fixed_times` adds up their cost.
`ClosedLoop` under `fixed:K` must give the same result, which the studies check. This module also
has the machines of the studies.

Prompts count as cached, in target and draft, like the turns of a conversation. So a step is a
decoding step at a given context; other studies measure the cost of prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceId, SequenceView
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.messages import Update
from smartspec_py.serving.profile import load_cost
from smartspec_py.serving.request import Request
from smartspec_py.serving.step import Decision, StepRecord
from smartspec_sim.acceptance import DraftRuns, draw_runs
from smartspec_sim.engine import PLACEHOLDER, SimProposer, SimTarget, sim_capabilities
from smartspec_sim.hardware import Hardware, gpu_hardware
from smartspec_sim.simulate import SAMPLING
from smartspec_sim.workload import only
from smartspec_testing.clock import VirtualClock
from smartspec_testing.offline import OfflineLoop

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_DRAFT_LEN = 7
PREFILL_CHUNK = 512
OUTPUT_LEN = 256
"""Tokens of a request. A client's first request has a random length, so that they do not end
together."""

NUM_BATCHES = 20
"""Parts of a window from whose spread the standard error of a ratio is taken."""


RESULTS = Path(__file__).parents[2] / "docs" / "results"
FITTED, FITTED_70B, ROOFLINE = "8B, H100", "70B, 4 H100", "8B, H200"
GPUS = {
    FITTED: ("h100", 1, "llama-3-8b", "eagle"),
    FITTED_70B: ("h100", 4, "llama-3.1-70b", "llama-3.2-1b"),
    ROOFLINE: ("h200", 1, "llama-3-8b", "llama-3.2-1b"),
}
"""GPU, how many, target, draft; see `smartspec_sim.hardware`. The fits hold for up to 32 rows."""

CPU_88M, CPU_TINY = "88 M pair, CPU", "tiny pair, CPU"
PROFILES = {CPU_88M: "traces/profile-88m.json", CPU_TINY: "profile-tiny.json"}
"""Measured by the server at its start, up to 32 and up to 8 rows, at a context of 256."""


def hardware_of(machine: str, max_rows: int) -> Hardware:
    """The costs of a GPU, limited by its memory, or of a measured profile. Costs of prompts are
    left out, because only the last token of a prompt is read here."""
    if machine in PROFILES:
        return Hardware(replace(load_cost(RESULTS / PROFILES[machine]), prompt=None))
    return gpu_hardware(*GPUS[machine], max_rows)


@dataclass(frozen=True)
class Text:
    """One request's text. accept: probability that a draft is right. runs: right drafts in a row
    from each position on."""

    prompt_len: int
    accept: float
    runs: tuple[int, ...]
    prefix: str | None = None
    prefix_len: int = 0

    @property
    def output_len(self) -> int:
        return len(self.runs)

    @cached_property
    def acceptances(self) -> Sequence[DraftRuns | None]:
        return cast("Sequence[DraftRuns | None]", only(DRAFT_MODEL, DraftRuns(self.runs)))


@dataclass(frozen=True)
class Traffic:
    """What clients send. accepts: acceptance of a text, one of them drawn for each; accept_sd: how
    it differs beyond that (a beta distribution). context_len: mean over a request."""

    accepts: tuple[float, ...]
    context_len: int
    accept_sd: float = 0.0
    persistence: float = 0.0
    output_len: int = OUTPUT_LEN
    seed: int = 1

    def client(self, number: int, num_tokens: int) -> list[Text]:
        """Texts of at least so many tokens."""
        rng = np.random.default_rng([self.seed, number])
        prompt_len = max(1, self.context_len - self.output_len // 2)
        texts: list[Text] = []
        length = int(rng.integers(2, self.output_len + 1))
        while num_tokens > 0:
            accept = self._accept_prob(rng)
            drawn = draw_runs(rng, length, accept, self.persistence)
            runs = tuple(drawn.accepted(position, length) for position in range(length))
            texts.append(Text(prompt_len, accept, runs))
            num_tokens -= length
            length = self.output_len
        return texts

    def clients(self, batch_size: int, num_tokens: int) -> list[list[Text]]:
        """For each row; together they have enough for a run of num_tokens tokens of all rows."""
        each = math.ceil(1.5 * num_tokens / batch_size) + 4 * self.output_len
        return [self.client(number, each) for number in range(batch_size)]

    def _accept_prob(self, rng: np.random.Generator) -> float:
        accept = float(rng.choice(self.accepts))
        if not self.accept_sd:
            return accept
        total = accept * (1 - accept) / self.accept_sd**2 - 1
        return float(rng.beta(accept * total, (1 - accept) * total))


@dataclass(frozen=True)
class Times:
    """tokens: that all clients together have after each step; seconds: when. Both [steps]."""

    tokens: Floats
    seconds: Floats

    def at(self, num_tokens: Floats) -> Floats:
        return np.interp(num_tokens, self.tokens, self.seconds)


@dataclass(frozen=True)
class Ratio:
    """Throughput over that of a baseline in the same window, and the standard error of it."""

    value: float
    error: float


def throughput(times: Times, begin: int, end: int) -> float:
    """Tokens a second from the begin-th token of all to the end-th."""
    first, last = times.at(np.array([begin, end], dtype=np.float64))
    return (end - begin) / float(last - first)


def ratio(times: Times, baseline: Times, begin: int, end: int) -> Ratio:
    """Of throughputs. The error is of the mean over parts of the window, pair by pair."""
    edges = np.linspace(begin, end, NUM_BATCHES + 1)
    took, base = np.diff(times.at(edges)), np.diff(baseline.at(edges))
    value = float(base.sum() / took.sum())
    beside = (base - value * took) / took.mean()
    return Ratio(value, float(beside.std(ddof=1)) / math.sqrt(NUM_BATCHES))


class _CachedTarget(SimTarget):
    """Finds every prompt in its cache; the last token is read all the same."""

    def begin(self, sequence: SequenceId, tokens: Sequence[int], *rest: object) -> int:
        super().begin(sequence, tokens, *rest)  # type: ignore[arg-type]
        return len(tokens) - 1


class _CachedProposer(SimProposer):
    """Likewise."""

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        self._num_computed_tokens.setdefault(sequence, self._texts[sequence].prompt_len)
        return super().draft_lag(sequence, context_len)


class ClosedLoop:
    """A policy and its clients. `run` once."""

    def __init__(
        self,
        clients: Sequence[Sequence[Text]],
        policy: str,
        cost: CostModel,
        *,
        believed: CostModel | None = None,
    ) -> None:
        """believed: what the planner takes steps to cost; None is the truth."""
        self._policy = policy
        self._clients = [iter(texts) for texts in clients]
        self.texts: dict[SequenceId, Text] = {}
        self._owner: dict[SequenceId, int] = {}
        self._numbers = count(1)
        self._clock = VirtualClock()
        self._num_tokens = 0
        self.draft_lens: Counter[int] = Counter()
        """Of all sequences in all steps."""
        self._tokens: list[int] = [0]
        self._seconds: list[float] = [0.0]
        longest = max(text.prompt_len + text.output_len for texts in clients for text in texts)
        capabilities = sim_capabilities(len(clients), longest, MAX_DRAFT_LEN, PREFILL_CHUNK)
        target = _CachedTarget(capabilities, cost, self._clock, self.texts)
        proposer = _CachedProposer(DRAFT_MODEL, self.texts, MAX_DRAFT_LEN, cost, self._clock)
        self._offline = OfflineLoop(
            target,
            {DRAFT_MODEL: proposer},
            believed or cost,
            self._clock.now,
            max_queue=len(clients),
            prefill_chunk=PREFILL_CHUNK,
            on_update=self._take,
            on_step=self._count,
        )
        self.loop = self._offline.loop

    def run(self, num_tokens: int) -> Times:
        """Until all clients together have so many tokens."""
        for client in range(len(self._clients)):
            self._send(client)
        while self._num_tokens < num_tokens:
            self.loop.step()
        return Times(np.array(self._tokens, float), np.array(self._seconds))

    def _send(self, client: int) -> None:
        text, sequence = next(self._clients[client]), next(self._numbers)
        request = Request(
            sequence=sequence,
            tokens=[PLACEHOLDER] * text.prompt_len,
            num_prompt=text.prompt_len,
            max_tokens=text.output_len,
            sampling=SAMPLING,
            policy=self._policy,
            max_draft_len=MAX_DRAFT_LEN,
            proposer=DRAFT_MODEL,
            arrival_s=self._clock.now(),
        )
        self.texts[sequence], self._owner[sequence] = text, client
        self._offline.put(request)

    def _count(self, step: StepRecord) -> None:
        self._num_tokens += step.num_generated
        self._tokens.append(self._num_tokens)
        self._seconds.append(self._clock.now())
        self.draft_lens.update(num_drafted for num_drafted, _ in step.verifications)
        self.draft_lens[0] += step.num_undrafted

    def _take(self, update: Update) -> None:
        if update.is_last:
            sequence = update.sequence
            del self.texts[sequence]
            self._send(self._owner.pop(sequence))


class StudiedController(Controller):
    """The server's controller with parts removed, to see their cost. accept_of: the known
    acceptance of a sequence; None estimates it. is_alone: the planner without guard and probes."""

    def __init__(
        self,
        cost: CostModel,
        batch_size: int,
        accept_of: Callable[[SequenceId], float] | None = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__(cost, MAX_DRAFT_LEN, batch_size)
        self._accept_of = accept_of
        self._is_alone = is_alone

    def plan(
        self, views: Sequence[SequenceView], num_prefilling: int = 0, num_background: int = 0
    ) -> Decision:
        if (accept_of := self._accept_of) is not None:
            views = [_told(view, accept_of(view.sequence)) for view in views]
        if self._is_alone:
            return self._decide(views, self.settings)
        return super().plan(views, num_prefilling, num_background)


def _told(view: SequenceView, accept_prob: float) -> SequenceView:
    (option,) = view.options
    probs = (accept_prob,) * option.max_draft_len
    return replace(view, options=(option._replace(accept_probs=probs),))


def fixed_times(
    clients: Sequence[Sequence[Text]], draft_len: int, cost: CostModel, num_tokens: int
) -> Times:
    """What `ClosedLoop` takes under `fixed:K`, or under `none` for 0, by arithmetic."""
    streams, rows = _Streams.of(clients), np.arange(len(clients))
    at, total, steps = np.zeros_like(rows), 0, _Steps()
    while total < num_tokens:
        drafts = np.minimum(draft_len, streams.most[rows, at])
        kept = np.minimum(streams.runs[rows, at], drafts)
        steps.add(drafts, float(streams.contexts[rows, at].sum()))
        at = at + kept + 1
        total += int(kept.sum()) + len(rows)
        steps.totals.append(total)
    return Times(np.array([0, *steps.totals], float), steps.ends_s(cost, len(clients)))


@dataclass(frozen=True)
class _Steps:
    """Work of each step: rows of each draft pass, cached tokens of all rows; and tokens generated
    up to its end. Draft caches lack at most one token, which costs nothing."""

    draft_rows: list[Ints] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def add(self, drafts: Ints, context: float) -> None:
        at_least = np.bincount(drafts, minlength=MAX_DRAFT_LEN + 1)[:0:-1].cumsum()[::-1]
        self.draft_rows.append(at_least)
        self.contexts.append(context)

    def ends_s(self, cost: CostModel, batch_size: int) -> Floats:
        draft_rows, table = np.array(self.draft_rows), cost.target
        drafting_s = cost.draft_pass_s[draft_rows].sum(axis=1)
        tokens = batch_size + draft_rows.sum(axis=1)
        beyond = np.array(self.contexts) - batch_size * table.context_len
        target_s = cost.targets_s(batch_size, tokens, table.context_len) + table.context_s * beyond
        return np.cumsum(
            np.concatenate([[0.0], drafting_s + target_s + cost.step_host_s(batch_size)])
        )


@dataclass(frozen=True)
class _Streams:
    """A client's texts behind one another; all [clients, tokens].

    runs: right drafts from here on. most: drafts that make sense, 0 where the prompt's last token
    is read. contexts: tokens that the pass finds in the cache.
    """

    runs: Ints
    most: Ints
    contexts: Ints

    @classmethod
    def of(cls, clients: Sequence[Sequence[Text]]) -> _Streams:
        length = min(sum(text.output_len for text in texts) for texts in clients)

        def stacked(part: Callable[[Text], Ints]) -> Ints:
            return np.stack([np.concatenate([part(t) for t in ts])[:length] for ts in clients])

        return cls(stacked(lambda text: np.array(text.runs)), stacked(_most), stacked(_contexts))


def _most(text: Text) -> Ints:
    most = np.arange(text.output_len - 1, -1, -1)
    most[0] = 0
    return most


def _contexts(text: Text) -> Ints:
    contexts = text.prompt_len + np.arange(text.output_len)
    contexts[0] -= 1
    return contexts
