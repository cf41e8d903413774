"""The GPUs of TensorRT-LLM engines, checked before they are loaded. Never run on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.serving.config import ConfigError, TrtllmEngineConfig

Devices = tuple[int, ...]


def place(
    config: TrtllmEngineConfig, engines: Mapping[Role, Engine], num_found: int
) -> dict[Role, Devices]:
    """The GPUs of each engine, one per rank. num_found: number of GPUs of this machine.

    Raises ConfigError, with the key, the value and the range.
    """
    target, draft = engines[Role.TARGET], engines.get(Role.DRAFT)
    devices = config.devices or tuple(range(target.num_ranks))
    found = {Role.TARGET: _checked("devices", devices, target.num_ranks, num_found)}
    if draft is not None:
        shared = devices if len(devices) >= draft.num_ranks else range(draft.num_ranks)
        devices = config.draft_devices or tuple(shared[: draft.num_ranks])
        found[Role.DRAFT] = _checked("draft_devices", devices, draft.num_ranks, num_found)
    elif config.draft_devices is not None:
        raise ConfigError("engine.json: engine.draft_devices: needs engine.draft: leave it out")
    return found


def _checked(key: str, devices: Devices, num_ranks: int, num_found: int) -> Devices:
    got = f"engine.json: engine.{key}: got {list(devices)}"
    if len(devices) != num_ranks:
        raise ConfigError(f"{got}, must be {num_ranks} numbers, one GPU per rank of the engine")
    if max(devices) >= num_found:
        raise ConfigError(f"{got}, must be numbers from 0 to {num_found - 1}, the GPUs found")
    return devices
