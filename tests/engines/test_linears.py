"""Kernels of linear layers: each computes what plain layers do, keeps one copy of the weights, and
keeps bits where that is asked; the choice among them is made, kept and reported."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch

from smartspec_py.engines.torch import kernel_choice, linears
from smartspec_py.engines.torch.kernel_choice import KernelChoice, choose, kept_choice
from smartspec_py.engines.torch.linears import KERNELS, MKL_ROWS, Product, shape_of, use_kernels

DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = (1, 2, 3, 4, 5, 8, 16, 31, 33, MKL_ROWS, 129, 300, 1000)


def make_layers(bias: bool, dtype: torch.dtype = torch.float32) -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict(
        {
            "wide": torch.nn.Linear(96, 640, bias=bias),
            "long": torch.nn.Linear(1152, 40, bias=bias),
            "narrow": torch.nn.Linear(7, 3, bias=bias),
        }
    )
    return layers.eval().to(dtype)


def computed_by(
    kernel: str, layers: torch.nn.Module, batch_invariant: bool = False
) -> torch.nn.Module:
    """A copy. Skips the test where this machine has no such kernel."""
    own = copy.deepcopy(layers)
    try:
        use_kernels(own, {shape_of(one): kernel for one in linears.linears(own)}, batch_invariant)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"no {kernel} here: {error}")
    return own


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_any_number_of_rows_gives_the_plain_product(
    kernel: str, bias: bool, dtype: torch.dtype
) -> None:
    if kernel == "mkl" and dtype != torch.float32:
        pytest.skip("MKL packs float32 only")
    plain = make_layers(bias, dtype)
    packed = computed_by(kernel, plain)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for num_rows in NUM_ROWS:
        for name, layer in plain.items():
            inputs = torch.randn(1, num_rows, layer.in_features, dtype=dtype)
            found = packed[name](inputs)
            torch.testing.assert_close(found, layer(inputs), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("kernel", KERNELS)
@torch.inference_mode()
def test_no_rows_and_rows_that_are_not_contiguous(kernel: str) -> None:
    plain = make_layers(bias=True)
    packed = computed_by(kernel, plain)
    assert packed["wide"](torch.empty(1, 0, 96)).shape == (1, 0, 640)
    inputs = torch.randn(1, 96, 10).transpose(1, 2)
    torch.testing.assert_close(packed["wide"](inputs), plain["wide"](inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != linears.PLAIN])
def test_the_plain_weights_are_given_up_and_tied_embeddings_are_not(kernel: str) -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(50, 16), "head": torch.nn.Linear(16, 50, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    before = model["embed"].weight.detach().clone()
    packed = computed_by(kernel, model)
    assert packed["head"].weight.shape == (50, 16)
    assert packed["head"].weight.untyped_storage().nbytes() == 4
    torch.testing.assert_close(packed["embed"].weight.detach(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
@torch.inference_mode()
def test_bits_of_a_row_do_not_depend_on_the_others(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "mkl" and dtype != torch.float32:
        pytest.skip("MKL packs float32 only")
    layers = computed_by(kernel, make_layers(bias=True, dtype=dtype), batch_invariant=True)
    for layer in (layers["wide"], layers["long"]):
        rows = torch.randn(1, 300, layer.in_features, dtype=dtype)
        together = layer(rows)
        for start, num_rows in ((0, 1), (299, 1), (7, 2), (3, 15), (5, 17), (100, 33), (20, 270)):
            part = slice(start, start + num_rows)
            assert torch.equal(layer(rows[:, part]), together[:, part]), (start, num_rows)


def test_a_kernel_that_cannot_be_used_is_left_out_and_the_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        raise RuntimeError("no such instruction")

    def slow(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        fast = KERNELS["plain"](weight, bias)

        def product(inputs: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                out = fast(inputs)
            return out

        return product

    kernels = {"broken": broken, "slow": slow, "plain": KERNELS["plain"]}
    monkeypatch.setattr(linears, "KERNELS", kernels)
    monkeypatch.setattr(kernel_choice, "KERNELS", kernels)
    model = make_layers(bias=False)
    with caplog.at_level(logging.INFO):
        choice = choose(model, batch_invariant=False, heads=(4, 2, 8))
    assert choice.kernels == {shape_of(one): "plain" for one in linears.linears(model)}
    assert choice.cache_dtype == torch.float32
    assert "linear layers are not computed by broken: no such instruction" in caplog.text
    assert "linear layers by plain, keys and values in float32" in caplog.text


def test_a_choice_is_kept_and_what_cannot_be_used_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kernels.json"
    assert kept_choice(path) is None
    choice = KernelChoice({(640, 96): "onednn", (40, 1152): "mkl"}, torch.bfloat16)
    path.write_text(json.dumps(choice.to_json()))
    assert kept_choice(path) == choice
    assert str(choice) == "linear layers by mkl, 640 x 96 onednn, keys and values in bfloat16"
    for text in ("{}", "[", '{"kernels": [[1, 2, "gone"]], "cache_dtype": null}'):
        path.write_text(text)
        caplog.clear()
        assert kept_choice(path) is None
        assert "measuring again" in caplog.text
