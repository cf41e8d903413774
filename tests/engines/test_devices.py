"""Devices of the local engine, without a GPU."""

from __future__ import annotations

import pytest
import torch

from smartspec_py.engines.local.devices import place
from smartspec_py.faults import ConfigError


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cuda:0"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")],
)
def test_where_models_are(name: str, device: str) -> None:
    assert place(name) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cuda:99", "'cuda:99' does not exist, because PyTorch finds 2 CUDA devices"),
        ("tpu", "'tpu' is not supported: "),
    ],
)
def test_what_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.json: engine\.device: {sentence}"):
        place(name)
