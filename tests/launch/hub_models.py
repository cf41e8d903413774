"""Configurations whose models are on the hub, and the files of those models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smartspec_launch.models import with_local_models
from smartspec_py.config import ServerConfig

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"


def files_of(folder: Path) -> dict[str, bytes]:
    """By the path in the folder, as `HubStandIn.add` takes them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def config_of(**engine: Any) -> ServerConfig:
    """engine: its fields beside the kind."""
    return ServerConfig.model_validate({"engine": {"kind": "local", **engine}})


def found(said: list[str] | None = None, **engine: Any) -> ServerConfig:
    """The configuration with the paths of what was fetched. said: gets what a person is told."""
    return with_local_models(config_of(**engine), (said if said is not None else []).append)
