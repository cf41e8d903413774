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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SequenceView
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import Decision, Mode, StepRecord
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

    def plan(
        self,
        views: Sequence[SequenceView],
        mode: Mode = Mode.SEARCH,
        num_prefilling: int = 0,
        warm_shapes: Collection[int] = (),
    ) -> Decision:
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
    one, its finish reason, and the log-probabilities of the tokens."""

    params: GenerateParams
    tokens: tuple[int, ...]
    finish: str
    log_probs: tuple[float, ...] = ()


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


COUNTS = (
    *("requests", "tokens", "guided", "bits"),
    *("drafted", "accepted", "cached", "preemptions", "cancelled"),
)
"""requests, tokens: compared. guided: tokens of texts with a grammar. bits: tokens of equal texts
whose log-probability, a float32 number, differs in any bit, so that logits differ. cached: prompt
tokens from the prefix cache. cancelled: additional requests that were cancelled. preemptions: of
all requests."""


@dataclass
class CheckReport:
    """One run. counts: by the names of COUNTS."""

    arm: str
    mode: str
    counts: Counter[str] = field(default_factory=Counter)
    divergences: list[Divergence] = field(default_factory=list)

    def add(self, case: CheckCase, arm: CheckArm, sink: LocalSink) -> None:
        """Count a request that has ended, and compare its text. Raises CheckError if it failed."""
        _raise_error(sink)
        found, done = tuple(sink.drawn), sink.progress
        self.counts.update(
            requests=1,
            tokens=len(found),
            guided=len(found) if case.params.guide_type else 0,
            drafted=done.num_drafted,
            accepted=done.num_accepted,
            cached=done.num_cached,
        )
        pairs = list(zip_longest(case.tokens, found))
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        both = list(zip(case.log_probs, sink.log_probs, strict=False))[:index]
        self.counts["bits"] += sum(a != b for a, b in both)
        if found == case.tokens and str(sink.finish_reason) == case.finish:
            return
        expected, drawn = pairs[index] if index < len(pairs) else (None, None)
        self.divergences.append(
            Divergence(str(arm), self.mode, case.params, index, expected, drawn)
        )


def reference(server: Server, requests: Iterable[GenerateParams]) -> list[CheckCase]:
    """Each request alone, without speculation. Raises CheckError and RequestError."""
    cases = []
    for params in requests:
        plain = replace(NO_SPECULATION.applied(params), reuse_prefix=False)
        (sink,) = generate(server, [plain])
        _raise_error(sink)
        finish, log_probs = str(sink.finish_reason), tuple(sink.log_probs)
        cases.append(CheckCase(params, tuple(sink.drawn), finish, log_probs))
    return cases


def compare_alone(server: Server, cases: Sequence[CheckCase], arm: CheckArm) -> CheckReport:
    """Each request alone."""
    report = CheckReport(str(arm), "alone")
    for case in cases:
        (sink,) = generate(server, [arm.applied(case.params)])
        report.add(case, arm, sink)
    return report


def compare_mixed(
    server: Server, cases: Sequence[CheckCase], arms: Sequence[CheckArm], seed: int
) -> CheckReport:
    """All requests together under random arms, with additional requests that are cancelled."""
    rng = random.Random(seed)
    report = CheckReport("all", "mixed")
    preempted_before = server.loop.lifecycle.num_preemptions
    order = [(case, rng.choice(arms)) for case in cases]
    rng.shuffle(order)
    running = []
    for case, arm in order:
        params = replace(arm.applied(case.params), priority=rng.choice((0, 0, 0, 1)))
        if rng.random() < 0.25:
            server.submit(replace(params, stream=True), _LeavingSink(rng.randrange(1, 4)))
            report.counts["cancelled"] += 1
        sink = LocalSink()
        server.submit(params, sink)
        running.append((case, arm, sink))
    for case, arm, sink in running:
        sink.wait(WAIT_S)
        report.add(case, arm, sink)
    report.counts["preemptions"] = server.loop.lifecycle.num_preemptions - preempted_before
    return report


class _LeavingSink(LocalSink):
    """A client that disconnects after a number of responses, or before the first."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self._num_pieces = num_pieces

    def is_cancelled(self) -> bool:
        return len(self.pieces) >= self._num_pieces


def _raise_error(sink: LocalSink) -> None:
    if sink.error is not None:
        raise CheckError(f"a request of the check failed: {sink.error[1]}")


def check_pair_exactness(
    server: Server,
    cases: Sequence[CheckCase],
    arms: Sequence[CheckArm],
    min_tokens: int,
    say: Callable[[str], object] = lambda text: None,
) -> list[CheckReport]:
    """Compare at least min_tokens: once alone under each arm, then mixed until there are enough.
    say: told what comes next. Raises CheckError if a request fails, and RequestError if one is
    refused."""
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
