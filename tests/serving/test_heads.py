"""Medusa heads served: the shipped target with its heads, and the hidden states that they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from smartspec_bench.workloads import WORKLOADS
from smartspec_bench.workloads import generate as document
from smartspec_py.config import HEADS, ConfigError, LimitsConfig, ServerConfig
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import ROOT, SamplingParams, Tree, Verification
from smartspec_py.engines.base import DraftTask
from smartspec_py.engines.model_files import load_tokenizer, num_token_ids, stepwise_capabilities
from smartspec_py.engines.torch.medusa import load_heads
from smartspec_py.engines.torch.medusa_proposer import HeadsProposer
from smartspec_py.engines.torch.runner import RunnerConfig, load_runner
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Engine, Server
from smartspec_py.serving.step import Reason
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.local import LocalSink, generate

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
MODEL = TINY / "target"
TOKENIZER = load_tokenizer("engine.model", MODEL)
VOCAB_SIZE = num_token_ids(TOKENIZER)
LIMITS = LimitsConfig(max_sequences=4, max_context_len=256, max_draft_len=7, prefill_chunk=48)
NUM_HEADS = 4

COST = CostModel(target=PassTable((1,), (1,), ((0.01,),)))
"""Any number of tokens costs the same, so more drafts are always better."""


class Recording(HeadsProposer):
    """heard: the calls of `observe` of each sequence, in order: (num_accepted, hidden)."""

    def __init__(self, width: int = 1) -> None:
        heads = load_heads(
            TINY / "heads",
            RunnerConfig(MODEL, torch.device("cpu"), torch.float32, 1, 64, VOCAB_SIZE),
        )
        super().__init__(heads, LIMITS.max_sequences, LIMITS.max_draft_len, width)
        self.heard: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def observe(self, sequence: int, num_accepted: int, hidden: Any = None) -> None:
        super().observe(sequence, num_accepted, hidden)
        self.heard.setdefault(sequence, []).append((num_accepted, hidden))

    def hidden(self, sequence: int) -> torch.Tensor:
        return torch.cat([hidden for _, hidden in self.heard[sequence]])


@contextmanager
def serving(proposer: HeadsProposer, limits: LimitsConfig = LIMITS) -> Iterator[Server]:
    config = RunnerConfig(
        path=MODEL,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_rows=limits.max_sequences,
        max_len=limits.max_context_len,
        vocab_size=VOCAB_SIZE,
        gives_hidden=True,
    )
    runner = load_runner(config)
    capabilities = stepwise_capabilities(limits, VOCAB_SIZE, runner.bytes_per_token)
    server = Server(
        Engine(TOKENIZER, (), TorchTarget(runner, capabilities), {HEADS: proposer}, COST),
        ServerConfig(engine=FakeEngineConfig(kind="fake", tokenizer="none"), limits=limits),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def served(
    params: Sequence[GenerateParams], limits: LimitsConfig = LIMITS, width: int = 1
) -> tuple[Recording, list[LocalSink], int]:
    """The proposer, the answers without errors, and how many requests were preempted."""
    proposer = Recording(width)
    with serving(proposer, limits) as server:
        sinks = generate(server, params, 120.0)
        num_preemptions = server.loop.scheduler.num_preemptions
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    return proposer, sinks, num_preemptions


REQUESTS = [
    GenerateParams(document(workload, 1_000_005, index).prompt, 40, seed=9, **sampling)
    for workload in WORKLOADS
    for index, sampling in enumerate(
        (
            {},
            {"temperature": 0.8},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
            {"temperature": 1.0, "top_p": 0.9, "bad_words": (" the",)},
        )
    )
]
"""Prompts that the heads were not trained on."""


@cache
def answers(policy: str, width: int = 1) -> tuple[Recording, list[LocalSink]]:
    asked = [replace(params, policy=policy) for params in REQUESTS]
    proposer, sinks, _ = served(asked, width=width)
    return proposer, sinks


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("policy", ["fixed:3", "fixed:4", "goodput"])
def test_text_is_that_without_speculation_and_drafts_are_accepted(policy: str, width: int) -> None:
    (_, plain), (_, found) = answers("none"), answers(policy, width)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    assert sum(sink.progress.num_drafted for sink in plain) == 0
    num_drafted = sum(sink.progress.num_drafted for sink in found)
    num_accepted = sum(sink.progress.num_accepted for sink in found)
    assert num_accepted / num_drafted > 0.1, f"{num_accepted} of {num_drafted} accepted"


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3"])
def test_hidden_states_are_those_of_the_model(policy: str) -> None:
    """Compared with Transformers, which reads the finished text at once: the state at position p
    drew the token at p + 1."""
    proposer, sinks = answers(policy)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for sequence, (params, sink) in enumerate(zip(REQUESTS, sinks, strict=True), start=1):
        prompt = TOKENIZER.encode(params.text).ids
        with torch.inference_mode():
            out = model(torch.tensor([prompt + sink.tokens]), output_hidden_states=True)
        expected = out.hidden_states[-1][0, len(prompt) - 1 : -1]
        torch.testing.assert_close(proposer.hidden(sequence), expected, atol=1e-3, rtol=1e-3)
        num_accepted, first = proposer.heard[sequence][0]
        assert (num_accepted, len(first)) == (0, 1), "the first token is reported alone"
        reported = [(accepted, len(hidden)) for accepted, hidden in proposer.heard[sequence]]
        assert all(num_tokens == accepted + 1 for accepted, num_tokens in reported)


def test_a_tree_accepts_more_than_a_chain() -> None:
    """With as many drafts: seven nodes, or the four that there are heads for."""
    (chains, plain), (trees, found) = answers("fixed:7"), answers("fixed:7", 4)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    per_step = [
        sum(sink.progress.num_accepted for sink in sinks)
        / sum(sink.progress.num_steps for sink in sinks)
        for sinks in (plain, found)
    ]
    assert per_step[1] > 1.1 * per_step[0], per_step
    assert trees.capabilities.tree_depth
    assert not chains.capabilities.tree_depth


def test_num_draft_tokens_limits_the_nodes_of_a_tree() -> None:
    asked = replace(REQUESTS[0], policy="fixed:7", num_draft_tokens=3)
    _, (sink,), _ = served([asked], width=4)
    progress = sink.progress
    assert 2 * progress.num_steps < progress.num_drafted <= 3 * progress.num_steps


def test_drafts_verified_by_rejection_are_chains() -> None:
    asked = replace(REQUESTS[1], policy="fixed:7", verification=Verification.REJECTION)
    _, (sink,), _ = served([asked], width=4)
    assert sink.progress.num_accepted > 0


@pytest.mark.parametrize("width", [1, 4])
def test_preempted_sequences_are_drafted_for_again(width: int) -> None:
    """A budget of 260 tokens for prompts of up to 90 and 40 more each, four at once."""
    limits = LIMITS.model_copy(update={"max_cache_tokens": 260})
    asked = [replace(one, policy="fixed:3") for one in REQUESTS]
    _, small, num_preemptions = served(asked, limits, width)
    _, large = answers("fixed:3")
    assert num_preemptions > 0
    assert [sink.tokens for sink in small] == [sink.tokens for sink in large]


def test_drafts_follow_the_request() -> None:
    proposer = Recording()
    assert proposer.num_available(1, [1, 2]) == 0
    torch.manual_seed(0)
    proposer.observe(1, 0, torch.randn(2, 128))
    proposer.observe(2, 0, torch.randn(1, 128))
    assert proposer.num_available(1, [1, 2]) == NUM_HEADS
    sampled = SamplingParams(temperature=1.0, verification=Verification.REJECTION)
    tasks = [
        DraftTask(1, [1, 2], 1, 4, SamplingParams()),
        DraftTask(2, [1, 2], 1, 2, sampled),
        DraftTask(3, [1, 2], 1, 2, SamplingParams()),
    ]
    greedy, drawn, unknown = proposer.propose(tasks)
    assert (len(greedy.tokens), greedy.probs) == (4, None)
    assert drawn.probs.shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(drawn.probs.sum(-1), torch.ones(2))
    assert unknown.tokens == ()
    ending = SamplingParams(end_tokens=(greedy.tokens[1],))
    assert proposer.propose([DraftTask(1, [1, 2], 1, 4, ending)])[0].tokens == greedy.tokens[:2]
    banned = SamplingParams(bad_words=((greedy.tokens[0],),))
    assert proposer.propose([DraftTask(1, [1, 2], 1, 1, banned)])[0].tokens != greedy.tokens[:1]
    proposer.release(1)
    proposer.release(1)
    assert proposer.num_available(1, [1, 2]) == 0


def test_a_tree_has_the_planned_shape() -> None:
    proposer = Recording(4)
    torch.manual_seed(0)
    proposer.observe(1, 0, torch.randn(1, 128))
    tree = Tree((ROOT, 0, ROOT, 2, 1), (0, 0, 1, 0, 3))
    (draft,) = proposer.propose([DraftTask(1, [1, 2], 1, 5, SamplingParams(), tree=tree)])
    (chain,) = proposer.propose([DraftTask(1, [1, 2], 1, 2, SamplingParams())])
    assert draft.parents == tree.parents
    assert draft.tokens[:2] == chain.tokens
    assert len({draft.tokens[0], draft.tokens[2]}) == 2, "children of the root differ"
    ending = SamplingParams(end_tokens=(draft.tokens[0],))
    (ended,) = proposer.propose([DraftTask(1, [1, 2], 1, 5, ending, tree=tree)])
    assert ended.parents == (ROOT, ROOT, 1), "nothing follows an end token"
    assert ended.tokens == (draft.tokens[0], draft.tokens[2], draft.tokens[3])
    few = SamplingParams(temperature=1.0, top_k=2)
    (kept,) = proposer.propose([DraftTask(1, [1, 2], 1, 5, few, tree=tree)])
    assert len(kept.tokens) == 4, "the fourth guess is not one of two tokens"


def engine_with(**engine: Any) -> ServerConfig:
    return ServerConfig.model_validate(
        {
            "engine": {"kind": "torch", "model": str(MODEL), "num_threads": 1, **engine},
            "limits": {"max_sequences": 2, "max_context_len": 128, "profile_s": 0.0},
        }
    )


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_engine_json_names_the_heads(runtime: str) -> None:
    config = engine_with(heads=str(TINY / "heads"), draft=str(TINY / "draft"), runtime=runtime)
    engine = build_engine(config, Path.cwd())
    assert list(engine.proposers) == ["draft_model", "heads", "prompt_lookup"]
    alone_s, together_s = engine.proposers[HEADS].capabilities.draft_s
    assert 0.0 < together_s <= 1.5 * alone_s
    server = Server(engine, config)
    server.start()
    try:
        asked = [
            GenerateParams(REQUESTS[0].text, 30, policy=policy, proposer=proposer)
            for policy, proposer in (("none", None), ("fixed:4", "heads"), ("goodput", None))
        ]
        sinks = generate(server, asked, 60.0)
    finally:
        server.stop()
    assert len({tuple(sink.tokens) for sink in sinks}) == 1
    assert sinks[1].progress.num_accepted > 0


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.heads: .*target has no Medusa heads"):
        build_engine(engine_with(heads=str(MODEL)), Path.cwd())
    config = engine_with().model_copy(update={"proposer": "heads"})
    with pytest.raises(ConfigError, match=r"got heads, must be auto or one .*: prompt_lookup"):
        build_engine(config, Path.cwd())


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3", "goodput", "goodput_global"])
def test_trees_beside_prompt_lookup(policy: str) -> None:
    """A repetitive prompt, where a lookup beats every guess of the heads."""
    config = engine_with(heads=str(TINY / "heads"), runtime="torch", dtype="float32")
    limits = config.limits.model_copy(update={"max_tree_width": 4})
    config = config.model_copy(update={"limits": limits})
    server = Server(replace(build_engine(config, Path.cwd()), cost=COST), config)
    server.start()
    texts = []
    try:
        for one in ("none", policy):
            params = GenerateParams("one two three " * 6, 40, policy=one)
            (sink,) = generate(server, [params], 120.0)
            assert sink.error is None
            texts.append(sink.tokens)
        assert not any(one.decision.reason is Reason.FAILED for one in server.loop.records)
    finally:
        server.stop()
    assert texts[0] == texts[1]
