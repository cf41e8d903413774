"""Building the local engine: what it must not leave behind."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.config import LimitsConfig, LocalEngineConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines import phases
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.local import build as build_local
from smartspec_py.engines.local import load
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.runtimes.openvino import model_types, precision
from smartspec_py.engines.runtimes.runner import RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving import build

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
LIMITS = LimitsConfig(max_sequences=2, max_context_len=64, max_draft_len=2, prefill_chunk=16)


def config(draft: str | None = "draft", **changes: Any) -> LocalEngineConfig:
    return LocalEngineConfig(
        **{
            "model": str(PAIR / "target"),
            "draft": str(PAIR / draft) if draft else None,
            "device": "cpu",
            "num_threads": 1,
            **changes,
        }
    )


def test_a_pair_that_openvino_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread that ran a pass outlives the building: it would keep a team of threads, which slows
    down that of the loop. PyTorch has one thread left.

    Weights of large models are rounded. Of the models, which are loaded beside each other, only the
    target reports that its weights are read, and its cache comes first.
    """
    monkeypatch.setattr(model_types, "LARGE", 1)
    memory = Memory(1 << 20)
    monkeypatch.setattr(build_local, "Memory", lambda num_bytes: memory)
    seen: list[threading.Thread] = []

    def cached_profile(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread())
        return profiled(*args, **options)

    profiled = build_local.cached_profile
    monkeypatch.setattr(build_local, "cached_profile", cached_profile)
    with caplog.at_level(logging.INFO, phases.__name__):
        engine = build_local.build_local(config(num_threads=2), LIMITS, tmp_path)
    engine.target.close()
    (thread,) = seen
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert str(engine.facts["runtime"]).startswith("OpenVINO, int8 weights")
    assert engine.kernels.count("int8 weights") == 2
    assert caplog.messages.count(phases.READING) == 1
    (first, _), target = memory.pools, engine.target
    assert isinstance(target, LocalTarget)
    assert first is target.pool
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("weights", "of_draft"), [("auto", "int4"), ("int8", "int8")])
def test_a_draft_model_in_4_bits(
    weights: str, of_draft: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only if the type of the weights was left open."""
    monkeypatch.setattr(model_types, "LARGE", 1)
    monkeypatch.setattr(precision, "DRAFT_PARAMETERS", 1)
    monkeypatch.setattr(precision, "has_vnni", lambda: True)
    monkeypatch.setattr(precision, "KEPT_GROUPS", precision.GROUPS)
    engine = build_local.build_local(config(weights=weights), LIMITS, tmp_path)
    engine.target.close()
    target, draft = engine.kernels.split("; ")
    assert target.endswith("int8 weights")
    assert draft.endswith(f"{of_draft} weights")


def test_a_cache_of_8_bits_has_a_profile_of_its_own(tmp_path: Path) -> None:
    engines = []
    for kv_cache in ("auto", "u8"):
        given = config(dtype="float32", kv_cache=kv_cache, profile_cache=str(tmp_path))
        engines.append(build_local.build_local(given, LIMITS, tmp_path))
        engines[-1].target.close()
    exact, rounded = engines
    assert exact.profile_path != rounded.profile_path
    assert str(rounded.facts["runtime"]).endswith(", 8-bit KV cache")
    # Heads of 16 numbers, in float32 or with 8 bytes for the scale and the zero.
    ratio = rounded.target.capabilities.bytes_per_token / exact.target.capabilities.bytes_per_token
    assert ratio == (16 + 8) / (16 * 4)
    drafts = [one.proposers[DRAFT_MODEL].capabilities.bytes_per_token for one in engines]
    assert drafts[1] / drafts[0] == ratio


def test_what_is_wrong_is_raised_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.draft"):
        build_local.build_local(config("nowhere"), LIMITS, tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.weights: int8 needs OpenVINO"):
        build_local.build_local(config(weights="int8", runtime="torch"), LIMITS, tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache: u8 needs OpenVINO .*: use auto"):
        build_local.build_local(config(kv_cache="u8", runtime="torch"), LIMITS, tmp_path)
    limits = LIMITS.model_copy(update={"max_context_len": 10**6})
    with pytest.raises(ConfigError, match=r"fewer than the max_context_len of 1000000: lower it"):
        build_local.build_local(config(), limits, tmp_path)


def test_libraries_are_imported_without_looking_for_garbage() -> None:
    """And looked for again behind it, though not among what they made."""
    gc.unfreeze()
    with build.uncollected_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


@pytest.mark.parametrize(
    ("role", "dtype", "value"),
    [
        ("draft", "bfloat16", math.nan),
        ("model", "float16", 1e30),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, role: str, dtype: str, value: float
) -> None:
    """One of all is enough; and so is one that the precision of serving makes infinite. The largest
    values that are finite in it are served."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = shutil.copytree(PAIR / role.replace("model", "target"), tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].float()
    given = config(**{role: str(folder)}, dtype=dtype)

    def build(changed: float) -> None:
        weights[name][3, 4:6] = changed
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        build_local.build_local(given, LIMITS, tmp_path).target.close()

    build(torch.finfo(getattr(torch, dtype)).max)
    sentence = rf"engine\.{role}: {folder}: the weights {name} are not all finite in {dtype}: repl"
    with pytest.raises(ConfigError, match=sentence):
        build(value)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_files_that_cannot_be_loaded_are_one_sentence(tmp_path: Path, is_damaged: bool) -> None:
    """A tensor that no file has, and a file that is none."""
    folder = shutil.copytree(PAIR / "target", tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    sentence = rf"{folder}: the weight files lack 1 tensors, such as {name}"
    if is_damaged:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"no weights")
        sentence = r"engine\.model: .*changed cannot be loaded \("
    else:
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=sentence) as caught:
        build_local.build_local(config(model=str(folder)), LIMITS, tmp_path)
    assert "\n" not in str(caught.value)


