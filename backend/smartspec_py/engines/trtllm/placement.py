"""The GPUs of TensorRT-LLM engines, checked before they are loaded. Never run on GPUs.

Each rank of an engine has one GPU. The ranks of the target may be spread over several machines with
the same GPU numbers; those of the draft are on the first machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.serving.config import ConfigError, TrtllmEngineConfig

Devices = tuple[int, ...]

GPUS_PER_NODE = 8
"""The default of an engine's `gpus_per_node`. The executor takes only GPU numbers below it."""


def place(
    config: TrtllmEngineConfig, engines: Mapping[Role, Engine], num_found: int
) -> dict[Role, Devices]:
    """The GPUs of each engine on each of its machines, one per rank there.

    num_found: number of GPUs of this machine. Raises ConfigError, with the key, the value and the
    range.
    """
    target = engines[Role.TARGET]
    devices = config.devices or tuple(range(-(-target.num_ranks // config.num_nodes)))
    found = {Role.TARGET: _checked("devices", devices, target, num_found, config.num_nodes)}
    if draft := engines.get(Role.DRAFT):
        shared = devices if len(devices) >= draft.num_ranks else range(draft.num_ranks)
        of_draft = config.draft_devices or tuple(shared[: draft.num_ranks])
        found[Role.DRAFT] = _checked("draft_devices", of_draft, draft, num_found, 1)
    elif config.draft_devices is not None:
        raise ConfigError(
            f"engine.json: engine.draft_devices: got {list(config.draft_devices)}, but there is no "
            "engine.draft: leave it out"
        )
    return found


def _checked(key: str, devices: Devices, engine: Engine, num_found: int, num_nodes: int) -> Devices:
    got = f"engine.json: engine.{key}: got {list(devices)}"
    if len(devices) * num_nodes != engine.num_ranks:
        raise ConfigError(
            f"{got}, but tp * pp * cp of the {engine.role} engine is {engine.num_ranks} on "
            f"{num_nodes} machine(s): name one GPU per rank of a machine"
        )
    limit = min(num_found, engine.model("mapping.gpus_per_node", GPUS_PER_NODE))
    if max(devices) >= limit:
        raise ConfigError(
            f"{got}, must be numbers from 0 to {limit - 1}: this machine has {num_found} GPUs"
        )
    return devices
