"""Building the PyTorch engine: what it must not leave behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from smartspec_py.serving import build_torch
from smartspec_py.serving.config import ConfigError, LimitsConfig, TorchEngineConfig

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
LIMITS = LimitsConfig(max_sequences=2, max_context_len=64, max_draft_len=2, prefill_chunk=16)


def config(draft: str = "draft") -> TorchEngineConfig:
    return TorchEngineConfig(
        model=str(PAIR / "target"), draft=str(PAIR / draft), device="cpu", num_threads=1
    )


def test_no_thread_that_ran_a_pass_outlives_the_building(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would keep a team of threads, which slows down that of the loop."""
    seen: list[threading.Thread] = []

    def cached_profile(*args: Any) -> Any:
        seen.append(threading.current_thread())
        return profiled(*args)

    profiled = build_torch.cached_profile
    monkeypatch.setattr(build_torch, "cached_profile", cached_profile)
    engine = build_torch.build_torch(config(), LIMITS, tmp_path)
    engine.target.close()
    assert len(seen) == 1
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()


def test_what_is_wrong_is_raised_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.draft"):
        build_torch.build_torch(config("nowhere"), LIMITS, tmp_path)
