"""The check of texts: quiet on an engine that keeps its promise, loud on one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import NO_TOKEN
from smartspec_py.engines.base import Event
from smartspec_py.engines.fake import FAKE_CAPABILITIES, FakeTarget
from smartspec_py.exactness import CheckArm, check_pair_exactness, reference
from smartspec_py.proposers.fake import FakeProposer
from smartspec_py.serving.config import (
    DRAFT_MODEL,
    FakeEngineConfig,
    LimitsConfig,
    ServerConfig,
)
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Engine, Server

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).parents[1] / "engines_build" / "tiny" / "target" / "tokenizer.json")
)
CAPABILITIES = replace(FAKE_CAPABILITIES, vocab_size=2000)
REQUESTS = [
    GenerateParams(text=text, max_tokens=20, temperature=temperature, seed=3)
    for text in ("Who goes there?", "List the names", "Report:")
    for temperature in (0.0, 1.0)
]
ARMS = (CheckArm("none"), CheckArm("fixed:2"), CheckArm("goodput"))


class Leaky(FakeTarget):
    """Takes one draft too many: the text then depends on what was drafted."""

    def poll(self, timeout_s: float) -> list[Event]:
        return [
            e._replace(tokens=(*e.tokens[:-1], 1 + e.tokens[-1] // 2)) if e.num_drafted else e
            for e in super().poll(timeout_s)
        ]


@contextmanager
def serving(target: FakeTarget) -> Iterator[Server]:
    cost = CostModel(PassTable((1,), (1,), ((0.01,),)), PassTable((1,), (1,), ((0.001,),)))
    proposer = FakeProposer(0.6, vocab_size=2000)
    engine = Engine(TOKENIZER, NO_TOKEN, target, {DRAFT_MODEL: proposer}, cost)
    config = ServerConfig(
        engine=FakeEngineConfig(kind="fake", tokenizer="none"),
        limits=LimitsConfig(max_context_len=512),
    )
    server = Server(engine, config)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_a_good_engine_shows_no_difference() -> None:
    """Six requests of 20 tokens: 120 for each of three policies alone, then 120 a mixed batch
    until 700 are compared."""
    target = FakeTarget(CAPABILITIES)
    with serving(target) as server:
        reports = check_pair_exactness(server, REQUESTS, ARMS, 700, lambda report: None)
    assert [report.num_tokens for report in reports[:3]] == [120, 120, 120]
    assert sum(report.num_tokens for report in reports) == 720
    assert [report.mode for report in reports[3:]] == ["mixed"] * 3
    assert not any(report.divergences for report in reports)
    assert reports[0].num_drafted == 0
    assert reports[1].num_accepted > 0
    assert sum(report.num_cancelled for report in reports) > 0
    assert target.num_sequences == 0, "cancelled neighbours have left as well"


def test_a_leaky_engine_is_found_at_its_first_difference() -> None:
    with serving(Leaky(CAPABILITIES)) as server:
        cases = reference(server, REQUESTS)
        reports = check_pair_exactness(server, REQUESTS, ARMS, 1, lambda report: None)
    none, fixed, *_ = reports
    assert not none.divergences
    assert len(fixed.divergences) == len(cases)
    for divergence in fixed.divergences:
        same = divergence.index
        (case,) = [case for case in cases if case.params == divergence.params]
        assert divergence.before == case.tokens[:same]
        assert divergence.expected == case.tokens[same]
        assert divergence.found is not None
        assert divergence.found != divergence.expected
