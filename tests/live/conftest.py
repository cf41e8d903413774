"""Real Triton servers on loopback, one of each kind for all tests that can share it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from servers import TINY, fake_config, serving

from smartspec_launch.address import free_address
from smartspec_launch.gateway import OpenAi, adapter_names
from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import (
    LimitsConfig,
    LocalEngineConfig,
    ServerConfig,
)


def write_adapter(folder: Path, rank: int) -> None:
    """A random one of all layers of the shipped target. Written without PyTorch, whose import
    takes longer than these tests."""
    rng, tensors = np.random.default_rng(0), {}
    for name, weight in load_file(TINY / "target" / "model.safetensors").items():
        if "_proj" in name:
            (num_out, num_in), layer = weight.shape, name.removesuffix(".weight")
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                values = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The shipped pair in float32, where texts are promised to be the same; and its aliases."""
    engine = LocalEngineConfig(
        model=str(TINY / "target"), draft=str(TINY / "draft"), dtype="float32", num_threads=1
    )
    limits = LimitsConfig(max_sequences=4, max_draft_len=4, max_context_len=512, profile_s=0.0)
    config = ServerConfig(engine=engine, limits=limits, explain=True)
    openai = OpenAi(free_address().http_port, TINY / "target")
    folder = tmp_path_factory.mktemp("local")
    with serving(config, folder, aliases=ALIASES, openai=openai) as server:
        yield server


@pytest.fixture(scope="session")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The shipped target with an adapter that changes its texts."""
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(path, rank=8)
    engine = LocalEngineConfig(
        model=str(TINY / "target"), lora={"sql": str(path)}, dtype="float32", num_threads=1
    )
    limits = LimitsConfig(max_sequences=2, max_context_len=256, profile_s=0.0)
    config = ServerConfig(engine=engine, limits=limits)
    openai = OpenAi(free_address().http_port, TINY / "target", adapters=adapter_names(config))
    with serving(config, tmp_path_factory.mktemp("lora"), openai=openai) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One row, one place in the queue, 10 ms a step: whoever comes third is refused."""
    limits = LimitsConfig(max_sequences=1, max_queue=1, max_context_len=4096)
    config = fake_config(step_s=0.01, limits=limits)
    with serving(config, tmp_path_factory.mktemp("narrow")) as server:
        yield server
