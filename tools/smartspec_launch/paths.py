"""Where files go that outlive a run: the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


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
