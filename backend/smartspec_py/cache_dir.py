"""Where the program keeps files that it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """This program's folder in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smartspec"
