"""The chart, rendered by helm's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "helm"
CHART = FOLDER / "smartspec"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in (FOLDER / "examples").iterdir()}

Documents = dict[str, dict[str, Any]]


def render(values: dict[str, Any]) -> Documents:
    """What the chart makes of these values, by kind; there is one of each."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name="demo", namespace="prod")
    found = [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]
    kinds = [document["kind"] for document in found]
    assert len(kinds) == len(set(kinds))
    return dict(zip(kinds, found, strict=True))
