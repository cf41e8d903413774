"""Recorded steps of a real server, compared part by part with what the simulator charges for them.

Each step's work, with its own rows, tokens, drafts and context, is given to the simulator's engines
with the server's profile. So a difference comes from the cost model or the profile, not from
arrivals or acceptance. Steps without decoding are not in a server's trace. The time of a prompt
that is read alone follows from the times of requests.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView
from smartspec_py.engines.base import (
    SHORT_LAG,
    Decode,
    DraftTask,
    Prefill,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.step import StepRecord
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.engine import PLACEHOLDER, SimProposer, SimTarget
from smartspec_sim.simulate import SAMPLING
from smartspec_sim.workload import SimRequest
from smartspec_testing.clock import VirtualClock

PARTS = ("target_s", "draft_s", "host_s", "between_s")
"""between_s: from the end of a step to the start of the next, where requests go on decoding."""


@dataclass(frozen=True)
class StepPair:
    """Seconds of `PARTS`, measured and as charged. num_prefill: prompt tokens in the pass.

    rows: of the pass. tokens: in it, prompt tokens included. context: mean tokens a decoding row.
    """

    kind: str
    rows: int
    tokens: int
    context: float
    num_prefill: int
    measured: Mapping[str, float]
    charged: Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """Of a group of steps: their number, share of all measured time, and mean seconds.

    median: of charged over measured, step by step.
    """

    name: str
    num_steps: int
    share: float
    measured: Mapping[str, float]
    charged: Mapping[str, float]
    median: float

    @property
    def ratio(self) -> float:
        """Charged over measured, of whole steps."""
        return sum(self.charged.values()) / sum(self.measured.values())


def pairs_of(steps: Sequence[StepRecord], profile: CostModel) -> list[StepPair]:
    """All but the last step, behind which nothing is known."""
    return [_pair(step, _between_s(step, after), profile) for step, after in pairwise(steps)]


def lines_of(groups: Iterable[tuple[str, Sequence[StepPair]]]) -> list[Line]:
    """One line per group, in order; empty ones are left out."""
    listed = [(name, steps) for name, steps in groups if steps]
    all_s = sum(sum(step.measured.values()) for _, steps in listed for step in steps)
    return [
        Line(
            name,
            len(steps),
            sum(sum(step.measured.values()) for step in steps) / all_s,
            _means([step.measured for step in steps]),
            _means([step.charged for step in steps]),
            statistics.median(
                sum(step.charged.values()) / sum(step.measured.values()) for step in steps
            ),
        )
        for name, steps in listed
    ]


def by_kind(steps: Sequence[StepPair]) -> list[tuple[str, list[StepPair]]]:
    found: dict[str, list[StepPair]] = defaultdict(list)
    for step in steps:
        found[step.kind].append(step)
    return sorted(found.items())


def by_rows(steps: Sequence[StepPair]) -> list[tuple[str, list[StepPair]]]:
    """Steps without prompts, by their rows and whether they drafted."""
    edges = (1, 2, 4, 8, 16, 1024)
    groups = []
    for drafts in (False, True):
        for low, high in pairwise((0, *edges)):
            members = [
                step
                for step in steps
                if not step.num_prefill
                and low < step.rows <= high
                and drafts == (step.tokens > step.rows)
            ]
            rows = str(high) if high == low + 1 else f"{low + 1} to {high}"
            groups.append((f"{rows} rows, {'drafts' if drafts else 'none'}", members))
    return groups


def by_prompt(steps: Sequence[StepPair]) -> list[tuple[str, list[StepPair]]]:
    """Steps that read prompts, by how many of their tokens."""
    edges = (0, 32, 64, 96, 128, 1 << 20)
    return [
        (
            f"{low + 1} to {high} prompt tokens",
            [step for step in steps if low < step.num_prefill <= high],
        )
        for low, high in pairwise(edges)
    ]


def context_slopes(steps: Sequence[StepPair]) -> list[tuple[int, int, float, float]]:
    """For decoding steps without drafts and prompts: rows, steps, and microseconds that each token
    of context of a row adds to the target pass, measured (least squares) and charged. Only for
    numbers of rows with enough steps."""
    found = []
    groups: dict[int, list[StepPair]] = defaultdict(list)
    for step in steps:
        if not step.num_prefill and step.tokens == step.rows:
            groups[step.rows].append(step)
    for rows, members in sorted(groups.items()):
        context = np.array([step.context for step in members])
        if len(members) < 30 or context.std() < 5:
            continue
        slopes = [
            1e6 * float(np.polyfit(context, [side["target_s"] for side in sides], 1)[0]) / rows
            for sides in ([s.measured for s in members], [s.charged for s in members])
        ]
        found.append((rows, len(members), *slopes))
    return found  # type: ignore[return-value]


def prompts_alone(
    records: Iterable[Mapping[str, Any]],
    steps: Sequence[StepRecord],
    profile: CostModel,
    prefill_chunk: int,
) -> list[tuple[int, float, float]]:
    """Prompts that were read while nothing else ran: tokens, seconds from scheduling to the first
    token, and the charged seconds. Only prompts of one chunk."""
    spans = sorted(
        (s["first_scheduled"], s["first_token"], line["num_input_tokens"])
        for line in records
        if (s := line.get("server_s")) and line["num_input_tokens"] <= prefill_chunk
    )
    busy = [(step.start_s, step.start_s + step.total_s) for step in steps]
    found = []
    for start, end, num_tokens in spans:
        others = sum(a < end and start < b for a, b, _ in spans) - 1
        if others or any(a < end and start < b for a, b in busy):
            continue
        found.append((num_tokens, end - start, _alone_s(num_tokens, profile)))
    return found


def _alone_s(num_tokens: int, profile: CostModel) -> float:
    clock = VirtualClock()
    target = SimTarget(_capabilities(1), profile, clock, {})
    tokens = (PLACEHOLDER,) * num_tokens
    target.begin(1, tokens, num_tokens, SAMPLING)
    target.submit([Prefill(1, tokens, 0, True)])
    target.poll(0.0)
    return clock.now()


def _pair(step: StepRecord, between_s: float | None, profile: CostModel) -> StepPair:
    drafted = _drafted(step)
    draft_s = step.draft_s if drafted else 0.0
    lags = [_option(step, sequence).draft_lag for sequence in _by_model(step, drafted)]
    measured = {
        "target_s": step.target_s,
        "draft_s": draft_s,
        "host_s": step.total_s - step.target_s - draft_s,
        "between_s": between_s or 0.0,
    }
    context = sum(view.context_len for view in step.decision.views)
    return StepPair(
        kind=_kind(bool(drafted), step.num_prefill_tokens > 0, any(n > SHORT_LAG for n in lags)),
        rows=len(step.events),
        tokens=len(step.decision.views) + sum(drafted.values()) + step.num_prefill_tokens,
        context=context / len(step.decision.views),
        num_prefill=step.num_prefill_tokens,
        measured=measured,
        charged=charged(step, profile),
    )


def charged(step: StepRecord, profile: CostModel) -> dict[str, float]:
    """What the simulator's own engines take for the step's work, by `PARTS`."""
    clock = VirtualClock()
    sequences = [event.sequence for event in step.events]
    texts = {s: SimRequest(s, 0.0, 1, 1, (DraftRuns([]), DraftRuns([]))) for s in sequences}
    drafted = _drafted(step)
    by_model = _by_model(step, drafted)
    proposer = SimProposer(DRAFT_MODEL, texts, 64, profile, clock)
    tasks = []
    for sequence, draft_len in by_model.items():
        option, known = _option(step, sequence), _view(step, sequence).context_len
        if known - 1 > option.draft_lag:  # it has read all but the lag
            proposer.propose([_task(sequence, known - 1 - option.draft_lag, 1)])
        tasks.append(_task(sequence, known, draft_len))
    start_s = clock.now()
    if tasks:
        proposer.propose(tasks)
    draft_s = clock.now() - start_s
    target = SimTarget(_capabilities(len(sequences)), profile, clock, texts)
    work = list(_work(step, drafted))
    for view in step.decision.views:
        target.begin(view.sequence, [PLACEHOLDER] * view.context_len, 1, SAMPLING)
    for item in work:
        if isinstance(item, Prefill):
            target.begin(item.sequence, item.tokens, len(item.tokens), SAMPLING)
    start_s = clock.now()
    target.submit(work)
    target.poll(0.0)
    host_s = max(0.0, clock.now() - start_s - target.busy_s)
    return {"target_s": target.busy_s, "draft_s": draft_s, "host_s": host_s, "between_s": 0.0}


def _work(step: StepRecord, drafted: Mapping[SequenceId, int]) -> Iterator[Work]:
    """As it was submitted. Prompt tokens are shared out evenly, since a trace has their sum, and
    a chunk is taken to begin its prompt."""
    decoding = {view.sequence for view in step.decision.views}
    reading = [e.sequence for e in step.events if e.sequence not in decoding]
    for index, sequence in enumerate(reading):
        share = (step.num_prefill_tokens + index) // len(reading)
        yield Prefill(sequence, (PLACEHOLDER,) * share, 0, True)
    for sequence in decoding:
        num = drafted.get(sequence, 0)
        yield Verify(sequence, (PLACEHOLDER,) * num) if num else Decode(sequence, 1)


def _task(sequence: SequenceId, num_known: int, draft_len: int) -> DraftTask:
    return DraftTask(sequence, [PLACEHOLDER] * num_known, 1, draft_len, SAMPLING)


def _capabilities(batch_size: int) -> TargetCapabilities:
    return TargetCapabilities(
        max_sequences=batch_size,
        max_context_len=1 << 20,
        max_draft_len=64,
        max_decode_tokens=1,
        max_prefill_tokens=1 << 20,
        verifies_sampling=True,
        vocab_size=PLACEHOLDER + 1,
    )


def _drafted(step: StepRecord) -> dict[SequenceId, int]:
    return {e.sequence: e.num_drafted for e in step.events if e.num_drafted}


def _by_model(step: StepRecord, drafted: Mapping[SequenceId, int]) -> dict[SequenceId, int]:
    """Drafts of those for whom a draft model ran."""
    return {s: n for s, n in drafted.items() if _option(step, s).has_draft_passes}


def _view(step: StepRecord, sequence: SequenceId) -> SequenceView:
    return next(view for view in step.decision.views if view.sequence == sequence)


def _kind(drafts: bool, has_prompt: bool, catches_up: bool) -> str:
    name = "drafts" if drafts else "no drafts"
    name += ", catch-up" if catches_up else ""
    return name + (", prompt chunk" if has_prompt else "")


def _option(step: StepRecord, sequence: SequenceId) -> DraftOption:
    """How it drafted."""
    return step.decision.plan.option(_view(step, sequence))


def _between_s(step: StepRecord, after: StepRecord) -> float | None:
    """None where no request decoded in both: there may have been other steps, or nothing to do."""
    if not {v.sequence for v in step.decision.views} & {v.sequence for v in after.decision.views}:
        return None
    return after.start_s - step.start_s - step.total_s


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([part[name] for part in parts])) for name in PARTS}
