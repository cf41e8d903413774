"""What a server stored of its costs, for whoever simulates it."""

from __future__ import annotations

import json
from pathlib import Path

from smartspec_py.core.cost import CostModel
from smartspec_py.serving.step_trace import cost_from_json


def load_observed(path: Path) -> CostModel:
    """`load_cost`, with passes as they were while serving, where a server has stored that."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return cost_from_json(document.get("observed") or document["cost"])
