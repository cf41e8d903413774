"""Packed linear layers compute what plain ones do, keep one copy of the weights, and keep bits
where that is asked; with oneDNN and without."""

from __future__ import annotations

import copy

import pytest
import torch

from smartspec_py.engines.torch.linears import PACKED_ROWS, pack_linears

DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = (1, 2, 3, 4, 5, 8, 16, 31, PACKED_ROWS, 33, 129, 300, 1000)


@pytest.fixture(params=["packed", "plain"], autouse=True)
def with_or_without_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operator")

    if request.param == "plain":
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing, raising=False)


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


def packed_copy(layers: torch.nn.ModuleDict, batch_invariant: bool = False) -> torch.nn.ModuleDict:
    own = copy.deepcopy(layers)
    pack_linears(own, batch_invariant)
    return own


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_any_number_of_rows_gives_the_plain_product(
    bias: bool, dtype: torch.dtype, batch_invariant: bool
) -> None:
    plain = make_layers(bias, dtype)
    packed = packed_copy(plain, batch_invariant)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for num_rows in NUM_ROWS:
        for name, layer in plain.items():
            inputs = torch.randn(1, num_rows, layer.in_features, dtype=dtype)
            found = packed[name](inputs)
            torch.testing.assert_close(found, layer(inputs), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("batch_invariant", [False, True])
@torch.inference_mode()
def test_no_rows_and_rows_that_are_not_contiguous(batch_invariant: bool) -> None:
    plain = make_layers(bias=True)
    packed = packed_copy(plain, batch_invariant)
    assert packed["wide"](torch.empty(1, 0, 96)).shape == (1, 0, 640)
    inputs = torch.randn(1, 96, 10).transpose(1, 2)
    torch.testing.assert_close(packed["wide"](inputs), plain["wide"](inputs), rtol=1e-4, atol=1e-5)


def test_the_plain_weights_are_given_up_and_tied_embeddings_are_not() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(50, 16), "head": torch.nn.Linear(16, 50, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    before = model["embed"].weight.detach().clone()
    pack_linears(model)
    assert model["head"].weight.shape == (50, 16)
    assert model["head"].weight.untyped_storage().nbytes() == 4
    torch.testing.assert_close(model["embed"].weight.detach(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    layers = packed_copy(make_layers(bias=True, dtype=dtype), batch_invariant=True)
    for layer in (layers["wide"], layers["long"]):
        rows = torch.randn(1, 300, layer.in_features, dtype=dtype)
        together = layer(rows)
        for start, num_rows in ((0, 1), (299, 1), (7, 2), (3, 15), (5, 17), (100, 33), (20, 270)):
            part = slice(start, start + num_rows)
            assert torch.equal(layer(rows[:, part]), together[:, part]), (start, num_rows)
