"""Does speculation change the text? Compares every way to speculate with none, token by token.

The reference is each request alone, under `none`, its prompt read whole. Then the same requests run
under every arm (a policy and a proposer), alone and in mixed batches where neighbours have other
arms and settings, join late, are cancelled, take over cached prefixes, and are preempted where the
cache is small. A request that differs counts once, at its first difference: what follows it means
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from smartspec_py.serving.local import LocalSink, generate
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server

WAIT_S = 600.0


@dataclass(frozen=True)
class CheckArm:
    """A way to speculate. proposer: None is the server's own."""

    policy: str
    proposer: str | None = None

    def applied(self, params: GenerateParams) -> GenerateParams:
        return replace(params, policy=self.policy, proposer=self.proposer)

    def __str__(self) -> str:
        return self.policy if self.proposer is None else f"{self.policy}, {self.proposer}"


NO_SPECULATION = CheckArm("none")


@dataclass(frozen=True)
class CheckCase:
    """A request, and the tokens and the reason of its end that it has without speculation."""

    params: GenerateParams
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Divergence:
    """arm, mode: where it was seen. index: of the first generated token that differs; one of the
    two may end there, which is None."""

    arm: str
    mode: str
    params: GenerateParams
    index: int
    before: tuple[int, ...]
    expected: int | None
    found: int | None


@dataclass
class CheckReport:
    """num_tokens: tokens compared. num_requests: requests compared. num_cancelled: thrown in.
    num_cached: prompt tokens that were taken over. num_preemptions: of all requests."""

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
        cases.append(CheckCase(params, tuple(sink.tokens), str(sink.finish_reason)))
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
    """All requests together under random arms, with more that are cancelled on their way."""
    rng = random.Random(seed)
    report = CheckReport("all", "mixed")
    preempted_before = server.loop.num_preemptions
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
    report.num_preemptions = server.loop.num_preemptions - preempted_before
    return report


def _cancel_one(server: Server, params: GenerateParams, num_pieces: int) -> None:
    """A request whose client leaves after so many responses, or before the first."""
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
    report.num_tokens += len(sink.tokens)
    report.num_drafted += sink.progress.num_drafted
    report.num_accepted += sink.progress.num_accepted
    report.num_cached += sink.summary.num_cached_tokens if sink.summary else 0
    found = tuple(sink.tokens)
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
        before=case.tokens[:index],
        expected=case.tokens[index] if index < len(case.tokens) else None,
        found=found[index] if index < len(found) else None,
    )
    report.divergences = (*report.divergences, divergence)


def _raise_error(sink: LocalSink) -> None:
    if sink.error is not None:
        raise RuntimeError(f"a request of the check failed: {sink.error[1]}")


def check_pair_exactness(
    server: Server,
    requests: Sequence[GenerateParams],
    arms: Sequence[CheckArm],
    min_tokens: int,
    progress: Callable[[CheckReport], None],
) -> list[CheckReport]:
    """Compare at least min_tokens: once alone under each arm, then mixed until it is enough."""
    cases = reference(server, requests)
    reports = []
    for arm in arms:
        reports.append(compare_alone(server, cases, arm))
        progress(reports[-1])
    seed = 0
    while sum(report.num_tokens for report in reports) < min_tokens or seed == 0:
        reports.append(compare_mixed(server, cases, arms, seed))
        progress(reports[-1])
        seed += 1
        if reports[-1].num_tokens == 0:
            break  # every request ends at once: there is nothing to compare
    return reports
