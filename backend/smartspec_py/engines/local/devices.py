"""The devices of the local engine's models, checked before anything is loaded, and the precision
of their products.

Target and draft model may have different GPUs. Only token ids and, for sampled drafts, their
distributions pass from one to the other. Heads are on the target's device. This project never ran a
pair on two GPUs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smartspec_py.engines.runtimes.machine import cpu_has
from smartspec_py.faults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.config import LocalEngineConfig


@dataclass(frozen=True, slots=True)
class Devices:
    """draft: also set without a draft model; then equal to target."""

    target: torch.device
    draft: torch.device

    def __str__(self) -> str:
        is_shared = self.draft == self.target
        return str(self.target) if is_shared else f"{self.target}, draft on {self.draft}"

    @property
    def kinds(self) -> str:
        """Without their numbers. Costs do not depend on whether two models share one."""
        kinds = [_device_name(self.target), _device_name(self.draft)]
        return ", draft on ".join(dict.fromkeys(kinds))


def place(config: LocalEngineConfig) -> Devices:
    """Raises ConfigError, with the key, the value and the range."""
    target = _device("device", config.device)
    if config.draft_device is None:
        return Devices(target, target)
    got = f"engine.json: engine.draft_device: got {config.draft_device!r}"
    if config.draft is None:
        raise ConfigError(f"{got}, but there is no engine.draft: leave it out")
    draft = _device("draft_device", config.draft_device)
    if "cpu" in (target.type, draft.type):
        raise ConfigError(f"{got}, but engine.device is {target}: two devices must be GPUs")
    return Devices(target, draft)


def _device(key: str, name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.json: engine.{key}: {name!r} is not supported: set auto, cpu, cuda or a "
            "device number such as cuda:1"
        )
    if device.type == "cpu":
        return device
    number = device.index or 0
    if number >= (num_gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"engine.json: engine.{key}: {name!r} does not exist, because PyTorch finds {num_gpus} "
            "CUDA devices: set another device, or cpu"
        )
    return torch.device("cuda", number)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype_of(name: str, device: torch.device, model: Path) -> torch.dtype:
    """The configured precision; for auto, that of the checkpoint. model: the folder of the target.

    On a CPU, auto uses float32 instead of float16, and instead of bfloat16 if the processor has no
    instructions for it. This loses no precision.
    """
    if name == "auto":
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
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
