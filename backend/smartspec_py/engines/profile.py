"""Stores measured costs on disk, so that only the first start measures them.

A profile is valid for a pair of models, a machine, settings, library versions and a driver. If any
of them changes, the server measures again. The file of a profile also stores what a server has
learned (`serving.learned`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from smartspec_py.core.cost import CostModel, cost_from_json
from smartspec_py.engines.base import Profilable
from smartspec_py.engines.measure import ProfileShape, measure

logger = logging.getLogger(__name__)

PROFILE_VERSION = 19
"""Raise it when the meaning of a stored number changes, or the engine becomes faster."""

BUSY_FACTOR = 0.7
"""A stored profile is measured again if one pass takes less than this share of its stored time:
the machine was busy then. If it takes longer, the machine may be busy now, and live steps correct
the costs. More tokens never take less than this share of the time of fewer ones either."""

PREPARING_S = 0.5
"""Seconds for the first passes of each size, at a start with a stored profile."""

WEIGHT_SUFFIXES, SAMPLE_BYTES = (".safetensors", ".bin", ".pt"), 4096

DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
"""Linux files with the version of NVIDIA's driver. A container may show only one of them."""


def read_profile(path: Path) -> dict[str, Any]:
    """The document of a profile; empty if there is none. A damaged one is logged, not raised."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
    return document


def _refuse(constant: str) -> None:
    """Reject NaN and infinities, which Python's JSON parser accepts. They would spread to all
    estimates."""
    raise ValueError(f"{constant} is not a finite number")


def write_json(path: Path, document: Any) -> None:
    """Write the document to a temporary file and rename it, so readers never see half a file.

    Raises OSError. In that case no file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def cached_profile(
    target: Profilable,
    draft: Profilable | None,
    shape: ProfileShape,
    folder: Path | None,
    identity: Sequence[str],
    budget_s: float = math.inf,
) -> CostModel:
    """Return the stored profile of this identity, or measure and store a new one.

    identity: everything else that the cost depends on: models, device, settings, library versions.
    The machine and its driver are added here.
    folder: None stores nothing. If it cannot be read or written, this is logged and not raised.
    budget_s: see `measure`.
    """
    path = profile_path(shape, folder, identity)
    if path is None:
        return measure(target, draft, shape, budget_s)
    if "cost" in (document := read_profile(path)):
        try:
            cost = cost_from_json(document["cost"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used (%s): measuring again", path, error)
        else:
            if not (falls(cost) or _is_from_a_busy_machine(cost, target, shape)):
                logger.info("profile read from %s", path)
                return cost
            logger.info("%s was measured on a busy machine: measuring again", path)
    start = time.perf_counter()
    cost = measure(target, draft, shape, budget_s)
    seconds = time.perf_counter() - start
    if falls(cost):
        logger.warning(
            "other programs were busy while passes were measured: more tokens seemed to take less "
            "time. The next start measures again; until then, live steps correct the costs"
        )
    try:
        store_cost(cost, path, _whole_identity(shape, identity))
    except OSError as error:
        logger.warning(
            "engine.profile_cache: the profile, measured in %.1f s, cannot be stored (%s). The "
            "next start measures again: set a folder that can be written",
            seconds,
            error,
        )
    else:
        logger.info("profiled in %.1f s, stored in %s", seconds, path)
    return cost


def falls(cost: CostModel) -> bool:
    """Whether more tokens took much less time, see BUSY_FACTOR."""
    tables = [table for table in (cost.target, cost.draft) if table is not None]
    return any(
        now < BUSY_FACTOR * most
        for table in tables
        for row in table.seconds
        for most, now in zip(accumulate(row, max), row[1:], strict=False)
    )


def _is_from_a_busy_machine(cost: CostModel, target: Profilable, shape: ProfileShape) -> bool:
    """See BUSY_FACTOR. Runs numbers of tokens of one row, and so prepares the engine for the passes
    of the first request too, where that takes long in comparison: with small models."""
    longest, until_s = shape.max_draft_len + 1, time.monotonic() + PREPARING_S
    for num_tokens in range(1, longest + 1):
        if time.monotonic() >= until_s:
            break
        target.time_pass(1, num_tokens, shape.context_len)
    seconds = min(target.time_pass(1, longest, shape.context_len) for _ in range(2))
    return seconds < BUSY_FACTOR * cost.target.pass_s(1, longest)


def profile_path(shape: ProfileShape, folder: Path | None, identity: Sequence[str]) -> Path | None:
    """The file that `cached_profile` uses for the same arguments; None without a folder."""
    if folder is None:
        return None
    text = "\n".join(_whole_identity(shape, identity))
    return folder / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _whole_identity(shape: ProfileShape, identity: Sequence[str]) -> list[str]:
    machine = machine_name(), vector_instructions(), driver_name()
    return [f"v{PROFILE_VERSION}", repr(shape), *machine, *identity]


def store_cost(cost: CostModel, path: Path, identity: Sequence[str] = ()) -> None:
    write_json(path, {"identity": list(identity), "cost": asdict(cost)})


def load_cost(path: Path) -> CostModel:
    """Raises OSError, KeyError, TypeError or ValueError if the file is not a stored profile."""
    return cost_from_json(json.loads(path.read_text(encoding="utf-8"))["cost"])


def machine_name() -> str:
    """Number of cores, the processor, and the architecture. Linux also tells family and model:
    virtual machines may give different processors the same name."""
    about = _cpuinfo()
    name = about.get("model name") or platform.processor()
    if "cpu family" in about:
        name += f" (family {about['cpu family']}, model {about.get('model')})"
    return f"{os.cpu_count()} x {name}, {platform.machine()}"


def vector_instructions() -> str:
    """The processor's vector instructions (Linux only)."""
    flags = _cpuinfo().get("flags", "").split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma"))))


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The fields of the first processor."""
    text = path.read_text() if path.is_file() else ""
    lines = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}


def driver_name(files: Sequence[Path] = DRIVER_FILES) -> str:
    """The version of NVIDIA's driver, read from the first of the files that exists."""
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return "no NVIDIA driver"
    return f"NVIDIA driver {file.read_text().partition(chr(10))[0].strip()}"


def fingerprint(folder: Path, config: str = "config.json") -> str:
    """A hash of a model directory: its config, and of its weight files the names, the sizes and a
    sample, which differs if the same model was trained again; or where its GGUF file is."""
    digest = hashlib.sha256()
    for path in (folder / config, folder / "gguf.json"):
        if path.is_file():
            digest.update(path.read_bytes())
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for place in (size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
