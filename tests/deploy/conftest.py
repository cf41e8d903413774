"""Puts this folder and the scripts of the images and the dashboard on the path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEPLOY = HERE.parents[1] / "deploy"
sys.path[:0] = [str(HERE), *(str(DEPLOY / name) for name in ("image", "grafana"))]
