"""Routing to several servers. scripts/check_deploy checks HAProxy's configuration by HAProxy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.requests import Settings
from smartspec_gateway.openai.app import create_app
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.metric_families import FAMILIES, RUNNING, WAITING, Kind

REPOSITORY = Path(__file__).resolve().parents[2]
HAPROXY = (REPOSITORY / "deploy/proxy/haproxy.cfg").read_text()
READY = f"/v2/models/{MODEL_NAME}/ready"


def test_the_proxy_sends_each_path_to_its_port() -> None:
    nothing: Any = None
    api = create_app(nothing, nothing, Settings("smartspec", Limits(512))).openapi()
    of_one_server = {"/health", "/metrics"}
    is_openai = dict.fromkeys(api["paths"].keys() - of_one_server, True) | {READY: False}
    assert is_openai["/tokenize"]
    [prefixes] = re.findall(r"use_backend openai if { path_beg (.+) }", HAPROXY)
    for path, expected in is_openai.items():
        assert path.startswith(tuple(prefixes.split())) == expected, path


def test_the_proxy_asks_whether_the_model_is_ready() -> None:
    """Triton is ready without the model. Port 8000 answers for all ports."""
    assert f"http-check send meth GET uri {READY}" in HAPROXY
    assert "default-server check port 8000 " in HAPROXY


def test_the_metrics_that_routers_need_are_gauges_of_the_server() -> None:
    page = (REPOSITORY / "docs/operate/scale.md").read_text()
    named = set(re.findall(r"`(smartspec_\w+)`", page.partition("Routers that choose")[2]))
    gauges = {family.name for family in FAMILIES if family.kind is Kind.GAUGE}
    assert {WAITING.name, RUNNING.name} < named <= gauges
