"""Reads the costs that a server stored, for simulations of that server."""

from __future__ import annotations

import json
from pathlib import Path

from smartspec_py.core.cost import CostModel
from smartspec_py.serving.step_trace import cost_from_json


def load_observed(path: Path) -> CostModel:
    """The cost model of a stored profile. Uses pass times observed while serving, if present."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return cost_from_json(document.get("observed") or document["cost"])
