"""Which models have the layout of Llama, and properties of their layers for OpenVINO's graph."""

from __future__ import annotations

from typing import Any

import torch

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


def rotation_table(rotary: Any, max_len: int) -> torch.Tensor:
    """Complex numbers [max_len, 1, D / 2]: the factor of each pair of a head at each position."""
    device = rotary.inv_freq.device
    positions = torch.arange(max_len, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
