"""Does speculation change the text? Compares every policy with no speculation, request by request.

The reference is each request alone, under `none`. Then the same requests run under every policy,
alone and in mixed batches where neighbours have other policies and settings, join late and are
cancelled. A request that differs counts once, at its first difference: what follows it means
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
class CheckCase:
    """A request, and the text and number of tokens that it has without speculation."""

    params: GenerateParams
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Divergence:
    """policy, mode: where it was seen. index: first character that differs."""

    policy: str
    mode: str
    params: GenerateParams
    index: int
    expected: str
    found: str


@dataclass
class CheckReport:
    """num_tokens: tokens compared. num_requests: requests compared. num_cancelled: thrown in."""

    policy: str
    mode: str
    num_requests: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cancelled: int = 0
    divergences: tuple[Divergence, ...] = ()


def reference(server: Server, requests: Iterable[GenerateParams]) -> list[CheckCase]:
    """Each request alone, without speculation."""
    cases = []
    for params in requests:
        (sink,) = generate(server, [replace(params, policy="none")])
        _raise_error(sink)
        cases.append(CheckCase(params, sink.text, sink.num_tokens))
    return cases


def compare_alone(server: Server, cases: Sequence[CheckCase], policy: str) -> CheckReport:
    """Each request alone under the policy."""
    report = CheckReport(policy, "alone")
    for case in cases:
        (sink,) = generate(server, [replace(case.params, policy=policy)])
        _add(report, case, policy, sink)
    return report


def compare_mixed(
    server: Server, cases: Sequence[CheckCase], policies: Sequence[str], seed: int
) -> CheckReport:
    """All requests together under random policies, with more that are cancelled on their way."""
    rng = random.Random(seed)
    report = CheckReport("all", "mixed")
    order = [(case, rng.choice(policies)) for case in cases]
    rng.shuffle(order)
    running = []
    for case, policy in order:
        if rng.random() < 0.25:
            _cancel_one(server, replace(case.params, policy=policy), rng.randrange(1, 4))
            report.num_cancelled += 1
        sink = LocalSink()
        server.submit(replace(case.params, policy=policy), sink)
        running.append((case, policy, sink))
    for case, policy, sink in running:
        sink.wait(WAIT_S)
        _add(report, case, policy, sink)
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


def _add(report: CheckReport, case: CheckCase, policy: str, sink: LocalSink) -> None:
    _raise_error(sink)
    report.num_requests += 1
    report.num_tokens += sink.num_tokens
    report.num_drafted += sink.progress.num_drafted
    report.num_accepted += sink.progress.num_accepted
    if sink.text != case.text or sink.num_tokens != case.num_tokens:
        index = _first_difference(case.text, sink.text)
        found = Divergence(policy, report.mode, case.params, index, case.text, sink.text)
        report.divergences = (*report.divergences, found)


def _first_difference(expected: str, found: str) -> int:
    pairs = enumerate(zip(expected, found, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))


def _raise_error(sink: LocalSink) -> None:
    if sink.error is not None:
        raise RuntimeError(f"a request of the check failed: {sink.error[1]}")


def check_pair_exactness(
    server: Server,
    requests: Sequence[GenerateParams],
    policies: Sequence[str],
    min_tokens: int,
    progress: Callable[[CheckReport], None],
) -> list[CheckReport]:
    """Compare at least min_tokens: once alone under each policy, then mixed until it is enough."""
    cases = reference(server, requests)
    reports = []
    for policy in policies:
        reports.append(compare_alone(server, cases, policy))
        progress(reports[-1])
    seed = 0
    while sum(report.num_tokens for report in reports) < min_tokens or seed == 0:
        reports.append(compare_mixed(server, cases, policies, seed))
        progress(reports[-1])
        seed += 1
        if reports[-1].num_tokens == 0:
            break  # every request ends at once: there is nothing to compare
    return reports
