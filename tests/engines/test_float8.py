"""Weights in float8: products, which layers are rounded, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from local_models import make_model

from smartspec_py.config import LimitsConfig, LocalEngineConfig
from smartspec_py.engines.local.build import build_local
from smartspec_py.engines.runtimes.pytorch.float8 import Float8Linear, use_float8
from smartspec_py.faults import ConfigError

TARGET = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"


@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_a_product_is_that_of_the_rounded_numbers(has_bias: bool) -> None:
    """Weights by row and activations by token, each to 3 bits after the leading one."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16)
    layer.weight[5] = 0
    layer.weight[6] *= 1000
    tokens = torch.randn(2, 3, 64).to(torch.bfloat16)
    tokens[1, 2] *= 1e-4
    found = Float8Linear(layer)(tokens)
    assert found.shape == (2, 3, 48)
    exact = layer.double()(tokens.double())
    scale = (tokens.double() ** 2).sum(-1, keepdim=True).sqrt() * layer.weight.norm(dim=1)
    assert ((found - exact).abs() <= 0.05 * scale + 0.01 * exact.abs()).all()


@torch.inference_mode()
def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(torch.nn.Linear(64, 48, dtype=torch.bfloat16))
    tokens = torch.randn(9, 64).to(torch.bfloat16)
    together = layer(tokens)
    assert all(torch.equal(layer(tokens[i : i + 1])[0], together[i]) for i in range(9))


def test_the_output_layer_and_odd_sides_keep_their_type() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 40)
    use_float8(model)
    kept = {name for name, part in model.named_modules() if type(part) is torch.nn.Linear}
    assert kept == {"lm_head", "model.layers.1.mlp.up_proj"}
    rounded = [part for part in model.modules() if isinstance(part, Float8Linear)]
    assert len(rounded) == 2 * 7 - 1
    assert {part.weight.dtype for part in rounded} == {torch.float8_e4m3fn}


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    config = LocalEngineConfig(model=str(TARGET), device="cpu", weights="fp8")
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU that multiplies float8 .* is cpu: use"):
        build_local(config, LimitsConfig(max_context_len=64), tmp_path)
