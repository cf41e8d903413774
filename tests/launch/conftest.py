"""The stand-in of the hub, with the pair that the tests share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_models import TINY, files_of
from hub_stand_in import HubStandIn

from smartspec_launch import hub_check

NOT_SERVED = {
    "README.md": b"# Target",
    "modeling_target.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"of another runtime",
}


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The client reads its environment when it is imported, so its constants are loaded again."""
    from huggingface_hub import constants

    hub = HubStandIn()
    hub.add("acme/target", files_of(TINY / "target") | NOT_SERVED)
    hub.add("acme/draft", files_of(TINY / "draft"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub.served() as url, monkeypatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(tmp_path / "hf"))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        importlib.reload(constants)
        yield hub
    importlib.reload(constants)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in this process: another one imports PyTorch again."""

    monkeypatch.setattr(hub_check, "in_process", hub_check.check_settings)
