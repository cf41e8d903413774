"""Writes checkpoints of GPTQ, version 1, from models: each weight is rounded to the nearest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch


def gptq_settings(group: int, **more: Any) -> dict[str, Any]:
    """quantization_config of config.json."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": False,
        "desc_act": False,
        **more,
    }


def gptq_tensors(
    tensors: Mapping[str, torch.Tensor], group: int, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Those of a checkpoint. names: of the weights that are quantised; others are kept."""
    found = {name: tensor for name, tensor in tensors.items() if name not in names}
    for name in names:
        parts = _parts(tensors[name].float(), group)
        found |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
    return found


def _parts(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    num_out, num_in = weight.shape
    numbers = weight.view(num_out, -1, group)
    least, most = numbers.amin(-1).clamp(max=0), numbers.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).clamp(min=1e-5).half()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    levels = (numbers / scales.float()[..., None]).round() + zeros[..., None]
    return {
        "qweight": _words(levels.clamp(0, 15).view(num_out, num_in)).T.contiguous(),
        "qzeros": _words((zeros.T - 1) % 16),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(num_in) // group).int(),
    }


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Eight columns in each, the first in the lowest bits: int32 [rows, columns / 8]."""
    shifted = numbers.long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)
    return shifted.sum(-1).to(torch.int32)
