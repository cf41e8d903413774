"""The devices of the PyTorch engine's models, checked before anything is loaded.

Target and draft model may have different GPUs. Only token ids and, for sampled drafts, their
distributions pass from one to the other. Heads are on the target's device. This project never ran a
pair on two GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smartspec_py.defaults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.config import TorchEngineConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """draft: also set without a draft model; then equal to target."""

    target: torch.device
    draft: torch.device

    def __str__(self) -> str:
        is_shared = self.draft == self.target
        return str(self.target) if is_shared else f"{self.target}, draft on {self.draft}"


def place(config: TorchEngineConfig) -> Placement:
    """Raises ConfigError, with the key, the value and the range."""
    target = _device("device", config.device)
    if config.draft_device is None:
        return Placement(target, target)
    got = f"engine.json: engine.draft_device: got {config.draft_device!r}"
    if config.draft is None:
        raise ConfigError(f"{got}, but there is no engine.draft: leave it out")
    draft = _device("draft_device", config.draft_device)
    if "cpu" in (target.type, draft.type):
        raise ConfigError(f"{got}, but engine.device is {target}: two devices must be GPUs")
    return Placement(target, draft)


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
    if number >= (found := torch.cuda.device_count()):
        raise ConfigError(
            f"engine.json: engine.{key}: {name!r} does not exist, because PyTorch finds {found} "
            "CUDA devices: set another device, or cpu"
        )
    return torch.device("cuda", number)
