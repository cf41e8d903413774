"""Puts what the images and the dashboard are made by on the path: they are scripts, no packages."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "deploy" / name) for name in ("image", "grafana")]
