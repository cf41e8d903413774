"""The context length of the PyTorch engine where engine.json does not set it.

Rows of the cache are reserved at the start, all as long as the context. So it is the longest that
the models reach and whose rows fit into a share of the memory that the weights leave free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smartspec_py.engines.torch.runner import bytes_per_token
from smartspec_py.serving.config import DEFAULT_CONTEXT_LEN

CACHE_SHARE = 0.5
"""Of the memory that is left: passes, CUDA graphs and other programs need some too."""

STEP = 512
"""The context is a multiple of it where memory limits it. Passes are timed at contexts that depend
on it, so that a start with a little less memory finds the costs of the one before."""

MEMORY_GROUPS = (
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
)
"""Of cgroups v2 and v1, as a container sees its own: limit, statistics, and what cannot be taken
back from its processes."""


def choose_context_len(
    folders: Sequence[Path], device: torch.device, dtype: torch.dtype, num_rows: int
) -> tuple[int, str]:
    """The context length for these models together, and a sentence that says what limits it."""
    configs = [
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for folder in folders
    ]
    reaches = [
        (config.max_position_embeddings, folder.name)
        for config, folder in zip(configs, folders, strict=True)
        if getattr(config, "max_position_embeddings", None)
    ]
    reach, name = min(reaches, default=(DEFAULT_CONTEXT_LEN, ""))
    weights = sum(_weight_bytes(config, dtype) for config in configs)
    row_bytes = num_rows * sum(bytes_per_token(config, device, dtype) for config in configs)
    left = free_bytes(device) - weights
    fitting = max(DEFAULT_CONTEXT_LEN, int(CACHE_SHARE * left / row_bytes) // STEP * STEP)
    if reach <= fitting:
        return reach, f"all positions of {name}" if name else "the models name no limit"
    share = f"{CACHE_SHARE:.0%} of the {max(0, left) / 2**30:.1f} GiB that the weights leave free"
    return fitting, f"{num_rows} rows of this length fit in {share}; {name} has {reach} positions"


def free_bytes(device: torch.device) -> int:
    """Memory that can be had; on a CPU no more than the container may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([1024 * available, *left_in_groups(Path("/sys/fs/cgroup"))])


def left_in_groups(root: Path) -> list[int]:
    """Bytes up to the limit of the control group, if there is one."""
    found = []
    for limit, statistics, kept in MEMORY_GROUPS:
        try:
            most = int((root / limit).read_text())
            rows = dict(line.split() for line in (root / statistics).read_text().splitlines())
            found.append(most - int(rows[kept]))
        except (OSError, ValueError, KeyError):
            continue  # of another version, or without a limit
    return found


def _weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """In the precision that they are loaded in, whatever the files have."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False
        )
    return sum(int(weight.numel()) for weight in model.parameters()) * dtype.itemsize
