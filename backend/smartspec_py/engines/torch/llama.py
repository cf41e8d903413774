"""Parts of the decoder of Llama and of models with the same layout.

The graph of OpenVINO and EAGLE heads use them. A layer is written for packed tokens: one product
computes queries, keys and values, another gate and up, and one complex multiplication rotates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smartspec_py.engines.torch.checkpoint import ROTATIONS
from smartspec_py.engines.torch.rope import rope_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of `model_type`. These models have RMS norms before attention, a gated MLP and
rotation of whole heads. Layers may have biases, and norms of queries and keys."""


def can_write_out(config: Any) -> bool:
    """Whether a model with this Transformers config has this layout, without other parts."""
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and rope_of(config)["rope_type"] in ROTATIONS
    )


def attention_window(layer: Any, config: Any, max_len: int) -> int | None:
    """Positions that the layer's queries see; None if they see all."""
    owner = config if config.model_type == "mistral" else layer.self_attn
    window: int | None = getattr(owner, "sliding_window", None)
    return None if window is None or window >= max_len else window


class Norm(torch.nn.Module):
    """An RMS norm. norm: of Transformers."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon
        self.shape = tuple(norm.weight.shape)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, self.shape, self.weight, self.eps)


class Layer:
    """A decoder layer. layer, config: of Transformers. Not a module."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = attention.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.qkv = _joined(
            _interleaved(attention.q_proj, self.head_dim),
            _interleaved(attention.k_proj, self.head_dim),
            attention.v_proj,
        )
        self.attention_norm: torch.nn.Module = Norm(layer.input_layernorm)
        self.out = attention.o_proj
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.down = mlp.down_proj

    def parts(self) -> torch.nn.ModuleList:
        """Its modules."""
        return torch.nn.ModuleList(
            part for part in vars(self).values() if isinstance(part, torch.nn.Module)
        )

    def project(
        self, states: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """states [N, hidden_size] -> keys and values [N, kv_heads, D], queries [N, heads, D]."""
        num_tokens, num_rotated = len(states), self.num_heads + self.num_kv_heads
        product: torch.Tensor = self.qkv.forward(self.attention_norm.forward(states))
        heads = product.view(num_tokens, -1, self.head_dim)
        floats = heads[:, :num_rotated].float()
        torch.view_as_complex(floats.view(num_tokens, num_rotated, -1, 2)).mul_(rotation)
        return floats[:, self.num_heads :], heads[:, num_rotated:], floats[:, : self.num_heads]

    def finish(
        self, states: torch.Tensor, attended: torch.Tensor, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """attended: [N, heads * D]. wanted: the tokens to continue with; None means all."""
        attended = attended.to(states.dtype)
        if wanted is not None:
            attended, states = attended.index_select(0, wanted), states.index_select(0, wanted)
        states = self.out.forward(attended).add_(states)
        gate, up = self.gate_up.forward(self.mlp_norm.forward(states)).chunk(2, dim=-1)
        out: torch.Tensor = self.down.forward(F.silu(gate).mul_(up)).add_(states)
        return out


def rotation_table(rotary: Any, max_len: int) -> torch.Tensor:
    """Complex numbers [max_len, 1, D / 2]: the factor of each pair of a head at each position."""
    device = rotary.inv_freq.device
    positions = torch.arange(max_len, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])


def _interleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from (0, 1, ..) to (0, D / 2, 1, D / 2 + 1, ..).

    Transformers rotates the first half of a head with the second half. A complex number needs the
    two values next to each other. Products of queries and keys do not depend on the order.
    """
    by_half = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return by_half.transpose(1, 2).reshape(weight.shape)


def _interleaved(layer: torch.nn.Linear, head_dim: int) -> torch.nn.Linear:
    bias = None if layer.bias is None else _interleave(layer.bias.detach(), head_dim)
    return _linear(_interleave(layer.weight.detach(), head_dim), bias)


def _joined(*layers: torch.nn.Linear) -> torch.nn.Linear:
    """One layer whose outputs are those of all layers, concatenated."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "only some of the layers have a bias"
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return _linear(weight, torch.cat(biases) if biases else None)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    with torch.device("meta"):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer
