"""Paths in the user's cache directory, for files that are kept after a run, and those of
engine.json."""

from __future__ import annotations

from pathlib import Path

from smartspec_launch.hub import HubName, hub_name
from smartspec_py.cache_dir import cache_dir
from smartspec_py.config import IS_MODEL, ServerConfig


def profile_cache() -> Path:
    """The folder of step cost profiles, one per model and machine."""
    return cache_dir() / "profiles"


def run_dir(http_port: int) -> Path:
    """The run directory of a server on this port. Each port has its own directory."""
    return cache_dir() / f"run-{http_port}"


def name_of(path: Path) -> str:
    """What a person calls the model of this path: its name on the hub, or that of the folder."""
    if path.parent.name == "snapshots" and path.parts[-3].startswith("models--"):
        return path.parts[-3].removeprefix("models--").replace("--", "/")
    return path.name


def with_absolute_paths(config: ServerConfig, folder: Path) -> ServerConfig:
    """The configuration with absolute engine paths. Relative paths are resolved from `folder`.
    Names of the hub stay as they are."""
    names = hub_names(config, folder)
    paths = {
        key: str((folder / path).resolve())
        for key, path in config.engine.paths().items()
        if key not in names
    }
    return config.model_copy(update={"engine": config.engine.with_paths(paths)})


def with_profile_cache(config: ServerConfig) -> ServerConfig:
    """The configuration with the default `engine.profile_cache`, if its engine has this key and the
    file does not name it."""
    if getattr(config.engine, "profile_cache", "") is not None:
        return config
    engine = config.engine.model_copy(update={"profile_cache": str(profile_cache())})
    return config.model_copy(update={"engine": engine})


def hub_names(config: ServerConfig, folder: Path) -> dict[str, HubName]:
    """The names of the hub by their keys of `engine`. What is a path that exists is no name."""
    names = {
        key: hub_name(text)
        for key, text in config.engine.paths(IS_MODEL).items()
        if not (folder / text).exists()
    }
    return {key: name for key, name in names.items() if name is not None}
