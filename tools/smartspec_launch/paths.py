"""Where files go that outlive a run: the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from smartspec_py.serving.config import ServerConfig


def cache_dir() -> Path:
    """XDG's cache directory, or its usual place, for this program; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smartspec"


def profile_cache() -> Path:
    """Profiles of step costs, by model and machine."""
    return cache_dir() / "profiles"


def run_dir(http_port: int) -> Path:
    """What a server on this port is started on; two cannot share a port, nor then a directory."""
    return cache_dir() / f"run-{http_port}"


PATHS = ("model", "draft", "target", "tokenizer", "profile_cache")
"""Keys of `engine` that are paths."""


def with_absolute_paths(config: ServerConfig, folder: Path) -> ServerConfig:
    """The same for another folder than the one that engine.json's paths are relative to."""
    found = {name: getattr(config.engine, name, None) for name in PATHS}
    paths = {name: str((folder / path).resolve()) for name, path in found.items() if path}
    return config.model_copy(update={"engine": config.engine.model_copy(update=paths)})
