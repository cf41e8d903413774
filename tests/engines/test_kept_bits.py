"""Matrices that a checkpoint has in 4 bits, and that OpenVINO computes from the same integers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import pytest
import torch
from adapter_files import merged, random_adapters, shapes_of
from local_models import VOCAB_SIZE
from quantised_files import gptq_settings, gptq_tensors
from safetensors.torch import save_file
from test_quantized import AWQ, WRITERS, as_tensors, of_compressed, of_gptq
from test_same_bits import CONFIGS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.checkpoints.quantized import QuantizedTensors
from smartspec_py.engines.checkpoints.rows import TensorRows
from smartspec_py.engines.runtimes import machine
from smartspec_py.engines.runtimes.machine import has_vnni, keeps_4_bits, keeps_experts
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights, to_int8
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

CONFIG = RunnerConfig(
    Path(), torch.device("cpu"), torch.float32, 2, 64, VOCAB_SIZE, weights="int8", keeps_4_bits=True
)
PROMPT = [5, 6, 7, 8]
FORMS = {
    "gptq": of_gptq(4, 64, sym=True, desc_act=False),
    "gptq, asymmetric, groups of 128": of_gptq(4, 128, sym=False, desc_act=False),
    "gptq, version 2": of_gptq(4, 64, sym=False, desc_act=False, checkpoint_format="gptq_v2"),
    "awq": AWQ | {"group_size": 64},
    "packed": of_compressed("pack-quantized", 4, 128, symmetric=True),
    "packed, asymmetric": of_compressed("pack-quantized", 4, 64, symmetric=False),
    "packed, asymmetric, old": of_compressed("pack-quantized", 4, 64, symmetric=False, is_old=True),
}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()


def values_of(matrix: Any) -> Any:
    """What OpenVINO computes for this part of a graph."""
    compiled = ov.Core().compile_model(ov.Model([op.result(matrix)], []), "CPU")
    return compiled.create_infer_request().infer()[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_has_the_numbers_of_the_file(model: Any, form: str) -> None:
    """weight = (integer - zero) * scale, in every bit of float32; here of three joined matrices."""
    settings = FORMS[form]
    stored, expected, names = {}, [], []
    for part, num_out in (("q", 192), ("k", 64), ("v", 64)):
        names.append(f"model.layers.0.self_attn.{part}_proj")
        parts, weight = WRITERS[settings["quant_method"]]((num_out, 384), settings)
        stored |= as_tensors(names[-1], parts)
        expected.append(weight)
    products = Products(
        model,
        Weights(QuantizedTensors(stored, settings)),
        num_bits=8,
        group=64,
        block=0,
        is_half=False,
        keeps_4_bits=True,
    )
    [[matrix]] = products._matrices([f"{name}.weight" for name in names], None)
    np.testing.assert_array_equal(values_of(matrix), np.concatenate(expected))
    tensors = [tensor for tensor in products.memory if isinstance(tensor, ov.Tensor)]
    types = [tensor.element_type for tensor in tensors]
    assert types == [ov.Type.u4, ov.Type.f32, ov.Type.u8]  # integers, scales and zeros


def write(folder: Path, model: Any, settings: dict[str, Any], ends: tuple[str, ...]) -> Any:
    """Write the model with these matrices in 4 bits; returns the model of what was written."""
    model.save_pretrained(folder)
    names = [name for name, _ in model.named_parameters() if name.endswith(ends)]
    written = gptq_tensors(model.state_dict(), settings["group_size"], names)
    if settings["desc_act"]:
        for name in names:
            order = written[f"{name.removesuffix('.weight')}.g_idx"]
            order.copy_(order.flip(0))
    save_file({k: v.contiguous() for k, v in written.items()}, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    text = json.dumps(document | {"quantization_config": settings})
    (folder / "config.json").write_text(text)
    model.load_state_dict(dict(QuantizedTensors(written, settings)))
    return model


def types_of_products(runner: OpenVinoRunner) -> list[str]:
    """Of their weights, which OpenVINO could also have expanded."""
    nodes = runner.compiled.get_runtime_model().get_ordered_ops()
    products = [n for n in nodes if "FullyConnected" in str(n.get_rt_info()["layerType"].value)]
    return [n.input(1).get_element_type().to_string() for n in products]


def logits_of(runner: OpenVinoRunner, adapter: int = 0) -> torch.Tensor:
    return runner.forward([RowInput(0, 0, PROMPT, 4, 4, adapter=adapter)]).logits


ALL = "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", *(
    f"{part}_proj.weight" for part in ("gate", "up", "down")
)  # fmt: skip
SOME = "q_proj.weight", "v_proj.weight", "down_proj.weight"


@pytest.mark.parametrize(("ends", "num"), [(ALL, 4 * 2), (SOME, 3 * 2)])
def test_the_same_integers_give_the_same_results(
    tmp_path: Path, model: Any, ends: tuple[str, ...], num: int
) -> None:
    """As the same numbers in float32, but that keys and values have 16 bits, and that activations
    are rounded with VNNI. All others are rounded to 8 bits."""
    expected = write(tmp_path, model, gptq_settings(64), ends)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert "int8 weights, 4 bits as in the file" in runner.about
    types = types_of_products(runner)
    assert types.count("u4") == num
    assert set(types) == {"u4", "i8"}
    for name, weight in expected.named_parameters():
        if weight.ndim == 2 and not name.endswith(ends):
            rounded = to_int8(TensorRows(weight.detach()))
            weight.data = rounded.values * rounded.scale
    wanted = logits_of(OpenVinoRunner(expected, replace(CONFIG, weights="stored")))
    error = (logits_of(runner) - wanted).std() / wanted.std()
    assert error < (0.05 if has_vnni() else 1e-3)
    plain = load_openvino_runner(replace(CONFIG, path=tmp_path, keeps_4_bits=False))
    assert set(types_of_products(plain)) == {"i8"}
    assert error < (logits_of(plain) - wanted).std() / wanted.std()


@pytest.mark.parametrize(
    "settings", [gptq_settings(32), gptq_settings(64, desc_act=True)], ids=["of 32", "ordered"]
)
def test_other_groups_have_8_bits(tmp_path: Path, model: Any, settings: dict[str, Any]) -> None:
    write(tmp_path, model, settings, ALL)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert not runner.config.keeps_4_bits
    assert set(types_of_products(runner)) == {"i8"}
    plain = load_openvino_runner(replace(CONFIG, path=tmp_path, keeps_4_bits=False))
    assert torch.equal(logits_of(runner), logits_of(plain))


def test_stored_weights_are_float32(tmp_path: Path, model: Any) -> None:
    write(tmp_path, model, gptq_settings(64), ALL)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path, weights="stored"))
    assert set(types_of_products(runner)) == {"f32"}
    assert "4 bits" not in runner.about


def test_adapters_of_such_a_base(tmp_path: Path, model: Any) -> None:
    """Their matrices A have 8 bits."""
    adapters = random_adapters(shapes_of(model), (8, 5))
    expected = write(tmp_path, model, gptq_settings(64), SOME)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path, adapters=adapters))
    assert types_of_products(runner).count("u4") == 3 * 2
    for index, name in enumerate(("", "a", "b")):
        whole = merged(expected, adapters, name)
        wanted = logits_of(OpenVinoRunner(whole, replace(CONFIG, weights="stored")))
        error = (logits_of(runner, index) - wanted).std() / wanted.std()
        assert error < 0.05, name


@pytest.mark.parametrize("with_vnni", [True, False])
def test_auto_keeps_them_with_vnni(monkeypatch: pytest.MonkeyPatch, with_vnni: bool) -> None:
    monkeypatch.setattr(machine, "has_vnni", lambda: with_vnni)
    values = "auto", "int4", "int8", "stored", "fp8"
    assert [keeps_4_bits(value) for value in values] == [with_vnni, True, False, False, False]
    assert [keeps_experts(value) for value in values] == [True, True, False, False, False]
