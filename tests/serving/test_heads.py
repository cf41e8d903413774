"""Medusa heads served: the shipped target with its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_served import MIXED, MODEL, REQUESTS, TINY, config_of, served, serving

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.constants import HEADS
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.drafts.medusa.heads import load_heads
from smartspec_py.engines.drafts.medusa.proposer import MedusaProposer
from smartspec_py.engines.model_files import load_tokenizer
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.runner import RunnerConfig
from smartspec_py.engines.tokenizer_file import num_token_ids
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.step import Reason
from smartspec_testing.local import LocalSink, generate

pytestmark = pytest.mark.slow  # so that they run beside the others

TOKENIZER = load_tokenizer("engine.model", MODEL)
VOCAB_SIZE = num_token_ids(TOKENIZER)
NUM_HEADS = 4

COST = CostModel(target=PassTable((1,), (1,), ((0.01,),)))
"""Any number of tokens costs the same, so more drafts are always better."""


def with_heads(**limits: Any) -> ServerConfig:
    return config_of(limits, heads=str(TINY / "heads"), runtime="torch")


def alone() -> MedusaProposer:
    own = RunnerConfig(MODEL, torch.device("cpu"), torch.float32, 1, 64, VOCAB_SIZE)
    return MedusaProposer(load_heads(TINY / "heads", own), 7, tree_context_len=64)


def asked(policy: str, **changes: Any) -> list[GenerateParams]:
    return [replace(one, policy=policy, proposer=HEADS, **changes) for one in MIXED]


@cache
def answers(policy: str) -> list[LocalSink]:
    return served(with_heads(), asked(policy), cost=COST)[0]


def accepted_per_step(sinks: Sequence[LocalSink]) -> float:
    num_accepted = sum(sink.progress.num_accepted for sink in sinks)
    return num_accepted / sum(sink.progress.num_steps for sink in sinks)


@pytest.mark.parametrize("policy", ["fixed:4", "goodput"])
def test_text_is_that_without_speculation_and_drafts_are_accepted(policy: str) -> None:
    plain, found = answers("none"), answers(policy)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    assert sum(sink.progress.num_drafted for sink in plain) == 0
    assert accepted_per_step(found) > 0.6


def test_goodput_chooses_trees_if_tokens_cost_nothing() -> None:
    """They accept more per step than chains of as many guesses as there are heads."""
    chains, trees = accepted_per_step(answers("fixed:4")), accepted_per_step(answers("goodput"))
    assert trees > 1.1 * chains, (trees, chains)


def test_limits_of_drafts() -> None:
    """By `num_draft_tokens`, and by the number of heads."""
    few, rejected = asked("fixed:7", num_draft_tokens=3)[0], asked("fixed:7")[1]
    rejected = replace(rejected, verification=Verification.REJECTION)
    for params, most in ((few, 3), (rejected, NUM_HEADS)):
        [sink], _ = served(with_heads(), [params], cost=COST)
        assert (most - 1) * sink.progress.num_steps < sink.progress.num_drafted
        assert sink.progress.num_drafted <= most * sink.progress.num_steps
        assert sink.progress.num_accepted > 0


def test_preempted_sequences_are_drafted_for_again() -> None:
    """A budget of 260 tokens for prompts of up to 90 and 40 more each, four at once."""
    small, num_preemptions = served(with_heads(max_cache_tokens=260), asked("goodput"), cost=COST)
    assert num_preemptions > 0
    assert [sink.tokens for sink in small] == [sink.tokens for sink in answers("goodput")]


def test_drafts_follow_the_request() -> None:
    proposer = alone()
    assert proposer.num_available(1, [1, 2], SamplingParams()) == 0
    torch.manual_seed(0)
    proposer.observe(1, 0, torch.randn(2, 128))
    proposer.observe(2, 0, torch.randn(1, 128))
    assert proposer.num_available(1, [1, 2], SamplingParams()) == NUM_HEADS
    sampled = SamplingParams(temperature=1.0, verification=Verification.REJECTION)
    tasks = [
        DraftTask(SequenceStart(1, [1, 2], 1, SamplingParams()), 4),
        DraftTask(SequenceStart(2, [1, 2], 1, sampled), 2),
        DraftTask(SequenceStart(3, [1, 2], 1, SamplingParams()), 2),
    ]
    greedy, drawn, unknown = proposer.propose(tasks)
    assert (len(greedy.tokens), greedy.probs) == (4, None)
    assert drawn.probs.shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(drawn.probs.sum(-1), torch.ones(2))
    assert unknown.tokens == ()
    ending = SamplingParams(end_tokens=(greedy.tokens[1],))
    assert (
        proposer.propose([DraftTask(SequenceStart(1, [1, 2], 1, ending), 4)])[0].tokens
        == greedy.tokens[:2]
    )
    banned = SamplingParams(bad_words=((greedy.tokens[0],),))
    assert (
        proposer.propose([DraftTask(SequenceStart(1, [1, 2], 1, banned), 1)])[0].tokens
        != greedy.tokens[:1]
    )
    proposer.release(1)
    proposer.release(1)
    assert proposer.num_available(1, [1, 2], SamplingParams()) == 0


def test_trees_beside_chains() -> None:
    """Trees of different depths beside a chain."""
    proposer = alone()
    torch.manual_seed(0)
    for sequence in (1, 2, 3):
        proposer.observe(sequence, 0, torch.randn(1, 128))
    tasks = [
        DraftTask(SequenceStart(1, [1, 2], 1, SamplingParams()), 20, depth=4),
        DraftTask(SequenceStart(2, [1, 2], 1, SamplingParams()), 3),
        DraftTask(SequenceStart(3, [1, 2], 1, SamplingParams(temperature=1.0)), 9, depth=2),
    ]
    deep, chain, flat = proposer.propose(tasks)
    assert (len(deep.tokens), len(chain.tokens), len(flat.tokens)) == (20, 3, 9)
    assert not chain.tree
    for draft in (deep, flat):
        pairs = set(zip(draft.tree.parents, draft.tokens, strict=True))
        assert len(pairs) == len(draft.tokens), "guesses after the same token differ"
        assert all(parent <= place for place, parent in enumerate(draft.tree.parents))


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_engine_json_names_the_heads(runtime: str) -> None:
    config = config_of(heads=str(TINY / "heads"), draft=str(TINY / "draft"), runtime=runtime)
    requests = [
        GenerateParams(REQUESTS[0].text, 30, policy=policy, proposer=proposer)
        for policy, proposer in (("none", None), ("fixed:4", "heads"), ("goodput", None))
    ]
    engine = build_engine(config, Path.cwd())
    with serving(config, engine) as server:
        sinks = generate(server, requests, 60.0)
    assert list(engine.proposers) == ["draft_model", "heads", "prompt_lookup"]
    alone_s, further_s = engine.proposers[HEADS].capabilities.draft_s
    assert alone_s > 0
    assert further_s >= 0
    assert len({tuple(sink.tokens) for sink in sinks}) == 1
    assert sinks[1].progress.num_accepted > 0


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.heads: .*target has no Medusa heads"):
        build_engine(config_of(heads=str(MODEL)), Path.cwd())
    config = config_of().model_copy(update={"proposer": "heads"})
    with pytest.raises(ConfigError, match=r"got heads, must be auto or one .*: prompt_lookup"):
        build_engine(config, Path.cwd())


def test_heads_beside_prompt_lookup() -> None:
    """A repetitive prompt, where a lookup beats every guess of the heads."""
    with serving(with_heads(), cost=COST) as server:
        texts = [
            generate(server, [GenerateParams("one two three " * 6, 40, policy=policy)], 120.0)
            for policy in ("none", "fixed:1", "fixed:3", "goodput", "goodput_global")
        ]
        assert not any(one.decision.reason is Reason.FAILED for one in server.loop.records)
    assert len({tuple(sink.tokens) for (sink,) in texts}) == 1
    assert all(sink.progress.num_drafted for (sink,) in texts[1:3]), "those of fixed length"
