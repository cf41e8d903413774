"""The device of the local engine's models, checked before anything is loaded, and the precision of
their products."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from smartspec_py.engines.checkpoints import checks
from smartspec_py.engines.runtimes.machine import cpu_has
from smartspec_py.faults import ConfigError, shown


def place(name: str) -> torch.device:
    """The device of this `engine.device`. Raises ConfigError, with the value and the range."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.json: engine.device: {shown(name)} is not supported: set auto, cpu, cuda or a "
            "device number such as cuda:1"
        )
    if device.type == "cpu":
        return device
    number = device.index or 0
    if number >= (num_gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"engine.json: engine.device: {shown(name)} does not exist, because PyTorch finds "
            f"{num_gpus} CUDA devices: set another device, or cpu"
        )
    return torch.device("cuda", number)


def device_name(device: torch.device) -> str:
    """Without its number, on which costs do not depend."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype_of(name: str, device: torch.device, model: Path) -> torch.dtype:
    """The configured precision; for auto, that of the checkpoint. model: the folder of the target.

    On a CPU, auto uses float32 instead of float16, and instead of bfloat16 if the processor has no
    instructions for it. This loses no precision.
    """
    if name == "auto":
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        name = checks.dtype_of(config)
        if device.type == "cpu" and not (name == "bfloat16" and cpu_has("avx512_bf16")):
            name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_text(wanted: torch.dtype, used: torch.dtype) -> str:
    """The precision in words, and why it is not the configured one."""
    of_wanted, of_used = (str(dtype).removeprefix("torch.") for dtype in (wanted, used))
    if used == wanted:
        return of_used
    return f"{of_used} (this processor has no instructions for {of_wanted})"
