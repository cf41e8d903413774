"""The GPUs of TensorRT-LLM engines, checked before they are loaded.

Each rank of an engine has one GPU. The ranks of the target may be spread over several machines with
the same GPU numbers; those of the draft are on the first machine. The limits are those of
`executorImpl.cpp` and `worldConfig.cpp` of TensorRT-LLM 1.x. This project ran none of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.serving.config import ConfigError, TrtllmEngineConfig

Devices = tuple[int, ...]

GPUS_PER_NODE = 8
"""The default of an engine's `gpus_per_node`. GPU numbers must be below it."""


def place(
    config: TrtllmEngineConfig, engines: Mapping[Role, Engine], num_found: int
) -> dict[Role, Devices]:
    """The GPUs of each engine on each of its machines, one per rank there.

    num_found: number of GPUs of this machine. Raises ConfigError, with the key, the value and the
    range.
    """
    if config.draft_devices is not None and Role.DRAFT not in engines:
        raise ConfigError(
            f"engine.json: engine.draft_devices: got {list(config.draft_devices)}, but there is no "
            "engine.draft: leave it out"
        )
    target = engines[Role.TARGET]
    devices = config.devices or tuple(range(-(-target.num_ranks // config.num_nodes)))
    found = {Role.TARGET: _checked("devices", devices, target, num_found, config.num_nodes)}
    if draft := engines.get(Role.DRAFT):
        shared = devices if len(devices) >= draft.num_ranks else range(draft.num_ranks)
        of_draft = config.draft_devices or tuple(shared[: draft.num_ranks])
        found[Role.DRAFT] = _checked("draft_devices", of_draft, draft, num_found, 1)
    return found


def _checked(key: str, devices: Devices, engine: Engine, num_found: int, num_nodes: int) -> Devices:
    got = f"engine.json: engine.{key}: got {list(devices)}"
    if len(devices) * num_nodes != engine.num_ranks:
        nodes = f", and engine.num_nodes is {num_nodes}" if num_nodes > 1 else ""
        raise ConfigError(
            f"{got}, but tp * pp * cp of the {engine.role} engine is {engine.num_ranks}{nodes}: "
            "name one GPU per rank of a node, or rebuild with another --tp or --draft-tp"
        )
    most = engine.count("pretrained_config.mapping.gpus_per_node", GPUS_PER_NODE)
    limit = min(num_found, most)
    if max(devices) >= limit:
        raise ConfigError(
            f"{got}, must be numbers from 0 to {limit - 1}, because this machine has {num_found} "
            f"GPUs and the engine was built for {most} per node"
        )
    return devices
