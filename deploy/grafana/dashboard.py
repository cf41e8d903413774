"""Writes the Grafana dashboard from the table in panels.py.

python deploy/grafana/dashboard.py        writes dashboards/smartspec.json

A test checks that the file matches the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from panels import ROWS, Panel

OUTPUT = Path(__file__).with_name("dashboards") / "smartspec.json"
SELECTOR = 'model=~"$model", instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8


def dashboard() -> dict[str, Any]:
    """The document that Grafana loads."""
    return {
        "uid": "smartspec",
        "title": "SmartSpec",
        "description": "Speculative decoding on Triton: load, drafts, time, errors.",
        "tags": ["smartspec", "triton"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "source",
        "label": "Source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }
    return [
        source,
        _variable("model", "label_values(smartspec_config_info, model)"),
        _variable("instance", 'label_values(smartspec_config_info{model=~"$model"}, instance)'),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[dict[str, Any]]:
    """All rows, with three panels side by side."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": place})
        y += 1
        for number, panel in enumerate(row.panels):
            place = {
                "x": number % COLUMNS * WIDTH,
                "y": y + number // COLUMNS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += -(-len(row.panels) // COLUMNS) * HEIGHT
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {
        "fillOpacity": 25 if panel.stacked else 5,
        "stacking": stacking,
        "showPoints": "never",
    }
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expr.replace("WHERE", SELECTOR),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def dashboard_text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUTPUT.write_text(dashboard_text(), encoding="utf-8")
