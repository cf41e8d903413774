"""Routing to several servers: the inference pool and Envoy. scripts/check_deploy checks HAProxy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from charts import EXAMPLES, render

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.requests import Settings
from smartspec_gateway.openai.app import create_app
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.metric_families import FAMILIES, RUNNING, WAITING, Kind

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
POOL: dict[str, dict[str, Any]] = {
    document["kind"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes/inference-pool.yaml").read_text())
}
READY = f"/v2/models/{MODEL_NAME}/ready"
CUSTOM = {"InferencePool", "HTTPRoute"}
"""Kinds without a schema in Kubernetes."""


@pytest.mark.parametrize("kind", sorted(POOL.keys() - CUSTOM))
def test_kubernetes_accepts_the_manifest(kind: str) -> None:
    kubernetes_validate.validate(POOL[kind], "1.37", strict=True)


def test_the_pool_has_the_pods_and_metrics_of_the_chart() -> None:
    service = render(EXAMPLES["gpu"])["Service"]["spec"]
    spec = POOL["InferencePool"]["spec"]
    assert spec["selector"]["matchLabels"] == service["selector"]
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert [port["number"] for port in spec["targetPorts"]] == [ports["openai"]]
    [container] = POOL["Deployment"]["spec"]["template"]["spec"]["containers"]
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
    assert flags["model-server-metrics-port"] == str(ports["metrics"])
    assert flags["total-queued-requests-metric"] == WAITING.name
    assert flags["total-running-requests-metric"] == RUNNING.name
    kinds = {family.name: family.kind for family in FAMILIES}
    for name in (value for key, value in flags.items() if key.endswith("-metric") and value):
        assert kinds[name] is Kind.GAUGE


def test_proxies_send_each_path_to_its_port() -> None:
    nothing: Any = None
    api = create_app(nothing, nothing, Settings("smartspec", Limits(512))).openapi()
    of_one_server = {"/health", "/metrics"}
    is_openai = dict.fromkeys(api["paths"].keys() - of_one_server, True) | {READY: False}
    assert is_openai["/tokenize"]

    haproxy = (DEPLOY / "proxy/haproxy.cfg").read_text()
    [prefixes] = re.findall(r"use_backend openai if { path_beg (.+) }", haproxy)
    envoy = yaml.safe_load((DEPLOY / "proxy/envoy.yaml").read_text())
    [listener] = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    _, openai, _, triton = (route["match"] for route in routes)
    assert triton == {"prefix": "/"}
    for path, expected in is_openai.items():
        assert path.startswith(tuple(prefixes.split())) == expected, path
        assert bool(re.fullmatch(openai["safe_regex"]["regex"], path)) == expected, path


def test_proxies_ask_whether_the_model_is_ready() -> None:
    """Triton is ready without the model. Port 8000 answers for all ports."""
    assert f"http-check send meth GET uri {READY}" in (DEPLOY / "proxy/haproxy.cfg").read_text()
    envoy = yaml.safe_load((DEPLOY / "proxy/envoy.yaml").read_text())
    for cluster in envoy["static_resources"]["clusters"]:
        [check] = cluster["health_checks"]
        assert check["http_health_check"]["path"] == READY
        for group in cluster["load_assignment"]["endpoints"]:
            for endpoint in (each["endpoint"] for each in group["lb_endpoints"]):
                port = endpoint["address"]["socket_address"]["port_value"]
                assert endpoint.get("health_check_config", {}).get("port_value", port) == 8000
