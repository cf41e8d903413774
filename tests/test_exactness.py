"""The check of texts: quiet on an engine that keeps its promise, loud on one that does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from smartspec_bench.exactness import (
    CheckArm,
    CheckCase,
    CheckReport,
    Divergence,
    check_pair_exactness,
    compare_alone,
    force_drafting,
    reference,
)
from smartspec_cli.commands.check import _summary, _verdict_line
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import Event
from smartspec_py.engines.engine import Engine
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.fake_engine import FAKE_CAPABILITIES, FakeTarget
from smartspec_testing.fake_proposer import FakeProposer
from smartspec_testing.local import LocalSink, serving

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).parents[1] / "engines_build" / "tiny" / "target" / "tokenizer.json")
)
CAPABILITIES = replace(FAKE_CAPABILITIES, vocab_size=2000)
REQUESTS = [
    GenerateParams(text=text, max_tokens=20, temperature=temperature, seed=3)
    for text in ("Who goes there?", "List the names", "Report:")
    for temperature in (0.0, 1.0)
]
CONFIG = ServerConfig(
    engine=FakeEngineConfig(kind="fake", tokenizer="none"), limits=LimitsConfig(max_context_len=512)
)
ARMS = (CheckArm("none"), CheckArm("fixed:2"), CheckArm("goodput"))


class Leaky(FakeTarget):
    """Takes one draft too many: the text then depends on what was drafted."""

    def poll(self, timeout_s: float) -> list[Event]:
        return [
            e._replace(tokens=(*e.tokens[:-1], 1 + e.tokens[-1] // 2)) if e.num_drafted else e
            for e in super().poll(timeout_s)
        ]


CHEAP = CostModel(PassTable((1,), (1,), ((0.01,),)), PassTable((1,), (1,), ((0.001,),)))
DEAR = CostModel(PassTable((1,), (1,), ((0.01,),)), PassTable((1,), (1,), ((0.02,),)))
"""A draft takes as long as two tokens without any."""


def fake_engine(target: FakeTarget, cost: CostModel = CHEAP) -> Engine:
    proposer = FakeProposer(0.6, vocab_size=2000)
    return Engine(TOKENIZER, (), target, {DRAFT_MODEL: proposer}, cost)


def test_a_good_engine_shows_no_difference() -> None:
    """Six requests of 20 tokens: 120 for each of three policies alone, then 120 a mixed batch
    until 700 are compared."""
    said: list[str] = []
    target = FakeTarget(CAPABILITIES)
    with serving(fake_engine(target), CONFIG) as server:
        reports = check_pair_exactness(server, reference(server, REQUESTS), ARMS, 700, said.append)
    assert said[0] == "none, alone (run 1 of 6)"
    assert said[-1] == "mixed batch 3 of 3"
    assert [report.counts["tokens"] for report in reports[:3]] == [120, 120, 120]
    assert sum(report.counts["tokens"] for report in reports) == 720
    assert [report.mode for report in reports[3:]] == ["mixed"] * 3
    assert not any(report.divergences for report in reports)
    assert reports[0].counts["drafted"] == 0
    assert reports[1].counts["accepted"] > 0
    assert sum(report.counts["cancelled"] for report in reports) > 0
    assert target.num_sequences == 0, "cancelled neighbours have left as well"


def test_a_leaky_engine_is_found_at_its_first_difference() -> None:
    with serving(fake_engine(Leaky(CAPABILITIES)), CONFIG) as server:
        cases = reference(server, REQUESTS)
        reports = check_pair_exactness(server, cases, ARMS, 1)
    none, fixed, *_ = reports
    assert not none.divergences
    assert len(fixed.divergences) == len(cases)
    for divergence in fixed.divergences:
        (case,) = [case for case in cases if case.params == divergence.params]
        assert divergence.expected == case.tokens[divergence.index]
        assert divergence.found is not None
        assert divergence.found != divergence.expected


def test_policies_that_choose_by_cost_draft_even_where_it_does_not_pay() -> None:
    """Served as it is, `goodput` leaves drafting alone but for a probe; the check compares it."""
    num_drafted = []
    for is_forced in (False, True):
        with serving(fake_engine(FakeTarget(CAPABILITIES), DEAR), CONFIG) as server:
            if is_forced:
                force_drafting(server, CONFIG)
            cases = reference(server, REQUESTS)
            report = compare_alone(server, cases, CheckArm("goodput"))
        assert not report.divergences
        num_drafted.append(report.counts["drafted"])
    assert num_drafted[0] < 10
    assert num_drafted[1] > 60


def test_other_bits_of_equal_texts_are_counted_up_to_the_first_other_token() -> None:
    class Ended(LocalSink):
        drawn, log_probs, finish_reason = [1, 2, 9], [-1.5, -2.5000002, -3.0], "length"  # type: ignore[assignment]

    found = CheckReport("none", "alone")
    case = CheckCase(REQUESTS[0], (1, 2, 3), "length", (-1.5, -2.5, -4.0))
    found.add(case, CheckArm("none"), Ended())
    assert found.counts["bits"] == 1
    assert [one.index for one in found.divergences] == [2]


DIVERGENCE = Divergence("fixed:1", "alone", REQUESTS[0], 0, 1, 2)


def report(arm: str, num_drafted: int, num_tokens: int = 100) -> CheckReport:
    counts = Counter(requests=5, tokens=num_tokens, drafted=num_drafted, accepted=7)
    return CheckReport(arm, "alone", counts)


NONE, FIXED = report("none", 0), report("fixed:1, draft_model", 60)
DIFFERENT = replace(FIXED, divergences=[DIVERGENCE])
OTHER_BITS = replace(FIXED, counts=FIXED.counts + Counter(bits=3))


@pytest.mark.parametrize(
    ("reports", "line"),
    [
        (
            [NONE, FIXED],
            "PASS: 200 tokens compared, 60 drafted, 14 accepted; no text differs",
        ),
        (
            [NONE, DIFFERENT],
            "FAIL: 200 tokens compared, 60 drafted, 14 accepted; "
            "1 texts differ (5 in 1,000 tokens)",
        ),
        (
            [NONE, OTHER_BITS],
            "FAIL: 200 tokens compared, 60 drafted, 14 accepted; "
            "3 tokens of equal texts have other bits; no text differs",
        ),
        (
            [NONE, FIXED, report("goodput, prompt_lookup", 0)],
            "FAIL: 300 tokens compared, 60 drafted, 21 accepted; no text differs; "
            "no drafts, nothing compared: goodput, prompt_lookup alone",
        ),
        (
            [report("none", 0, 0), report("fixed:1", 9, 0)],
            "FAIL: 0 tokens compared, 9 drafted, 14 accepted; no text differs",
        ),
    ],
)
def test_verdict(reports: list[CheckReport], line: str) -> None:
    summary = _summary(reports, compares_bits=True)
    assert _verdict_line(summary) == line
    assert summary["verdict"] == line[:4]


@pytest.mark.parametrize(
    ("difference", "is_exact", "verdict"),
    [
        (9e-4, True, "PASS"),
        (2e-3, True, "FAIL"),
        (float("nan"), True, "FAIL"),
        (0.5, False, "PASS"),
    ],
)
def test_an_adapter_must_be_like_its_merged_model(
    difference: float, is_exact: bool, verdict: str
) -> None:
    """With rounded weights it is not: the adapter is rounded otherwise."""
    merged = {"sql": difference, "chat": 0.0}
    summary = _summary([NONE, FIXED], True, merged, is_exact)
    assert summary["verdict"] == verdict
    assert ("unlike the merged model: sql" in _verdict_line(summary)) == (verdict == "FAIL")
