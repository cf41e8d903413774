"""The context length of the PyTorch engine if engine.json does not set it.

Cache rows are reserved at the start, and each has room for the full context. The context length is
the longest that the target supports and whose rows fit into a share of the free memory of each
device. Free memory is what remains after the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smartspec_py.defaults import DEFAULT_CONTEXT_LEN
from smartspec_py.engines.runtimes.machine import free_bytes
from smartspec_py.engines.runtimes.runner import bytes_per_token

CACHE_SHARE = 0.5
"""Share of the memory left after the weights. Passes, CUDA graphs and other programs need some
too."""

STEP = 512
"""A context length that memory limits is a multiple of this. The cached profile depends on the
context length, so a start with slightly less free memory can still use it."""


def choose_context_len(
    models: Sequence[tuple[Path, torch.device]],
    dtype: torch.dtype,
    num_rows: int,
    kv_cache: str = "auto",
) -> tuple[int, str]:
    """The context length for these models together, and the reason for it in words.

    models: the folder of each model, the target first, and its device. kv_cache: see
    `config.TorchEngineConfig`.
    """
    configs = [
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for folder, _ in models
    ]
    reach = getattr(configs[0], "max_position_embeddings", None)
    name = models[0][0].name if reach else ""
    reach = reach or DEFAULT_CONTEXT_LEN
    of_device: dict[torch.device, list[Any]] = {}
    for config, (_, device) in zip(configs, models, strict=True):
        of_device.setdefault(device, []).append(config)
    fitting, left = min(
        _fitting(together, device, dtype, num_rows, kv_cache=kv_cache)
        for device, together in of_device.items()
    )
    if reach <= fitting:
        return reach, f"all positions of {name}" if name else "the models set no limit"
    share = f"{CACHE_SHARE:.0%} of the {max(0, left) / 2**30:.1f} GiB that the weights leave free"
    return fitting, f"{num_rows} rows of this length fit in {share}; {name} has {reach} positions"


def _fitting(
    configs: Sequence[Any], device: torch.device, dtype: torch.dtype, num_rows: int, kv_cache: str
) -> tuple[int, int]:
    """The context length for which a device with these models has memory, and the bytes that their
    weights leave free."""
    each = [bytes_per_token(config, device, dtype, kv_cache) for config in configs]
    row_bytes = num_rows * sum(each)
    left = free_bytes(device) - sum(_weight_bytes(config, dtype) for config in configs)
    return max(DEFAULT_CONTEXT_LEN, int(CACHE_SHARE * left / row_bytes) // STEP * STEP), left


def _weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights in the precision in which they are loaded."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False
        )
    return sum(int(weight.numel()) for weight in model.parameters()) * dtype.itemsize
