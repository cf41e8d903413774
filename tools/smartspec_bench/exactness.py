"""Does speculation change the text? Compares every way to speculate with none, token by token.

The reference is each request alone, under `none`, with its prompt read in one pass. Then the same
requests run under every arm (a policy and a proposer): alone, and in mixed batches. There,
neighbours have other arms and settings, arrive later, are cancelled, reuse cached prefixes, and are
preempted if the cache is small. A request that differs counts once, at its first difference; later
differences follow from it.

A run without drafts compares nothing. Policies that choose by cost would draft little where drafts
do not pay. Therefore they plan here with costs at which drafts always pay (`force_drafting`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from smartspec_py.config import ServerConfig
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SequenceView
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import Decision, StepRecord
from smartspec_testing.local import LocalSink, generate

WAIT_S = 600.0

CHEAP_DRAFTS = CostModel(
    target=PassTable((1,), (1, 2), ((1.0, 1.03),)), draft=PassTable((1,), (1,), ((0.03,),))
)
"""A draft costs 3 % of a target pass, and so does its verification. So even a draft model with a
low acceptance rate is used, and draft lengths still depend on acceptance."""


class CheckError(RuntimeError):
    """A request of the check failed; the message says why."""


class ForcedDrafting(Controller):
    """Always uses the planner's choice, with constant costs."""

    def __init__(self, max_draft_len: int, max_sequences: int) -> None:
        super().__init__(CHEAP_DRAFTS, max_draft_len, max_sequences)

    def plan(self, views: Sequence[SequenceView], num_prefilling: int = 0) -> Decision:
        return self._decide(views, replace(self.settings, num_prefilling=num_prefilling))

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: measured costs could stop the drafting."""


def force_drafting(server: Server, config: ServerConfig) -> None:
    """Make every policy but `none` draft wherever it can. Call it before the first request."""
    limits = config.limits
    server.loop.controller = ForcedDrafting(limits.max_draft_len, limits.max_sequences)


@dataclass(frozen=True)
class CheckArm:
    """A way to speculate. proposer: None uses the server's default."""

    policy: str
    proposer: str | None = None

    def applied(self, params: GenerateParams) -> GenerateParams:
        return replace(params, policy=self.policy, proposer=self.proposer)

    def __str__(self) -> str:
        return self.policy if self.proposer is None else f"{self.policy}, {self.proposer}"


NO_SPECULATION = CheckArm("none")


@dataclass(frozen=True)
class CheckCase:
    """A request and its result without speculation: its tokens, with the end token if it ended with
    one, and its finish reason."""

    params: GenerateParams
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Divergence:
    """A text that differs. arm, mode: where it was found. index: of the first generated token that
    differs. If one of the texts ends there without an end token, its token is None."""

    arm: str
    mode: str
    params: GenerateParams
    index: int
    expected: int | None
    found: int | None


@dataclass
class CheckReport:
    """num_tokens, num_requests: compared. num_cancelled: additional requests that were cancelled.
    num_cached: prompt tokens from the prefix cache. num_preemptions: of all requests."""

    arm: str
    mode: str
    num_requests: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cancelled: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    divergences: tuple[Divergence, ...] = ()


def reference(server: Server, requests: Iterable[GenerateParams]) -> list[CheckCase]:
    """Each request alone, without speculation."""
    cases = []
    for params in requests:
        plain = replace(NO_SPECULATION.applied(params), reuse_prefix=False)
        (sink,) = generate(server, [plain])
        _raise_error(sink)
        cases.append(CheckCase(params, tuple(sink.drawn), str(sink.finish_reason)))
    return cases


def compare_alone(server: Server, cases: Sequence[CheckCase], arm: CheckArm) -> CheckReport:
    """Each request alone."""
    report = CheckReport(str(arm), "alone")
    for case in cases:
        (sink,) = generate(server, [arm.applied(case.params)])
        _add(report, case, arm, sink)
    return report


def compare_mixed(
    server: Server, cases: Sequence[CheckCase], arms: Sequence[CheckArm], seed: int
) -> CheckReport:
    """All requests together under random arms, with additional requests that are cancelled."""
    rng = random.Random(seed)
    report = CheckReport("all", "mixed")
    preempted_before = server.loop.scheduler.num_preemptions
    order = [(case, rng.choice(arms)) for case in cases]
    rng.shuffle(order)
    running = []
    for case, arm in order:
        params = replace(arm.applied(case.params), priority=rng.choice((0, 0, 0, 1)))
        if rng.random() < 0.25:
            _cancel_one(server, params, rng.randrange(1, 4))
            report.num_cancelled += 1
        sink = LocalSink()
        server.submit(params, sink)
        running.append((case, arm, sink))
    for case, arm, sink in running:
        sink.wait(WAIT_S)
        _add(report, case, arm, sink)
    report.num_preemptions = server.loop.scheduler.num_preemptions - preempted_before
    return report


def _cancel_one(server: Server, params: GenerateParams, num_pieces: int) -> None:
    """A request whose client disconnects after a number of responses, or before the first."""
    sink = _LeavingSink(num_pieces)
    server.submit(replace(params, stream=True), sink)


class _LeavingSink(LocalSink):
    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self._num_pieces = num_pieces

    def is_cancelled(self) -> bool:
        return len(self.pieces) >= self._num_pieces


def _add(report: CheckReport, case: CheckCase, arm: CheckArm, sink: LocalSink) -> None:
    _raise_error(sink)
    report.num_requests += 1
    report.num_tokens += len(sink.drawn)
    report.num_drafted += sink.progress.num_drafted
    report.num_accepted += sink.progress.num_accepted
    report.num_cached += sink.progress.num_cached
    found = tuple(sink.drawn)
    if found == case.tokens and str(sink.finish_reason) == case.finish:
        return
    pairs = enumerate(zip(case.tokens, found, strict=False))
    shorter = min(len(case.tokens), len(found))
    index = next((i for i, (a, b) in pairs if a != b), shorter)
    divergence = Divergence(
        arm=str(arm),
        mode=report.mode,
        params=case.params,
        index=index,
        expected=case.tokens[index] if index < len(case.tokens) else None,
        found=found[index] if index < len(found) else None,
    )
    report.divergences = (*report.divergences, divergence)


def _raise_error(sink: LocalSink) -> None:
    if sink.error is not None:
        raise CheckError(f"a request of the check failed: {sink.error[1]}")


def check_pair_exactness(
    server: Server,
    requests: Sequence[GenerateParams],
    arms: Sequence[CheckArm],
    min_tokens: int,
    say: Callable[[str], object] = lambda text: None,
) -> list[CheckReport]:
    """Compare at least min_tokens: once alone under each arm, then mixed until there are enough.
    say: told what comes next. Raises CheckError if a request fails, and RequestError if one is
    refused."""
    say("reference without speculation")
    cases = reference(server, requests)
    num_tokens = sum(len(case.tokens) for case in cases)
    # Every run compares the same tokens; no mixed batch would add any where there are none.
    num_runs = math.ceil(min_tokens / num_tokens) if num_tokens else 0
    num_mixed = max(1, num_runs - len(arms))
    reports = []
    for number, arm in enumerate(arms, start=1):
        say(f"{arm}, alone (run {number} of {len(arms) + num_mixed})")
        reports.append(compare_alone(server, cases, arm))
    for seed in range(num_mixed):
        say(f"mixed batch {seed + 1} of {num_mixed}")
        reports.append(compare_mixed(server, cases, arms, seed))
    return reports
