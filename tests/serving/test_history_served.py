"""Texts of other requests are drafted for the same tenant and adapter, and for nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import COST, LoopHarness

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, LookupConfig, ServerConfig
from smartspec_py.constants import PROMPT_LOOKUP
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Event
from smartspec_py.engines.drafts.lookup import PromptLookupProposer
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import Request
from smartspec_py.serving.source import Source, StepResult
from smartspec_testing.engines import ScriptedConfig
from smartspec_testing.local import generate, serving
from smartspec_testing.offline import OfflineLoop

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
TEXT = "The small boat left Dover at nine and came back with fresh fish from France."
"""No pair of its tokens occurs twice."""


@pytest.fixture
def served(tmp_path: Path):
    script = tmp_path / "rules.json"
    script.write_text(json.dumps([{"when": "Write", "write": [TEXT]}]))
    engine = ScriptedConfig(kind="scripted", tokenizer=str(TOKENIZER), script=str(script))
    config = ServerConfig(
        engine=engine,
        limits=LimitsConfig(max_sequences=2, max_context_len=128),
        lookup=LookupConfig(history_tokens=1000),
    )
    with serving(build_engine(config, Path()), config) as server:

        def num_accepted(tenant: str = "", **more: bool) -> int:
            """Drafts that were accepted of a new request."""
            params = GenerateParams("Write", 64, policy="fixed:4", tenant=tenant, **more)
            [sink] = generate(server, [params])
            assert sink.text == TEXT
            return sink.progress.num_accepted

        yield num_accepted


def test_nothing_crosses_tenants(served) -> None:
    assert served("anna") == 0
    assert served("ben") == 0
    assert served() == 0
    assert served("anna") > 10
    assert served() > 10


def test_a_request_that_reuses_nothing_adds_nothing(served) -> None:
    assert served("anna", reuse_prefix=False) == 0
    assert served("anna") == 0  # the one before was not kept
    assert served("anna", reuse_prefix=False) == 0  # and what was kept is not used
    assert served("anna") > 10


def test_running_requests_draft_from_each_other() -> None:
    """The fake engine writes the same text after the same prompt, without a repetition."""
    proposers = {PROMPT_LOOKUP: PromptLookupProposer(4, history_tokens=1000)}
    harness = LoopHarness()
    loop = OfflineLoop(harness.target, proposers, COST, harness.clock.now)

    def put(sequence: int, tenant: str) -> Request:
        greedy, names = SamplingParams(), (PROMPT_LOOKUP,)
        request = Request(
            sequence, [1, 2, 3], 3, 40, greedy, "fixed:4", 4, proposers=names, tenant=tenant
        )
        loop.put(request)
        return request

    first = put(1, "anna")
    for _ in range(20):
        loop.step()
    second, other = put(2, "anna"), put(3, "ben")
    for _ in range(6):
        loop.step()
    assert not first.is_over
    assert second.num_accepted >= 8
    assert first.num_drafted == other.num_drafted == 0
    while loop.is_busy:
        loop.step()
    assert first.tokens == second.tokens == other.tokens


def test_texts_of_steps_without_drafts_are_learned(request_of) -> None:
    """In steps that ask no proposer, too: otherwise a long text would be learned at once at its
    end, while all others wait."""
    source = Source(PROMPT_LOOKUP, PromptLookupProposer(4, history_tokens=1000))
    first, second = request_of("", "anna"), request_of("", "anna")
    first.tokens += range(10, 20)
    source.observe([StepResult(first, Event(1, (20,), is_last=True), (), is_burst=False)])
    second.sequence = 2
    second.tokens += [10, 11, 12]
    [option] = source.options([second], {}, 1)[2]
    assert option.max_draft_len == 4


def test_scopes_are_pairs_of_adapter_and_tenant(request_of) -> None:
    """No adapter has a slash in its name, so different pairs have different scopes."""
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("a", "/a"), ("", "a/a")]
    scopes = [request_of(adapter, tenant).scope for adapter, tenant in pairs]
    assert len(set(scopes)) == len(pairs)


@pytest.fixture
def request_of():
    def make(adapter: str, tenant: str) -> Request:
        return Request(
            1, [1], 1, 90, SamplingParams(), "goodput", 4, adapter=adapter, tenant=tenant
        )

    return make
