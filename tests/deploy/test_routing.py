"""Routing to several servers: the inference pool, HAProxy and Envoy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from charts import EXAMPLES, render

from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.metric_families import FAMILIES, RUNNING, WAITING, Kind

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
POOL: dict[str, dict[str, Any]] = {
    document["kind"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes/inference-pool.yaml").read_text())
}
HAPROXY = (DEPLOY / "proxy/haproxy.cfg").read_text()
ENVOY = yaml.safe_load((DEPLOY / "proxy/envoy.yaml").read_text())
READY = f"/v2/models/{MODEL_NAME}/ready"


CUSTOM = {"InferencePool", "HTTPRoute"}
"""Kinds without a schema in Kubernetes."""


@pytest.mark.parametrize("kind", sorted(POOL.keys() - CUSTOM))
def test_kubernetes_accepts_the_manifest(kind: str) -> None:
    kubernetes_validate.validate(POOL[kind], "1.37", strict=True)


def test_the_pool_has_the_pods_of_the_chart() -> None:
    service = render(EXAMPLES["gpu"])["Service"]["spec"]
    spec = POOL["InferencePool"]["spec"]
    assert spec["selector"]["matchLabels"] == service["selector"]
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert [port["number"] for port in spec["targetPorts"]] == [ports["openai"]]
    [container] = POOL["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert f"--model-server-metrics-port={ports['metrics']}" in container["args"]


def test_the_picker_reads_gauges_that_the_server_has() -> None:
    [container] = POOL["Deployment"]["spec"]["template"]["spec"]["containers"]
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
    assert flags["total-queued-requests-metric"] == WAITING.name
    assert flags["total-running-requests-metric"] == RUNNING.name
    kinds = {family.name: family.kind for family in FAMILIES}
    for name in (value for key, value in flags.items() if key.endswith("-metric") and value):
        assert kinds[name] is Kind.GAUGE


def test_haproxy_accepts_the_file() -> None:
    haproxy = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not Path(haproxy).exists():
        pytest.skip("haproxy is not installed")
    command = [haproxy, "-c", "-f", DEPLOY / "proxy/haproxy.cfg"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr


def test_haproxy_asks_for_the_model_and_retries_what_was_refused() -> None:
    assert f"http-check send meth GET uri {READY}" in HAPROXY
    retried = re.findall(r"^\s*retry-on (.*)$", HAPROXY, re.MULTILINE)
    assert [set(each.split()) for each in retried] == [
        {"conn-failure", "empty-response", "502", "503"}
    ]
    backends = re.findall(r"^backend (\w+)$", HAPROXY, re.MULTILINE)
    assert HAPROXY.count("balance leastconn") == len(backends) == 3


def clusters() -> dict[str, dict[str, Any]]:
    return {cluster["name"]: cluster for cluster in ENVOY["static_resources"]["clusters"]}


def envoy_routes() -> list[dict[str, Any]]:
    [listener] = ENVOY["static_resources"]["listeners"]
    [chain] = listener["filter_chains"]
    [manager] = chain["filters"]
    [host] = manager["typed_config"]["route_config"]["virtual_hosts"]
    assert host["retry_policy"]["retry_on"] == "connect-failure,refused-stream,gateway-error"
    return list(host["routes"])


def test_envoy_asks_for_the_model_at_the_port_that_knows() -> None:
    for cluster in clusters().values():
        [check] = cluster["health_checks"]
        assert check["http_health_check"]["path"] == READY
        assert cluster["common_lb_config"]["healthy_panic_threshold"]["value"] == 0
        for group in cluster["load_assignment"]["endpoints"]:
            for each in group["lb_endpoints"]:
                endpoint = each["endpoint"]
                port = endpoint["address"]["socket_address"]["port_value"]
                asked = endpoint.get("health_check_config", {}).get("port_value", port)
                assert asked == 8000


def test_envoy_routes_sessions_by_their_header_and_limits_no_stream() -> None:
    found = envoy_routes()
    assert {route["route"]["cluster"] for route in found} == set(clusters())
    assert all(route["route"]["timeout"] == "0s" for route in found)
    for route in found:
        is_session = "headers" in route["match"]
        cluster = clusters()[route["route"]["cluster"]]
        assert cluster["lb_policy"] == ("RING_HASH" if is_session else "LEAST_REQUEST")
        assert ("hash_policy" in route["route"]) == is_session
    # The first route that fits is taken.
    paths = [(route["match"]["prefix"], "headers" in route["match"]) for route in found]
    assert paths == [("/v1/", True), ("/v1/", False), ("/", True), ("/", False)]
