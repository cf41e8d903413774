"""Trees of heads with a branch of prompt lookup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smartspec_bench.workloads import WORKLOADS
from smartspec_bench.workloads import generate as document
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import ROOT
from smartspec_py.engines.base import Draft
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import ServerConfig
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_py.serving.trees import Trees
from smartspec_testing.local import LocalSink, generate

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
REQUESTS = [
    GenerateParams(document(workload, 1_000_005, index).prompt, 40, seed=9, **sampling)
    for workload in WORKLOADS
    for index, sampling in enumerate(
        ({}, {"temperature": 0.8}, {"repetition_penalty": 1.2, "bad_words": (" the",)})
    )
]

COST = CostModel(target=PassTable((1,), (1,), ((0.01,),)))
"""Any number of tokens costs the same, so more drafts are always better."""


@pytest.mark.parametrize(
    ("draft", "chain", "tokens", "parents"),
    [
        (Draft((1, 2)), (1, 3), (1, 2, 3), (ROOT, 0, 0)),
        (Draft((1, 2)), (1, 2, 3), (1, 2, 3), ()),
        (Draft((1, 2)), (1,), (1, 2), ()),
        (Draft((1, 2)), (4, 5), (1, 2, 4, 5), (ROOT, 0, ROOT, 2)),
        (Draft((1, 2, 3), None, (ROOT, ROOT, 1)), (2, 3, 3), (1, 2, 3, 3), (ROOT, ROOT, 1, 2)),
    ],
)
def test_a_branch_repeats_no_draft(
    draft: Draft, chain: tuple[int, ...], tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    assert draft.with_branch(chain) == Draft(tokens, None, parents)


def served(policy: str) -> list[LocalSink]:
    engine = {"kind": "torch", "model": str(TINY / "target"), "heads": str(TINY / "heads")}
    config = ServerConfig.model_validate(
        {
            "engine": {**engine, "num_threads": 1, "dtype": "float32", "runtime": "torch"},
            "limits": {
                "max_sequences": 4,
                "max_context_len": 256,
                "max_draft_len": 16,
                "max_tree_width": 4,
                "profile_s": 0.0,
            },
        }
    )
    server = Server(replace(build_engine(config, Path.cwd()), cost=COST), config)
    server.start()
    try:
        return generate(server, [replace(one, policy=policy) for one in REQUESTS], 120.0)
    finally:
        server.loop.check_integrity()
        server.stop()


def test_the_text_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int, int]] = []
    joined = Trees.joined

    def counted(self: Trees, sequence: int, draft: Draft, branch: Draft) -> Any:
        found = joined(self, sequence, draft, branch)
        shapes.append((len(draft.tokens), len(branch.tokens), len(found.tokens)))
        return found

    monkeypatch.setattr(Trees, "joined", counted)
    plain, found = served("none"), served("goodput")
    assert [sink.error for sink in found] == [None] * len(REQUESTS)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    assert any(both == own + more for own, more, both in shapes), "a branch of its own"
    assert any(both < own + more for own, more, both in shapes), "shared drafts"
    assert all(max(own, more) <= both for own, more, both in shapes)
