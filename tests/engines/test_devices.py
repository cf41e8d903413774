"""Devices of the local engine, without a GPU: what is refused, and what passes between two.

`cpu` and `cpu:0` are two devices to PyTorch's handles, and one to its operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_models import make_proposer, make_target, poll

from smartspec_py.config import LimitsConfig, LocalEngineConfig
from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import Prefill, SequenceStart, Verify
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.local import build as build_local
from smartspec_py.engines.local.devices import Devices, place
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.faults import ConfigError
from smartspec_py.serving.intake import cache_budget

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"


def config(**engine: Any) -> LocalEngineConfig:
    return LocalEngineConfig(model=str(PAIR / "target"), **engine)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize(
    ("engine", "target", "draft"),
    [
        ({}, "cuda:0", "cuda:0"),
        ({"device": "cpu"}, "cpu", "cpu"),
        ({"device": "cuda:1"}, "cuda:1", "cuda:1"),
        ({"draft": "draft", "draft_device": "cuda:1"}, "cuda:0", "cuda:1"),
        ({"draft": "draft", "device": "cuda:1", "draft_device": "cuda:0"}, "cuda:1", "cuda:0"),
    ],
    ids=str,
)
def test_where_models_are(two_gpus: None, engine: dict[str, Any], target: str, draft: str) -> None:
    assert place(config(**engine)) == Devices(torch.device(target), torch.device(draft))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (
            {"draft_device": "cuda:1"},
            r"engine\.draft_device: got 'cuda:1', but there is no engine\.draft",
        ),
        (
            {"draft": "draft", "draft_device": "cuda:3"},
            r"engine\.draft_device: 'cuda:3' does not exist, because PyTorch finds 2",
        ),
        (
            {"draft": "draft", "draft_device": "cuda:1", "device": "cpu"},
            r"engine\.draft_device: got 'cuda:1', but engine\.device is cpu",
        ),
        ({"device": "cuda:99"}, r"engine\.device: 'cuda:99' does not exist, because"),
        ({"device": "tpu"}, r"engine\.device: 'tpu' is not supported: "),
    ],
    ids=str,
)
def test_what_is_refused(two_gpus: None, engine: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.json: {sentence}"):
        place(config(**engine))


class OnDraft(torch.Tensor):
    """A tensor on the draft's device: every operation with it fails, except the move to another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.to:
                return args[0].as_subclass(torch.Tensor)
            raise AssertionError(f"{func.__name__} mixes two devices")


def test_distributions_of_drafts_move_to_the_target() -> None:
    target, proposer = make_target("llama, grouped keys"), make_proposer("llama, grouped keys")
    sampling = SamplingParams(temperature=1.0, seed=5, verification=Verification.REJECTION)
    prompt = (3, 4, 5, 6)
    target.begin(SequenceStart(1, prompt, len(prompt), sampling))
    [event] = poll(target, Prefill(1, prompt, 0, is_last=True))
    [draft] = proposer.propose([DraftTask(SequenceStart(1, prompt + event.tokens, 4, sampling), 3)])
    probs = draft.probs.as_subclass(OnDraft)
    with pytest.raises(AssertionError, match="mixes two devices"):
        probs + 1
    [verified] = poll(target, Verify(1, Draft(draft.tokens, probs=probs)))
    assert verified.num_drafted == 3
    assert 1 <= len(verified.tokens) <= 4


def test_each_model_is_loaded_to_its_own_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = Devices(torch.device("cpu"), torch.device("cpu", 0))
    monkeypatch.setattr(build_local, "place", lambda config: places)
    limits = LimitsConfig(max_sequences=1, max_draft_len=1, max_context_len=64, prefill_chunk=8)
    pair = config(draft=str(PAIR / "draft"), num_threads=1, runtime="torch")
    engine = build_local.build_local(pair, limits, tmp_path)
    target, proposer = engine.target, engine.proposers["draft_model"]
    assert target.runner.config.device == places.target  # type: ignore[attr-defined]
    assert proposer.runner.config.device == places.draft  # type: ignore[attr-defined]
    # The budget of 64 tokens is the target's alone: 3 layers, keys and values, 8 heads of 16.
    budget = cache_budget(engine, limits)
    assert (budget.capacity, budget.largest_draft_bytes) == (64 * 3 * 2 * 8 * 16 * 4, 0)
    target.close()
