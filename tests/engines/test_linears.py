"""Packed linear layers: what plain ones compute, for any number of rows, and no second copy."""

from __future__ import annotations

import copy

import pytest
import torch

from smartspec_py.engines.linears import PACKED_FOR_ROWS, can_pack, pack_linears

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="PyTorch without MKL")


def make_layers(bias: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "wide": torch.nn.Linear(96, 640, bias=bias),
            "long": torch.nn.Linear(1152, 40, bias=bias),
            "narrow": torch.nn.Linear(7, 3, bias=bias),
        }
    ).eval()


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_any_number_of_rows_gives_the_plain_product(bias: bool) -> None:
    plain = make_layers(bias)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    for num_rows in (1, 2, 3, 4, 5, 8, 16, 31, 33, PACKED_FOR_ROWS, 129, 300, 1000):
        for name, layer in plain.items():
            inputs = torch.randn(1, num_rows, layer.in_features)
            torch.testing.assert_close(packed[name](inputs), layer(inputs), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_no_rows_and_rows_that_are_not_contiguous() -> None:
    plain = make_layers(bias=True)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
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


def test_only_float32_on_a_cpu_is_packed() -> None:
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("cuda"), torch.float32)
