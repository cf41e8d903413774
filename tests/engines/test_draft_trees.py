"""Trees of a draft model: each node is the guess of its rank after the path to its parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_torch_engine import prompts
from torch_models import CONFIGS, MAX_DRAFT_LEN, MAX_SEQUENCES, OPENVINO, VOCAB_SIZE, make_proposer

from smartspec_bench import exactness
from smartspec_bench.workloads import WORKLOADS
from smartspec_bench.workloads import generate as document
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import ROOT, SamplingParams, Tree
from smartspec_py.engines.base import DraftTask
from smartspec_py.engines.torch.cached_model import history_of
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.sampling import DraftRequest, guess_tokens
from smartspec_py.engines.torch.tree import path_to
from smartspec_py.proposers.draft_model import DraftModelProposer
from smartspec_py.proposers.draft_trees import DraftedTree
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import DRAFT_MODEL, ServerConfig
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, generate

TREE = Tree((ROOT, 0, ROOT, 1, 0, 2, 3, 2), (0, 0, 1, 1, 2, 0, 0, 1))
"""Its nodes are not in the order of their depths."""

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, bad_words=((4,), (7, 9))),
]


def proposer_of(kind: str) -> DraftModelProposer:
    runner = make_proposer(kind).runner
    return DraftModelProposer(runner, MAX_SEQUENCES, MAX_DRAFT_LEN, tree_width=4)


def guesses_after(kind: str, task: DraftTask, drafts: Sequence[int]) -> list[int]:
    """The best guesses after these drafts, by one pass over the whole text."""
    text = [*task.tokens, *drafts]
    logits = make_proposer(kind).runner.forward([RowInput(0, 0, text, 1)]).logits
    history = history_of(task.sampling, task.num_prompt)
    if history is not None:
        history.extend(task.tokens)
    request = DraftRequest(task.sampling, len(text), history, tuple(drafts))
    return guess_tokens(logits, [request], 4)[0][0]


@pytest.mark.parametrize("kind", [*CONFIGS, OPENVINO + "llama, grouped keys"])
def test_nodes_are_the_guesses_after_their_paths(kind: str) -> None:
    """Three trees and a chain in one step, then chains of all after some nodes were accepted."""
    proposer, chains = proposer_of(kind), make_proposer(kind)
    texts = prompts(4, seed=5)
    samplings = [*SAMPLINGS, SAMPLINGS[0]]
    tasks = [
        DraftTask(number, text, len(text), 8, sampling, tree=TREE)
        for number, (text, sampling) in enumerate(zip(texts, samplings, strict=True))
    ]
    tasks[3] = tasks[3]._replace(tree=None, draft_len=4)
    drafts = proposer.propose(tasks)
    for task, draft in zip(tasks[:3], drafts, strict=False):
        assert draft.parents == TREE.parents
        for node, (parent, rank) in enumerate(zip(*TREE, strict=True)):
            before = [draft.tokens[one] for one in path_to(parent, TREE.parents)]
            assert draft.tokens[node] == guesses_after(kind, task, before)[rank]
    assert drafts[3] == chains.propose([tasks[3]])[0]
    chains.release(3)
    for number, draft in enumerate(drafts):
        proposer.observe(number, 2)
        texts[number] += [draft.tokens[0], draft.tokens[1], 5]
    pairs = zip(tasks, texts, strict=True)
    later = [task._replace(tokens=text, tree=None, draft_len=3) for task, text in pairs]
    assert proposer.propose(later) == chains.propose(later)


def test_nothing_follows_an_end_token() -> None:
    (text,) = prompts(1, seed=6)
    task = DraftTask(1, text, len(text), 8, SAMPLINGS[0], tree=TREE)
    (whole,) = proposer_of("llama").propose([task])
    ending = SamplingParams(end_tokens=(whole.tokens[0],))
    (ended,) = proposer_of("llama").propose([task._replace(sampling=ending)])
    assert ended.tokens == tuple(whole.tokens[node] for node in (0, 2, 5, 7))
    assert ended.parents == (ROOT, ROOT, 1, 1)


def test_what_the_text_tells_about_the_guesses() -> None:
    """Node 1 follows node 0, and node 2 is the second guess after the root."""
    tree = Tree((ROOT, 0, ROOT), (0, 0, 1))
    drafted = DraftedTree(9, tree, {ROOT: [5, 6], 0: [7, 8]}, {0: 5, 1: 7, 2: 6})
    assert drafted.best_chain() == [5, 7]
    assert list(drafted.ranks([5, 8, 3])) == [0, 1]
    assert list(drafted.ranks([6, 7])) == [1], "no guess was made after node 2"
    assert list(drafted.ranks([3, 5])) == [None]


def test_hindsight_is_about_the_best_guesses() -> None:
    proposer = proposer_of("llama")
    (text,) = prompts(1, seed=6)
    task = DraftTask(1, list(text), len(text), 8, SAMPLINGS[0], tree=TREE)
    (draft,) = proposer.propose([task])
    best, second = draft.tokens[0], draft.tokens[2]
    prior = proposer.rank_probs()
    assert proposer.hindsight(1, text, [best, VOCAB_SIZE]) == (2, 1)
    assert proposer.hindsight(1, text, [second]) == (1, 0)
    assert proposer.hindsight(1, [*text, 1], [best]) == (0, 0), "it did not draft there"
    proposer.observe(1, 1)
    proposer.propose([task._replace(tokens=[*text, second, 5], tree=None)])
    assert proposer.rank_probs()[0, 1] > prior[0, 1]


COST = CostModel(
    target=PassTable((1,), (1, 2), ((1.0, 1.001),)), draft=PassTable((1,), (1,), ((0.03,),))
)
COUNTS = ("num_steps", "num_drafted", "num_accepted")


@pytest.fixture(scope="module")
def served() -> dict[str, list[LocalSink]]:
    """Answers of the shipped pair by policy. Verifying a draft costs next to nothing."""
    tiny = Path(__file__).parents[2] / "engines_build" / "tiny"
    config = ServerConfig.model_validate(
        {
            "engine": {
                "kind": "torch",
                "model": str(tiny / "target"),
                "draft": str(tiny / "draft"),
                "runtime": "torch",
                "dtype": "float32",
                "num_threads": 1,
            },
            "limits": {
                "max_sequences": 1,
                "max_context_len": 256,
                "max_draft_len": 16,
                "max_tree_width": 4,
                "profile_s": 0.0,
            },
        }
    )
    server = Server(build_engine(config, Path.cwd()), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "CHEAP_DRAFTS", COST)
        exactness.force_drafting(server, config)
    fields = ({}, {"temperature": 0.8}, {"repetition_penalty": 1.2, "bad_words": (" the",)})
    server.start()
    try:
        return {
            policy: generate(
                server,
                [
                    GenerateParams(
                        document(workload, 1_000_005, index).prompt,
                        30,
                        policy=policy,
                        proposer=DRAFT_MODEL,
                        seed=9,
                        **own,
                    )
                    for workload in WORKLOADS
                    for index, own in enumerate(fields)
                ],
                120.0,
            )
            for policy in ("none", "fixed:4", "goodput")
        }
    finally:
        server.stop()


def test_texts_with_trees_are_those_without(served: dict[str, list[LocalSink]]) -> None:
    texts = {name: [sink.tokens for sink in sinks] for name, sinks in served.items()}
    assert texts["goodput"] == texts["fixed:4"] == texts["none"]
    chains, trees = (
        [sum(getattr(sink.progress, name) for sink in served[policy]) for name in COUNTS]
        for policy in ("fixed:4", "goodput")
    )
    assert trees[2] / trees[0] > 1.03 * chains[2] / chains[0], (chains, trees)
