"""Small tensors for a device, and its clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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


class Moment:
    """The moment when a device has done all that was launched on it so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._host_s = time.perf_counter()

    def seconds_until(self, end: Moment) -> float:
        """Waits for the end."""
        if self._event is None:
            return end._host_s - self._host_s
        end._event.synchronize()
        return float(self._event.elapsed_time(end._event)) / 1e3
