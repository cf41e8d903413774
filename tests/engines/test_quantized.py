"""Checkpoints of GPTQ, AWQ and compressed-tensors against their formats, written with NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_models import VOCAB_SIZE, make_model, make_runner
from safetensors.torch import load_file, save_file

from smartspec_py.engines.checkpoints.checks import ModelError, check_quantization
from smartspec_py.engines.checkpoints.quantized import QuantizedTensors
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

Array = np.ndarray[Any, Any]
Written = tuple[dict[str, Array], Array]
"""Tensors of a matrix by the ends of their names, and the matrix [out, in]."""

NUM_OUT, NUM_IN, GROUP = 24, 64, 16
CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 5, 96, VOCAB_SIZE)


def words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Columns packed into int32: column `order[i]` of each word is at bit i * bits."""
    each = 32 // bits
    found = np.zeros((len(numbers), numbers.shape[1] // each), np.uint32)
    for place, column in enumerate(order or range(each)):
        found |= numbers[:, column::each].astype(np.uint32) << np.uint32(place * bits)
    return found.view(np.int32)


def draw(bits: int, num_groups: int, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Values [in, out], zero points and scales [groups, out]."""
    random = np.random.default_rng(bits + num_groups)
    num_out, num_in = shape
    values = random.integers(0, 2**bits, (num_in, num_out))
    zeros = random.integers(0, 2**bits, (num_groups, num_out))
    return values, zeros, random.uniform(0.001, 0.02, zeros.shape).astype(np.float16)


def weight(values: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    found = (values - zeros[groups]) * scales[groups].astype(np.float32)
    return found.astype(np.float32).T


def gptq(shape: tuple[int, int], settings: Mapping[str, Any]) -> Written:
    bits, size = settings["bits"], settings["group_size"]
    num_groups = 1 if size == -1 else shape[1] // size
    values, zeros, scales = draw(bits, num_groups, shape)
    groups = np.arange(shape[1]) * num_groups // shape[1]
    if settings["sym"]:
        zeros[:] = 2 ** (bits - 1)
    if settings["desc_act"]:
        groups = np.random.default_rng(0).permutation(groups)
    stored = zeros if settings.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % 2**bits
    parts = {
        "qweight": words(values.T, bits).T,
        "qzeros": words(stored, bits),
        "scales": scales,
    }
    if settings["desc_act"]:
        parts["g_idx"] = groups.astype(np.int32)
    return parts, weight(values, zeros, scales, groups)


def awq(shape: tuple[int, int], settings: Mapping[str, Any]) -> Written:
    size = settings["group_size"]
    values, zeros, scales = draw(4, shape[1] // size, shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(values, 4, order), "qzeros": words(zeros, 4, order), "scales": scales}
    return parts, weight(values, zeros, scales, np.arange(shape[1]) // size)


def compressed(shape: tuple[int, int], settings: Mapping[str, Any]) -> Written:
    form = settings["config_groups"]["group_0"]["weights"]
    bits, size = form["num_bits"], form.get("group_size") or shape[1]
    values, zeros, scales = draw(bits, shape[1] // size, shape)
    half = 2 ** (bits - 1)
    if form["symmetric"]:
        zeros[:] = half
    parts = {"weight_scale": scales.T}
    if settings["format"] == "int-quantized":
        parts["weight"] = (values - half).T.astype(np.int8)
        of_zeros = (zeros - half).T.astype(np.int8)
    else:
        parts["weight_packed"] = words(values.T, bits)
        parts["weight_shape"] = np.array(shape)
        of_zeros = words(zeros, bits).T
        if settings.get("is_old"):
            of_zeros = (zeros - half).T.astype(np.int8)
    if not form["symmetric"] or settings.get("is_old"):
        parts["weight_zero_point"] = of_zeros
    if form.get("actorder") == "group":
        groups = np.random.default_rng(0).permutation(np.arange(shape[1]) // size)
        parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, weight(values, zeros, scales, groups)
    return parts, weight(values, zeros, scales, np.arange(shape[1]) // size)


def fp8(shape: tuple[int, int], settings: Mapping[str, Any]) -> Written:
    """Blocks at the edges are smaller."""
    random = np.random.default_rng(3)
    values = torch.from_numpy(random.normal(size=shape).astype(np.float32)).to(torch.float8_e4m3fn)
    height, width = settings.get("weight_block_size") or shape
    of_blocks = -(-shape[0] // height), -(-shape[1] // width)
    scales = random.uniform(0.001, 0.02, of_blocks).astype(np.float32)
    each = scales.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]
    found = scales if settings.get("weight_block_size") else scales.reshape(())
    parts = {"weight": values, "weight_scale_inv": found, "activation_scale": np.ones(1)}
    return parts, values.float().numpy() * each


def of_gptq(bits: int, size: int, sym: bool, desc_act: bool, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": sym,
        "desc_act": desc_act,
        **more,
    }


def of_compressed(
    form: str, bits: int, size: int | None, symmetric: bool, is_old: bool = False, **more: Any
) -> dict[str, Any]:
    """is_old: zero points are written as before compressed-tensors 0.9.4, also those of 0."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size, **more}
    weights["strategy"] = "group" if size else "channel"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return found | {"is_old": is_old}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
WRITERS: dict[str, Callable[[tuple[int, int], Mapping[str, Any]], Written]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
}
FORMS = {
    "gptq 4 bits": of_gptq(4, GROUP, sym=True, desc_act=False),
    "gptq 4 bits, asymmetric": of_gptq(4, GROUP, sym=False, desc_act=False),
    "gptq 4 bits, ordered": of_gptq(4, GROUP, sym=False, desc_act=True),
    "gptq 4 bits, one group": of_gptq(4, -1, sym=True, desc_act=False),
    "gptq 8 bits": of_gptq(8, GROUP, sym=True, desc_act=True),
    "gptq version 2": of_gptq(4, GROUP, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
    "awq": AWQ,
    "packed 4 bits": of_compressed("pack-quantized", 4, GROUP, symmetric=True),
    "packed 4 bits, asymmetric": of_compressed("pack-quantized", 4, GROUP, symmetric=False),
    "packed 4 bits, asymmetric, old": of_compressed(
        "pack-quantized", 4, GROUP, symmetric=False, is_old=True
    ),
    "packed 4 bits, old": of_compressed("pack-quantized", 4, GROUP, symmetric=True, is_old=True),
    "packed 8 bits, asymmetric, old": of_compressed(
        "pack-quantized", 8, None, symmetric=False, is_old=True
    ),
    "packed 8 bits, asymmetric": of_compressed("pack-quantized", 8, GROUP, symmetric=False),
    "packed 4 bits, ordered": of_compressed(
        "pack-quantized", 4, GROUP, symmetric=False, actorder="group"
    ),
    "packed 8 bits": of_compressed("pack-quantized", 8, None, symmetric=True),
    "integers": of_compressed("int-quantized", 8, None, symmetric=True),
    "integers, asymmetric groups": of_compressed("int-quantized", 8, GROUP, symmetric=False),
    "fp8": {"quant_method": "fp8", "weight_block_size": None},
    "fp8, blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [7, 5]},
}


def as_tensors(name: str, parts: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {f"{name}.{end}": torch.as_tensor(part).clone() for end, part in parts.items()}


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_format(form: str) -> None:
    settings = FORMS[form]
    parts, expected = WRITERS[settings["quant_method"]]((NUM_OUT, NUM_IN), settings)
    plain = {"x.norm.weight": torch.ones(3), "x.proj.bias": torch.ones(4)}
    found = QuantizedTensors(as_tensors("x.proj", parts) | plain, settings)
    assert set(found) == {*plain, "x.proj.weight"}
    np.testing.assert_array_equal(found["x.proj.weight"].numpy(), expected)
    assert found["x.norm.weight"] is plain["x.norm.weight"]


def test_one_scale_for_a_matrix() -> None:
    values = torch.randint(-128, 128, (4, 6)).to(torch.int8)
    stored = {"a.weight": values, "a.weight_scale": torch.tensor([0.5])}
    found = QuantizedTensors(stored, FORMS["integers"])
    assert torch.equal(found["a.weight"], values * 0.5)


@pytest.mark.parametrize(
    ("scales", "block"),
    [([0.5], None), ([[0.5], [0.25], [2.0], [1.0]], None), ([[0.5, 2.0]], [4, 3])],
)
def test_floats_of_compressed_tensors(scales: Any, block: list[int] | None) -> None:
    """One scale, one for each row, and blocks."""
    values = torch.randn(4, 6).to(torch.float8_e4m3fn)
    stored = {"a.weight": values, "a.weight_scale": torch.tensor(scales).bfloat16()}
    settings = of_compressed("float-quantized", 8, None, symmetric=True, block_structure=block)
    found = QuantizedTensors(stored, settings)
    factors = torch.tensor(scales)
    if block:
        factors = factors.repeat_interleave(3, 1)
    assert torch.equal(found["a.weight"], values.float() * factors)
    assert found.integers("a.weight") is None
    for wrong, reason in (
        (torch.ones(3, 1), r"scales \(3, 1\) for a matrix \(4, 6\)"),
        (torch.ones(1, dtype=torch.uint8), "scales of the type torch.uint8"),
    ):
        with pytest.raises(ModelError, match=reason):
            QuantizedTensors(stored | {"a.weight_scale": wrong}, settings)["a.weight"]


def test_an_order_of_groups_that_was_never_set() -> None:
    settings = FORMS["packed 4 bits"]
    parts, expected = compressed((NUM_OUT, NUM_IN), settings)
    stored = as_tensors("x", parts | {"weight_g_idx": np.full(NUM_IN, -1)})
    np.testing.assert_array_equal(QuantizedTensors(stored, settings)["x.weight"], expected)


def test_one_scale_for_a_packed_matrix() -> None:
    """Zero points of one scale are never packed: (5 - 8 - (-3)) * 0.5 = 0."""
    stored = {
        "a.weight_packed": torch.full((2, 1), 0x55555555, dtype=torch.int32),
        "a.weight_shape": torch.tensor([2, 8]),
        "a.weight_scale": torch.tensor([0.5]),
        "a.weight_zero_point": torch.tensor([-3], dtype=torch.int8),
    }
    found = QuantizedTensors(stored, FORMS["packed 4 bits"])
    assert torch.equal(found["a.weight"], torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("form", "end", "changed", "reason"),
    [
        ("packed 4 bits", "weight_shape", None, "no weight_shape"),
        ("packed 4 bits", "weight_packed", torch.zeros(24, 7, dtype=torch.int32), "7 words for 64"),
        (
            "packed 4 bits, asymmetric",
            "weight_zero_point",
            torch.zeros(24, 4, dtype=torch.int32),
            r"weight_zero_point is int32 \(24, 4\) for 24 rows",
        ),
        ("packed 4 bits", "weight_scale", torch.ones(24, 3), "3 groups do not divide 64"),
        ("packed 4 bits", "weight_scale", torch.ones(24), r"scales \(24,\)"),
        ("integers", "weight", torch.ones(24, 64), "not integers"),
        ("packed 4 bits, ordered", "weight_g_idx", torch.full((64,), 4), r"not in 0\.\.3"),
        ("gptq 4 bits, ordered", "g_idx", None, "no g_idx, but desc_act"),
        ("packed 4 bits, ordered", "weight_g_idx", None, "no weight_g_idx, but actorder is group"),
        (
            "packed 4 bits, asymmetric",
            "weight_zero_point",
            None,
            "no weight_zero_point, but symmetric is false",
        ),
        (
            "packed 4 bits",
            "weight_packed",
            torch.zeros(24, 16, dtype=torch.int32),
            "numbers of 8 bits, but another num_bits",
        ),
        ("gptq 4 bits", "scales", torch.ones(4, 24, dtype=torch.int32), "scales of the type torch"),
        ("gptq 4 bits", "qweight", torch.ones(8, 24), "instead of integers in a matrix"),
        ("gptq 4 bits", "weight", torch.ones(24, 64), "weight is not used"),
        ("awq", "g_idx", torch.zeros(64), "g_idx is not used"),
        ("gptq 4 bits", "qzeros", torch.zeros(2, 3, dtype=torch.int32), r"zero points \(24, 2\)"),
    ],
)
def test_tensors_that_do_not_fit(
    form: str, end: str, changed: torch.Tensor | None, reason: str
) -> None:
    settings = FORMS[form]
    parts, _ = WRITERS[settings["quant_method"]]((NUM_OUT, NUM_IN), settings)
    tensors = as_tensors("x", parts) | {f"x.{end}": changed}
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ModelError, match=f"tensors of x.weight do not fit together .*{reason}"):
        QuantizedTensors(stored, settings)["x.weight"]


@pytest.mark.parametrize("form", ["gptq 4 bits", "awq", "packed 4 bits"])
def test_groups_have_the_size_of_the_config(form: str) -> None:
    """96 columns in groups of 64 have two groups, as have 96 in groups of 48."""
    settings = FORMS[form]
    parts, _ = WRITERS[settings["quant_method"]]((NUM_OUT, NUM_IN), settings)
    text = json.dumps(settings).replace(f'"group_size": {GROUP}', '"group_size": 32')
    with pytest.raises(ModelError, match="groups of 16 columns, but group_size 32 in config"):
        QuantizedTensors(as_tensors("x", parts), json.loads(text))["x.weight"]


@pytest.mark.parametrize("version", [{"checkpoint_format": "GPTQ_V2"}, {"format": "gptq_v2"}])
def test_other_spellings_of_a_version(version: dict[str, str]) -> None:
    settings = FORMS["gptq version 2"]
    parts, expected = gptq((NUM_OUT, NUM_IN), settings)
    settings = {name: one for name, one in settings.items() if name != "checkpoint_format"}
    settings |= {"quant_method": "GPTQ", **version}
    found = QuantizedTensors(as_tensors("x", parts), settings)["x.weight"]
    np.testing.assert_array_equal(found.numpy(), expected)


def test_scales_without_a_matrix_are_kept() -> None:
    """AWQ's scales of activations in starcoder2, which no class of Transformers has."""
    names = {"mlp.act.scales", "mlp.up_proj.weight", "self_attn.k_scale", "mlp.up_proj.input_scale"}
    found = QuantizedTensors(dict.fromkeys(names, torch.ones(1)), AWQ)
    assert set(found) == {"mlp.act.scales", "mlp.up_proj.weight"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "the format gptq .* use gptq_v2"),
        ({"format": "marlin"}, "the format marlin"),
        ({"is_marlin_format": True}, "the is_marlin_format True"),
        ({"rotation": "hadamard"}, "the rotation hadamard"),
        ({"quant_method": "GPTQ", "bits": 3}, "the bits 3"),
    ],
)
def test_variants_of_gptq_that_cannot_be_read(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    whole = FORMS["gptq 4 bits"] | settings
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": whole}))
    with pytest.raises(ModelError, match=f"the target is quantised with {reason}"):
        check_quantization("the target", tmp_path)


def test_the_whole_sparsity_config_of_a_dense_model(tmp_path: Path) -> None:
    dense = {"format": "dense", "global_sparsity": 0.1, "ignore": []}
    settings = FORMS["integers"] | {"sparsity_config": dense}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    check_quantization("the target", tmp_path)
    settings |= {"config_groups": [1]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(ModelError, match=r"the config_groups \[1\] .* must be an object"):
        check_quantization("the target", tmp_path)


FLOAT = {"num_bits": 8, "type": "float", "strategy": "block"}


@pytest.mark.parametrize("block", ["2x32", [2], [2, 0], [2.0, 2]])
def test_blocks_that_are_none(tmp_path: Path, block: Any) -> None:
    weights = FLOAT | {"block_structure": block}
    groups = {"config_groups": {"group_0": {"weights": weights}}}
    for settings in (
        {"quant_method": "fp8", "weight_block_size": block},
        of_compressed("float-quantized", 8, None, symmetric=True) | groups,
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        with pytest.raises(ModelError, match="which must be two whole numbers above 0"):
            check_quantization("the target", tmp_path)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ({"format": "nvfp4-pack-quantized"}, "the format nvfp4-pack-quantized"),
        ({"weights": {"num_bits": 3}}, "the num_bits 3"),
        ({"weights": None}, "the num_bits None"),
        ({"weights": FLOAT | {"num_bits": 4}}, "the num_bits 4"),
        ({"weights": FLOAT | {"strategy": "group"}}, "the strategy group"),
    ],
)
def test_groups_that_cannot_be_read(tmp_path: Path, group: dict[str, Any], reason: str) -> None:
    settings = FORMS["packed 4 bits"] | {"config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(ModelError, match=f"the target is quantised with {reason}"):
        check_quantization("the target", tmp_path)


@pytest.mark.parametrize(
    "form", ["gptq 4 bits, ordered", "awq", "packed 4 bits, asymmetric", "fp8, blocks"]
)
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_a_quantised_checkpoint_computes_as_its_dequantised_one(
    tmp_path: Path, form: str, load: Callable[[RunnerConfig], Any]
) -> None:
    settings, model = FORMS[form], make_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            shape = tuple(parameter.shape)
            parts, dequantised = WRITERS[settings["quant_method"]](shape, settings)
            parameter.data = torch.from_numpy(dequantised.copy())
            del tensors[name]
            tensors |= as_tensors(name.removesuffix(".weight"), parts)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    document = json.loads((tmp_path / "config.json").read_text()) | {
        "quantization_config": settings
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    check_quantization("the target", tmp_path)
    inputs = [RowInput(0, 0, [5, 6, 7, 8], 4, 4)]
    expected = make_runner(model, with_openvino=load is load_openvino_runner).forward(inputs)
    found = load(replace(CONFIG, path=tmp_path)).forward(inputs)
    assert torch.equal(found.logits, expected.logits)
