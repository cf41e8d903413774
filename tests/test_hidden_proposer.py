"""The Protocol of proposers, proven on a third one: it drafts from the target's hidden states.

Three linear heads read the state from which the last token was drawn, and guess the three tokens
behind it, all at once and without a pass of any model. They are fitted here, by ridge regression on
what the target itself wrote. Neither the loop nor the target knows of them.
"""

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
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import NO_DRAFT, Draft, DraftTask, Proposer, ProposerCapabilities
from smartspec_py.engines.torch.runner import RunnerConfig, load_runner
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.serving.config import LimitsConfig, ServerConfig
from smartspec_py.serving.model_files import load_tokenizer, num_token_ids, stepwise_capabilities
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Engine, Server
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.local import LocalSink, generate

MODEL = Path(__file__).parents[1] / "engines_build" / "tiny" / "target"
TOKENIZER = load_tokenizer("engine.model", MODEL)
VOCAB_SIZE = num_token_ids(TOKENIZER)
LIMITS = LimitsConfig(max_sequences=4, max_context_len=256, max_draft_len=4, prefill_chunk=48)
NUM_HEADS = 3
RIDGE = 1.0

COST = CostModel(target=PassTable((1,), (1,), ((0.01,),)))
"""A pass of the target, whatever is in it: every draft is worth its while."""


class HeadsProposer:
    """heads: [NUM_HEADS, width, vocab]; None drafts nothing, and only listens.

    heard: what `observe` was told of each sequence, in order: (num_accepted, hidden).
    """

    def __init__(self, heads: torch.Tensor | None) -> None:
        self._heads = heads
        self._states: dict[int, torch.Tensor] = {}
        self.heard: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.is_closed = False

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(NUM_HEADS, has_passes=False, reads_hidden=True)

    def num_available(self, sequence: int, tokens: Sequence[int]) -> int:
        return NUM_HEADS if self._heads is not None and sequence in self._states else 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft(task) for task in tasks]

    def _draft(self, task: DraftTask) -> Draft:
        if self._heads is None or task.draft_len == 0:
            return NO_DRAFT
        scores = self._states[task.sequence] @ self._heads[: task.draft_len]
        return Draft(tuple(scores.argmax(-1).tolist()))

    def observe(self, sequence: int, num_accepted: int, hidden: Any = None) -> None:
        self._states[sequence] = hidden[-1]
        self.heard.setdefault(sequence, []).append((num_accepted, hidden))

    def draft_lag(self, sequence: int, context_len: int) -> int:
        return 0

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def close(self) -> None:
        assert not self._states, "sequences that nobody released"
        self.is_closed = True

    def hidden(self, sequence: int) -> torch.Tensor:
        """[generated tokens, width], in the order of the tokens."""
        return torch.cat([hidden for _, hidden in self.heard[sequence]])


def prompts(first: int, count: int) -> list[str]:
    """Documents of every workload, those from index `first` on."""
    return [document(w, 5, first + i).prompt for w in WORKLOADS for i in range(count)]


