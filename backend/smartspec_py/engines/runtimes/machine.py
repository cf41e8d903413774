"""The machine: instructions of the processor, free memory, and the number of compute threads if
engine.json leaves it open.

With few cores, all of them compute: another busy process then slows a pass down to the speed of one
thread less, and not below it. With more cores, one is left to other processes.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

FEW_CORES = 4

QUOTAS = ("cpu.max", "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us")
"""Files of a control group, version 2 and 1, with the CPU time per period and the period."""


MEMORY_GROUPS = (
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
)
"""For cgroups v2 and v1, as seen inside a container: the limit, the statistics, and the field with
the memory that cannot be reclaimed."""


def thread_count(configured: int) -> int:
    """configured: 0 leaves the number open."""
    cores = usable_cores()
    return configured or (cores if cores <= FEW_CORES else cores - 1)


def usable_cores(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: of its affinity, at most the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    for files in QUOTAS:
        try:
            text = " ".join((groups / name).read_text() for name in files.split())
            quota, period = text.split()
            if int(quota) > 0:  # -1 is no quota
                cores = min(cores, max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            continue  # another version of control groups, or no quota
    return cores


@cache
def cpu_has(*instructions: str) -> bool:
    """Whether the processor has any of these instruction sets, by PyTorch's names."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in instructions)


def has_vnni() -> bool:
    """Whether the processor multiplies 8-bit integers."""
    return cpu_has("avx512_vnni", "avx_vnni")


def keeps_4_bits(weights: str) -> bool:
    """Whether this `engine.weights` keeps the 4 bits of GPTQ, AWQ and compressed-tensors. Without
    VNNI they take longer than 8: 87 instead of 61 ms for a pass of 1.0 billion parameters."""
    return weights == "int4" or (weights == "auto" and has_vnni())


def keeps_experts(weights: str) -> bool:
    """The same of the matrices of experts, and of 4 bits in GGUF files too. They take 1.0 to 1.35
    times as long as 8 without VNNI, but large models often fit into memory only with 4."""
    return weights in ("auto", "int4")


def free_bytes(device: torch.device) -> int:
    """Free memory; on a CPU, at most what the container may still use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([1024 * available, *left_in_groups(Path("/sys/fs/cgroup"))])


def left_in_groups(root: Path) -> list[int]:
    """Bytes left up to the limit of the control group; empty if there is no limit."""
    left = []
    for limit, statistics, kept in MEMORY_GROUPS:
        try:
            most = int((root / limit).read_text())
            rows = dict(line.split() for line in (root / statistics).read_text().splitlines())
            left.append(most - int(rows[kept]))
        except (OSError, ValueError, KeyError):
            continue  # another cgroup version, or no limit
    return left