def test_experts_are_computed_in_float32(tmp_path: Path) -> None:
    """Whatever the processor has: products with experts in half precision may have other bits."""
    of_target = AutoConfig.from_pretrained(PAIR / "target")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    of_experts = AutoConfig.for_model(
        "qwen3_moe", vocab_size=of_target.vocab_size, hidden_size=32, head_dim=8,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **sizes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(of_experts).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / "target" / file, tmp_path)
    given = config(model=str(tmp_path), draft=None, dtype="bfloat16", weights="int8")
    engine = build_local.build_local(given, LIMITS, tmp_path)
    assert engine.facts["dtype"] == "float32"
    assert engine.kernels.endswith("int8 weights")
    engine.target.close()


def own(**changes: Any) -> RunnerConfig:
    config = RunnerConfig(PAIR / "target", torch.device("cpu"), torch.float32, 1, 64, 2048)
    return replace(config, **changes)


def test_openvino_computes_where_it_can() -> None:
    assert load._openvino_runner(own(), "auto") is not None
    assert load._openvino_runner(own(), "openvino") is not None
    assert load._openvino_runner(own(), "torch") is None


@pytest.mark.parametrize(
    ("changes", "absent", "reason"),
    [
        ({"device": torch.device("cuda")}, None, "the device is cuda"),
        ({}, "can_write_out", "models of type llama with this config are not supported"),
        ({}, "find_spec", r"it is not installed: pip install smartspec-py\[openvino\]"),
    ],
)
def test_openvino_is_refused_where_it_cannot_compute(
    changes: dict[str, Any], absent: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent:
        monkeypatch.setattr(load, absent, lambda _: None)
    with pytest.raises(ConfigError, match=f"engine.runtime: openvino cannot be used: {reason}"):
        load._openvino_runner(own(**changes), "openvino")
    assert load._openvino_runner(own(**changes), "auto") is None


def test_a_model_that_openvino_fails_to_compile_is_served_by_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: RunnerConfig) -> None:
        raise RuntimeError("no kernel for this processor\nat core.cpp:117")

    monkeypatch.setattr("smartspec_py.engines.runtimes.openvino.load.load_openvino_runner", fail)
    limits = LimitsConfig(max_sequences=2, cache_bytes=4 << 20)
    engine = build_local.build_local(config(), limits, tmp_path)
    engine.target.close()
    assert engine.kernels.count("PyTorch") == 2
    assert "OpenVINO cannot compute target (no kernel for this processor): PyTorch" in caplog.text
    of_pytorch = build_local.build_local(config(runtime="torch"), limits, tmp_path)
    of_pytorch.target.close()
    # As without OpenVINO, whose cache could hold one text of twice the length.
    assert engine.target.capabilities == of_pytorch.target.capabilities
    with pytest.raises(ConfigError, match=r"engine\.runtime: openvino cannot be used: no kernel"):
        build_local.build_local(config(runtime="openvino"), LIMITS, tmp_path)
