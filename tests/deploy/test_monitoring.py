"""Dashboard and alerts ask only for metrics and labels that the server shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from smartspec_py.serving.metric_families import FAMILIES, Kind
from smartspec_py.serving.metrics import COST_PARTS, DECIDERS, PREDICTORS

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCUMENT = json.loads((DEPLOY / "grafana/dashboards/smartspec.json").read_text())
PANELS = [panel for panel in DOCUMENT["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]

TRITON = {"nv_inference_request_success": set[str](), "nv_inference_request_failure": {"reason"}}
"""Of Triton's own metrics, those that are asked for, with their labels beside model and version."""

SCRAPED = {"job", "instance", "namespace", "service", "pod"}
"""Labels that Prometheus adds."""

VALUES = {
    "part": set(COST_PARTS),
    "predictor": set(PREDICTORS),
    "decider": set(DECIDERS),
    "reason": {"invalid_argument", "unavailable", "internal"},
    "job": {"smartspec"},
}


def shown() -> dict[str, set[str]]:
    """Labels of every series by its name, as they are on the metrics port."""
    series = {"up": SCRAPED, **{name: own | SCRAPED for name, own in TRITON.items()}}
    for family in FAMILIES:
        labels = {"model", "version", *family.labels} | SCRAPED
        if family.kind is Kind.HISTOGRAM:
            series[f"{family.name}_bucket"] = labels | {"le"}
            series[f"{family.name}_sum"] = series[f"{family.name}_count"] = labels
        else:
            series[family.name] = labels
    return {name: labels | {"model", "version"} for name, labels in series.items()}


SHOWN = shown()


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def parsed(expr: str) -> Any:
    """Grafana's variables replaced by what it could put there."""
    for variable, value in {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}.items():
        expr = expr.replace(variable, value)
    return promql.parse(expr)


def selectors(expr: str) -> list[Any]:
    """All vector selectors of the query."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        inner = getattr(node, "vector_selector", node)
        if isinstance(inner, promql.VectorSelector):
            found.append(inner)
        return True

    promql.walk(parsed(expr), visit)
    return found


QUERIES = [
    *dashboard_queries(),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]


@pytest.mark.parametrize(("name", "expr"), QUERIES, ids=[name for name, _ in QUERIES])
def test_queries_ask_for_what_is_shown(name: str, expr: str) -> None:
    used = selectors(expr)
    # A text search as well, in case that the walk does not reach some part of a query.
    assert {each.name for each in used} == set(re.findall(r"\b(?:smartspec|nv)_\w+|\bup\b", expr))
    for selector in used:
        assert selector.name in SHOWN
        for matcher in selector.matchers.matchers:
            assert matcher.name in SHOWN[selector.name], selector.name
            if matcher.op == promql.MatchOp.Equal and matcher.name in VALUES:
                assert matcher.value in VALUES[matcher.name]
    labels = set.union(*(SHOWN[each.name] for each in used))
    for group in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= labels
    # Counters are used as rates, gauges directly.
    kinds = {family.name: family.kind for family in FAMILIES}
    over_time = set(re.findall(r"(?:rate|increase)\((\w+)", expr))
    for selector in used:
        stem = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        is_counted = kinds.get(selector.name) is Kind.COUNTER or kinds.get(stem) is Kind.HISTOGRAM
        is_counted |= selector.name.startswith("nv_")
        assert (selector.name in over_time) == is_counted, selector.name


def test_every_metric_of_the_controller_is_on_the_dashboard() -> None:
    """What speculation does is why there is a dashboard: nothing of it may be left out."""
    asked = {selector.name for _, expr in dashboard_queries() for selector in selectors(expr)}
    for family in FAMILIES:
        if family.labels and family.name != "smartspec_config_info":
            assert family.name in asked


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_every_alert_has_its_first_steps_in_the_handbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["for"]
    assert "$labels.instance" in rule["annotations"]["summary"]
    assert f"### {rule['alert']}\n" in (REPOSITORY / "docs/operate/troubleshooting.md").read_text()


def test_every_alert_has_a_unit_test() -> None:
    """Promtool runs them, where it is: see scripts/check_deploy."""
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yml").read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in ALERTS}
