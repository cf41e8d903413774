"""Mixtures of experts that OpenVINO computes, from the files of checkpoints. Whether they give what
Transformers gives is in test_model_types, and whether bits depend on the pass in test_same_bits."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import few_fields, write_gguf
from local_models import VOCAB_SIZE
from quantised_files import gptq_settings, gptq_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.experts import EXPERT_BIAS
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

pytestmark = pytest.mark.slow  # so that they run beside the others

CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 2, 64, VOCAB_SIZE)
PROMPT = [5, 6, 7, 8]
NUM_EXPERTS, NUM_LAYERS = 6, 2
KINDS = ("lfm2_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "head_dim": 32,
    "pad_token_id": 0,
}


def make_model(kind: str = "qwen3_moe") -> Any:
    torch.manual_seed(0)
    own: dict[str, Any] = {}
    if kind == "lfm2_moe":
        own = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | own)).eval()
    for name, bias in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            torch.nn.init.uniform_(bias, -0.5, 0.5)
    return model


def logits_of(runner: OpenVinoRunner) -> torch.Tensor:
    return runner.forward([RowInput(0, 0, PROMPT, 4, 4)]).logits


def error_of(runner: OpenVinoRunner, model: Any) -> float:
    """Of the logits, relative to those of the model in float32."""
    wanted = logits_of(OpenVinoRunner(model, CONFIG))
    return float((logits_of(runner) - wanted).std() / wanted.std())


def types_of_experts(runner: OpenVinoRunner) -> list[str]:
    """Of their weights."""
    nodes = runner.compiled.get_runtime_model().get_ordered_ops()
    products = [n for n in nodes if "GatherMatmul" in str(n.get_rt_info()["layerType"].value)]
    return [n.input(1).get_element_type().to_string() for n in products]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """Transformers writes a tensor for each matrix of each expert, as published files have it."""
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert sum(".experts.5." in name for name in names) == 3 * NUM_LAYERS
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert torch.equal(logits_of(runner), logits_of(OpenVinoRunner(model, CONFIG)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_one_tensor_for_all_experts(tmp_path: Path, kind: str) -> None:
    """As Transformers has them itself."""
    model = make_model(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    mlp = "feed_forward" if kind == "lfm2_moe" else "mlp"
    assert f"model.layers.0.{mlp}.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert torch.equal(logits_of(runner), logits_of(OpenVinoRunner(model, CONFIG)))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_experts_per_tok", 0, "a whole number in 1..6"),
        ("num_experts_per_tok", 7, "a whole number in 1..6"),
        ("num_local_experts", -1, "a whole number in 0..100000000"),
        ("moe_intermediate_size", 0, "a whole number in 1..100000000"),
    ],
)
def test_impossible_numbers(field: str, value: Any, rule: str) -> None:
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    setattr(config, field, value)
    text = f"m has the {field} {value} in its config.json, which must be {rule}: replace it"
    with pytest.raises(ModelError, match=text):
        check_sizes("m", config)


def test_8_bits(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path, weights="int8"))
    assert types_of_experts(runner) == ["i8"] * 2 * NUM_LAYERS
    assert error_of(runner, model) < 0.05


def quantise(folder: Path, model: Any, settings: dict[str, Any]) -> None:
    """Write the model with the matrices of attention and experts in 4 bits."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    names = [name for name in stored if name.endswith("_proj.weight")]
    save_file(gptq_tensors(stored, settings["group_size"], names), folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    text = json.dumps(document | {"quantization_config": settings})
    (folder / "config.json").write_text(text)


def check_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts are the file's own, now and from the file of converted weights."""
    exact = logits_of(load_openvino_runner(replace(CONFIG, path=folder)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    config = replace(
        CONFIG, path=folder, weights="int8", keeps_experts=True, weights_cache_bytes=1 << 30
    )
    errors = []
    for _ in range(2):
        runner = load_openvino_runner(config)
        assert "int8 weights, experts as in the file" in runner.about
        assert types_of_experts(runner) == ["u4"] * 2 * NUM_LAYERS
        errors.append(float((logits_of(runner) - exact).std() / exact.std()))
        index = next((folder / "cache").glob("**/weights/*.json"), None)
        for _ in range(100):  # a thread writes it
            index = index or next((folder / "cache").glob("**/weights/*.json"), None)
            time.sleep(0 if index else 0.05)
        assert index is not None
        assert index.read_text().count("as in the file") == 2 * NUM_LAYERS
    assert errors[0] == errors[1] < 0.05  # the others have 8 bits

    rounded = load_openvino_runner(replace(config, keeps_experts=False))
    assert types_of_experts(rounded) == ["i8"] * 2 * NUM_LAYERS
    assert "experts" not in rounded.about


@pytest.mark.parametrize("group", [32, 64])
def test_4_bits_of_a_quantised_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    quantise(tmp_path, make_model(), gptq_settings(group))
    check_kept(tmp_path, monkeypatch)


def test_4_bits_in_another_order_are_rounded(tmp_path: Path) -> None:
    """Matrices of one group have no order."""
    quantise(tmp_path, make_model(), gptq_settings(64, desc_act=True))
    tensors = load_file(tmp_path / "model.safetensors")
    ordered = {k: v.flip(0) if k.endswith("g_idx") else v for k, v in tensors.items()}
    save_file(ordered, tmp_path / "model.safetensors")
    config = replace(CONFIG, path=tmp_path, weights="int8", keeps_experts=True)
    assert types_of_experts(load_openvino_runner(config)) == ["i8", "u4"] * NUM_LAYERS


def test_8_bits_of_a_quantised_checkpoint_are_rounded(tmp_path: Path) -> None:
    """As compressed-tensors writes them, with zero points and scales in half precision."""
    model = make_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        least, most = tensors[name].aminmax(dim=1, keepdim=True)
        scales = ((most - least) / 254).to(torch.bfloat16)
        zeros = (-127 - least / scales).round().to(torch.int8)
        tensors[name] = (tensors[name] / scales + zeros).round().clamp(-128, 127).to(torch.int8)
        tensors |= {f"{name}_scale": scales, f"{name}_zero_point": zeros}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    settings |= {"config_groups": {"all": {"weights": weights}}}
    document = json.loads((tmp_path / "config.json").read_text())
    text = json.dumps(document | {"quantization_config": settings})
    (tmp_path / "config.json").write_text(text)
    config = replace(CONFIG, path=tmp_path, weights="int8", keeps_experts=True)
    runner = load_openvino_runner(config)
    assert runner.about.endswith("int8 weights")
    assert error_of(runner, model) < 0.05


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_4_bits_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fields = {"count": NUM_EXPERTS, "used_count": 2, "feed_forward_length": 64}
    changed = {f"qwen3moe.expert_{name}": value for name, value in fields.items()}
    path = tmp_path / "m.gguf"
    write_gguf(path, make_model(), few_fields(VOCAB_SIZE), kind, **changed)
    check_kept(model_folder(path), monkeypatch)


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"lack 1 tensors, such as {name}"):
        load_openvino_runner(replace(CONFIG, path=tmp_path))


def test_timed_passes_have_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones would have the same experts, and would take less time than those of texts."""
    runner, seen = OpenVinoRunner(make_model(), CONFIG), list[list[int]]()
    forward = runner.forward

    def recorded(inputs: Sequence[RowInput]) -> Any:
        seen.extend([list(row.tokens) for row in inputs])
        return forward(inputs)

    monkeypatch.setattr(runner, "forward", recorded)
    runner.time_pass(2, 5, 8)
    tokens = [token for row in seen for token in row]
    assert len(set(tokens)) == len(tokens) == 10
    assert max(tokens) < VOCAB_SIZE
