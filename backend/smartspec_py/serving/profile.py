"""Times an engine's passes before it serves, and keeps the result on disk.

The profile belongs to a pair of models on a machine with given settings, libraries and driver; any
of them changed, it is measured anew. A few seconds, once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import Profilable

logger = logging.getLogger(__name__)

PROFILE_VERSION = 1
"""Raise it when the meaning of a stored number changes."""

NUM_ROUNDS = 3
ROW_GRID = (1, 2, 4, 8, 16, 32, 64, 128)
TOKEN_GRID = (1, 2, 3, 4, 6, 8, 12, 16)
CATCH_UP_TOKENS = 64

DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
"""Where Linux tells the version of NVIDIA's driver; a container may show only one of them."""


@dataclass(frozen=True)
class ProfileShape:
    """Which passes a server can come to run. context_len: tokens of context to measure at."""

    max_sequences: int
    max_draft_len: int
    context_len: int


def profile(target: Profilable, draft: Profilable | None, shape: ProfileShape) -> CostModel:
    """Measure a cost model: target passes over rows x tokens, draft passes over rows."""
    rows = _grid(ROW_GRID, shape.max_sequences)
    tokens = _grid(TOKEN_GRID, shape.max_draft_len + 1)
    table = _table("target", target, rows, tokens, shape.context_len)
    if draft is None:
        return CostModel(target=table)
    catch_up_s = _best_s("catch-up", draft, [(1, CATCH_UP_TOKENS, 0)])[0] / CATCH_UP_TOKENS
    draft_table = _table("draft", draft, rows, (1,), shape.context_len)
    return CostModel(table, draft_table, catch_up_s=catch_up_s)


def _grid(grid: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*(value for value in grid if value < largest), largest)


def _table(
    name: str,
    engine: Profilable,
    rows: tuple[int, ...],
    tokens: tuple[int, ...],
    context_len: int,
) -> PassTable:
    # The longest batch tells most about context: its keys and values are the most to read.
    shorter = context_len // 4
    points = [(r, t, context_len) for r in rows for t in tokens] + [(rows[-1], tokens[0], shorter)]
    *found, at_shorter = _best_s(name, engine, points)
    width = len(tokens)
    seconds = tuple(tuple(found[i : i + width]) for i in range(0, len(found), width))
    saved_s = max(0.0, seconds[-1][0] - at_shorter)
    return PassTable(
        rows, tokens, seconds, context_len, saved_s / (rows[-1] * max(1, context_len - shorter))
    )


def _best_s(name: str, engine: Profilable, points: Sequence[tuple[int, int, int]]) -> list[float]:
    """Seconds of a pass at each (rows, tokens a row, context): the best of several rounds.

    What disturbs a pass only adds to it, so the best is what the pass itself takes; and rounds go
    over all points in turn, so that a disturbance does not hit one point alone.
    """
    engine.time_pass(*points[-1])  # the first pass pays for allocations
    rounds = []
    for number in range(NUM_ROUNDS):
        logger.info("timing %s passes: round %d of %d", name, number + 1, NUM_ROUNDS)
        rounds.append([engine.time_pass(*point) for point in points])
    return [min(column) for column in zip(*rounds, strict=True)]


def cached_profile(
    target: Profilable,
    draft: Profilable | None,
    shape: ProfileShape,
    folder: Path | None,
    identity: Sequence[str],
) -> CostModel:
    """The stored profile of this identity, or a new one that is then stored.

    identity: whatever else the cost depends on: models, device, settings, versions of libraries.
    The machine and its driver are added here. folder: None keeps nothing.
    """
    if folder is None:
        return profile(target, draft, shape)
    parts = [f"v{PROFILE_VERSION}", repr(shape), machine_name(), driver_name(), *identity]
    path = folder / f"profile-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.json"
    if path.is_file():
        try:
            cost = load_cost(path)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s): measuring again", path, error)
        else:
            logger.info("profile read from %s", path)
            return cost
    start = time.perf_counter()
    cost = profile(target, draft, shape)
    folder.mkdir(parents=True, exist_ok=True)
    store_cost(cost, path, parts)
    logger.info("profiled in %.1f s, kept in %s", time.perf_counter() - start, path)
    return cost


def store_cost(cost: CostModel, path: Path, identity: Sequence[str] = ()) -> None:
    """Written beside and then renamed, so that a reader never sees half a file."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"identity": list(identity), "cost": asdict(cost)}, indent=1))
    partial.rename(path)


def load_cost(path: Path) -> CostModel:
    raw = json.loads(path.read_text())["cost"]
    draft = raw.pop("draft")
    return CostModel(
        target=_load_table(raw.pop("target")), draft=draft and _load_table(draft), **raw
    )


def _load_table(raw: dict[str, object]) -> PassTable:
    def fixed(value: object) -> object:
        return tuple(fixed(item) for item in value) if isinstance(value, list) else value

    return PassTable(**{name: fixed(value) for name, value in raw.items()})  # type: ignore[arg-type]


def machine_name() -> str:
    """Cores, the processor's model where Linux tells it, and the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    return f"{os.cpu_count()} x {name}, {platform.machine()}"


def driver_name(files: Sequence[Path] = DRIVER_FILES) -> str:
    """The version of NVIDIA's driver, as the first file that is there tells it."""
    found = next((path for path in files if path.is_file()), None)
    if found is None:
        return "no NVIDIA driver"
    return f"NVIDIA driver {found.read_text().partition(chr(10))[0].strip()}"


def fingerprint(folder: Path) -> str:
    """Tells one model directory from another: its config, and the names and sizes of its files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
    return digest.hexdigest()