@contextmanager
def serving(proposer: Proposer, limits: LimitsConfig = LIMITS) -> Iterator[Server]:
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
    target = TorchTarget(runner, capabilities)
    server = Server(
        Engine(TOKENIZER, (), target, {"heads": proposer}, COST),
        ServerConfig(engine=FakeEngineConfig(kind="fake", tokenizer="none"), limits=limits),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def served(
    proposer: HeadsProposer, params: Sequence[GenerateParams], limits: LimitsConfig = LIMITS
) -> tuple[list[LocalSink], int]:
    """The answers, all without an error, and how many requests were preempted."""
    with serving(proposer, limits) as server:
        sinks = generate(server, params, 120.0)
        num_preemptions = server.loop.num_preemptions
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    assert proposer.is_closed
    return sinks, num_preemptions


@cache
def fitted_heads() -> torch.Tensor:
    """From the state that drew token t to tokens t + 1, t + 2 and t + 3, over 16 texts of 40.

    For each head the least squares of (state @ W - one_hot) with RIDGE * |W|^2, in closed form:
    W = (H^T H + RIDGE I)^-1 H^T Y.
    """
    listener = HeadsProposer(None)
    asked = [GenerateParams(prompt, 40, policy="none") for prompt in prompts(100, 4)]
    sinks, _ = served(listener, asked)
    heads = []
    for head in range(1, NUM_HEADS + 1):
        # Sequences are numbered from 1 in the order of submission.
        pairs = [(listener.hidden(i), sink.tokens) for i, sink in enumerate(sinks, start=1)]
        states = torch.cat([hidden[:-head] for hidden, _ in pairs]).double()
        following = torch.tensor([token for _, tokens in pairs for token in tokens[head:]])
        wanted = torch.nn.functional.one_hot(following, VOCAB_SIZE).double()
        gram = states.T @ states + RIDGE * torch.eye(states.shape[1], dtype=torch.float64)
        heads.append(torch.linalg.solve(gram, states.T @ wanted))
    return torch.stack(heads).float()


REQUESTS = [
    GenerateParams(prompt, 40, temperature=temperature, seed=9)
    for prompt in prompts(0, 2)
    for temperature in (0.0, 0.8)
]
"""Prompts that the heads were not fitted on."""


@cache
def answers(policy: str) -> tuple[HeadsProposer, list[LocalSink]]:
    """To REQUESTS, and what the proposer heard; for tests that only read it."""
    proposer = HeadsProposer(fitted_heads())
    sinks, _ = served(proposer, [replace(params, policy=policy) for params in REQUESTS])
    return proposer, sinks


@pytest.mark.parametrize("policy", ["fixed:3", "goodput"])
def test_text_is_that_without_speculation_and_some_drafts_are_kept(policy: str) -> None:
    """17 % of the drafts are accepted (203 of 1190): 16 texts of 40 tokens in 421 steps. At this
    cost every draft is worth its while, so `goodput` drafts as much."""
    (_, plain), (_, found) = answers("none"), answers(policy)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    num_drafted = sum(sink.progress.num_drafted for sink in found)
    num_accepted = sum(sink.progress.num_accepted for sink in found)
    assert sum(sink.progress.num_drafted for sink in plain) == 0
    assert num_drafted > 0
    assert num_accepted / num_drafted > 0.05, f"{num_accepted} of {num_drafted} accepted"


@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_hidden_states_are_those_of_the_model(policy: str) -> None:
    """Of every token that was written, also of the first; against Transformers alone, which reads
    the finished text at once: the state at position p drew the token at p + 1."""
    proposer, sinks = answers(policy)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for sequence, (params, sink) in enumerate(zip(REQUESTS, sinks, strict=True), start=1):
        prompt = TOKENIZER.encode(params.text).ids
        with torch.inference_mode():
            out = model(torch.tensor([prompt + sink.tokens]), output_hidden_states=True)
        expected = out.hidden_states[-1][0, len(prompt) - 1 : -1]
        torch.testing.assert_close(proposer.hidden(sequence), expected, atol=1e-3, rtol=1e-3)
        num_accepted, first = proposer.heard[sequence][0]
        assert (num_accepted, len(first)) == (0, 1), "the first token is told alone"
        told = [(accepted, len(hidden)) for accepted, hidden in proposer.heard[sequence]]
        assert all(num_tokens == accepted + 1 for accepted, num_tokens in told)
        assert len(told) == 1 + sink.progress.num_steps


def test_preempted_sequences_are_drafted_for_again() -> None:
    """A budget of 260 tokens for prompts of up to 60 and 40 more each, four at once."""
    limits = LIMITS.model_copy(update={"max_cache_tokens": 260})
    asked = [replace(params, policy="fixed:3") for params in REQUESTS]
    proposer = HeadsProposer(fitted_heads())
    small, num_preemptions = served(proposer, asked, limits)
    _, large = answers("fixed:3")
    assert num_preemptions > 0
    assert [sink.tokens for sink in small] == [sink.tokens for sink in large]
    for sequence, sink in enumerate(small, start=1):
        assert len(proposer.hidden(sequence)) == sink.num_tokens


def test_it_is_a_proposer_by_the_protocol_alone() -> None:
    """What it was not told of it has no guess for, and forgetting it is nothing special."""
    proposer: Proposer = HeadsProposer(fitted_heads())
    assert proposer.num_available(1, [1, 2]) == 0
    proposer.observe(1, 0, torch.zeros(1, 128))
    assert proposer.num_available(1, [1, 2]) == NUM_HEADS
    (draft,) = proposer.propose([DraftTask(1, [1, 2], 1, 2, SamplingParams())])
    assert (len(draft.tokens), draft.probs) == (2, None)
    proposer.release(1)
    proposer.release(1)
    assert proposer.num_available(1, [1, 2]) == 0
