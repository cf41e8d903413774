"""Small tensors for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """A tensor [n] of these numbers. On a GPU, the copy does not wait for what runs there."""
    made = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        # PyTorch reuses pinned memory only after the copies from it are done.
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)
