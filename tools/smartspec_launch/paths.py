"""Paths in the user's cache directory, for files that are kept after a run."""

from __future__ import annotations

import os
from pathlib import Path

from smartspec_py.config import ServerConfig


def cache_dir() -> Path:
    """This program's folder in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smartspec"


def profile_cache() -> Path:
    """The folder of step cost profiles, one per model and machine."""
    return cache_dir() / "profiles"


def run_dir(http_port: int) -> Path:
    """The run directory of a server on this port. Each port has its own directory."""
    return cache_dir() / f"run-{http_port}"


def with_absolute_paths(config: ServerConfig, folder: Path) -> ServerConfig:
    """The configuration with absolute engine paths. Relative paths are resolved from `folder`."""
    found = config.engine.paths()
    paths = {name: str((folder / path).resolve()) for name, path in found.items()}
    return config.model_copy(update={"engine": config.engine.model_copy(update=paths)})
