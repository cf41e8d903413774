"""The tiny pair behind the server, with padded passes throughout, as a GPU would be served.

A dry run: the whole way from engine.json is that of a GPU, but for the captures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smartspec_bench import texts
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.local import build as build_local
from smartspec_py.engines.local import load
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner, Replay, Shape
from smartspec_testing.local import generate, serving

pytestmark = pytest.mark.usefixtures("without_triton")


PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
CONFIG = LocalEngineConfig(
    model=str(PAIR / "target"),
    draft=str(PAIR / "draft"),
    dtype="float32",
    device="cpu",
    num_threads=1,
    runtime="torch",
)
LIMITS = LimitsConfig(max_sequences=4, max_context_len=256, max_draft_len=4, prefill_chunk=48)


def asked(policy: str) -> list[GenerateParams]:
    """Two texts of each workload, one greedy and one sampled, more than are served at once."""
    prompts = [texts.prompt(workload, 40 + i) for workload in texts.TINY for i in range(2)]
    return [
        GenerateParams(text, 24, policy=policy, temperature=float(i % 2), seed=7 + i)
        for i, text in enumerate(prompts)
    ]


def served(engine: Engine, policy: str) -> list[list[int]]:
    with serving(engine, ServerConfig(engine=CONFIG, limits=LIMITS)) as server:
        sinks = generate(server, asked(policy), 120.0)
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    return [sink.tokens for sink in sinks]


def test_served_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Padded, and with drafts that the draft model reads on the device, they are those of plain
    passes without drafts."""
    expected = served(build_local.build_local(CONFIG, LIMITS, tmp_path), "none")
    monkeypatch.setattr(load, "uses_graphs", lambda config, device: True)
    monkeypatch.setattr(PyTorchRunner, "is_asynchronous", True)
    engine = build_local.build_local(CONFIG, LIMITS, tmp_path)
    target, draft = engine.target.runner, engine.proposers[DRAFT_MODEL].runner
    for runner in (target, draft):
        assert "in CUDA graphs" in runner.about, "captured at the start"
    num_replays = draft.num_replays
    assert served(engine, "fixed:3") == expected
    assert draft.num_replays > num_replays, "beyond those that were timed"


def test_a_model_that_cannot_be_captured_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later capture of each model fails. The model is not loaded again."""
    loaded = []
    load_runner = load.load_runner

    def counted(*args: Any) -> Any:
        loaded.append(args)
        return load_runner(*args)

    def fail(self: GraphRunner, shape: Shape) -> Replay:
        if shape.num_tokens == 1:
            raise RuntimeError("no capture")
        return captured(self, shape)

    captured = GraphRunner._captured
    monkeypatch.setattr(load, "load_runner", counted)
    monkeypatch.setattr(GraphRunner, "_captured", fail)
    monkeypatch.setattr(load, "uses_graphs", lambda config, device: True)
    engine = build_local.build_local(CONFIG, LIMITS, tmp_path)
    assert len(loaded) == 2
    assert "in CUDA graphs" not in engine.target.runner.about
    assert "cannot be captured as CUDA graphs (no capture)" in caplog.text
    assert all(served(engine, "fixed:3"))
