"""Paths in the user's cache directory, for files that are kept after a run."""

from __future__ import annotations

from pathlib import Path

from smartspec_py.config import ServerConfig
from smartspec_py.defaults import cache_dir
from smartspec_py.engines.checkpoints.gguf.folder import model_folder


def profile_cache() -> Path:
    """The folder of step cost profiles, one per model and machine."""
    return cache_dir() / "profiles"


def run_dir(http_port: int) -> Path:
    """The run directory of a server on this port. Each port has its own directory."""
    return cache_dir() / f"run-{http_port}"


def with_absolute_paths(config: ServerConfig, folder: Path) -> ServerConfig:
    """The configuration with absolute engine paths. Relative paths are resolved from `folder`. A
    GGUF file becomes the folder that is made of it, but heads and adapters are in no such file.
    Raises ConfigError."""
    found = {name: folder / path for name, path in config.engine.paths().items()}
    paths = {
        name: str((path if name.startswith(("heads", "lora.")) else model_folder(path)).resolve())
        for name, path in found.items()
    }
    return config.model_copy(update={"engine": config.engine.with_paths(paths)})
