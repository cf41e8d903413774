"""The device: its name, its memory, and how fast it copies its own memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from smartspec_bench.gpu.document import DeviceInfo
from smartspec_bench.gpu.plan import Plan
from smartspec_py.serving.profile import driver_name, machine_name

NUM_COPIES = 20
GB = 1e9


class DeviceError(RuntimeError):
    """The run cannot be made on this machine; the message says what it needs."""


def choose_device(plan: Plan) -> torch.device:
    """A dry run uses the CPU, even if there is a GPU. Raises DeviceError."""
    if plan.is_dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"PyTorch {torch.__version__} sees no CUDA device: run this where there is one, "
            "or try it out with --dry-run"
        )
    return torch.device("cuda", torch.cuda.current_device())


def describe(device: torch.device, copy_bytes: int) -> DeviceInfo:
    """copy_bytes: of the buffer that is copied to measure the bandwidth."""
    free_bytes, total_bytes = memory_bytes(device)
    return DeviceInfo(
        name=_name(device),
        kind=device.type,
        machine=machine_name(),
        driver=driver_name(),
        memory_gb=total_bytes / GB,
        free_gb=free_bytes / GB,
        copy_gb_per_s=copy_gb_per_s(device, copy_bytes),
        versions=_versions(),
    )


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Free and total memory; for a CPU, that of the machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch keeps of tensors that are gone is free as well
        return torch.cuda.mem_get_info(device)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return (
        page_bytes * os.sysconf("SC_AVPHYS_PAGES"),
        page_bytes * os.sysconf("SC_PHYS_PAGES"),
    )


def copy_gb_per_s(device: torch.device, num_bytes: int) -> float:
    """Copy bandwidth: the best of several copies within the device's memory, bytes read plus
    written, in units of 1e9 per second. The buffer must be larger than the device's caches."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    best_s = min(_timed_s(device, lambda: to.copy_(source)) for _ in range(NUM_COPIES))
    return 2 * num_bytes / best_s / GB


def _timed_s(device: torch.device, work: Callable[[], object]) -> float:
    """Measured with the device's own clock if it has one, because the host only launches the
    work."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    start, end = _event(), _event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def _versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
