"""The Helm chart, rendered by helm's own code and checked against Kubernetes' schemas."""

from __future__ import annotations

import json
from typing import Any

import entrypoint
import healthcheck
import kubernetes_validate
import pytest
import yaml
from charts import EXAMPLES, FOLDER, ChartError, Documents, render

from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.serving.metric_families import WAITING

CASES = {"defaults": {}, **EXAMPLES}
ENGINE_JSON = FOLDER.parent / "model_repository" / "smartspec" / "1" / "engine.json"
CUSTOM = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")
"""Kinds of operators, which Kubernetes has no schema of."""


def template(documents: Documents) -> dict[str, Any]:
    """The pods that serve."""
    return dict(documents["Deployment"]["spec"]["template"])


def pod(documents: Documents) -> dict[str, Any]:
    return dict(template(documents)["spec"])


def container(documents: Documents) -> dict[str, Any]:
    [only] = pod(documents)["containers"]
    return dict(only)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_accepts_it(values: dict[str, Any], version: str) -> None:
    for document in render(values).values():
        if document["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_selectors_find_the_pods(values: dict[str, Any]) -> None:
    documents = render(values)
    labels = template(documents)["metadata"]["labels"].items()
    selectors = [
        documents["Service"]["spec"]["selector"],
        documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        documents["Deployment"]["spec"]["selector"]["matchLabels"],
        pod(documents)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    if budget := documents.get("PodDisruptionBudget"):
        selectors.append(budget["spec"]["selector"]["matchLabels"])
    assert all(selector.items() <= labels for selector in selectors)


def test_the_engine_json_of_the_example_is_valid() -> None:
    text = render(EXAMPLES["cpu"])["ConfigMap"]["data"]["engine.json"]
    config = ServerConfig.model_validate_json(text)
    assert json.loads(text) == EXAMPLES["cpu"]["engineJson"]
    # One thread is left for Triton under the example's own CPU limit.
    limit = int(EXAMPLES["cpu"]["resources"]["limits"]["cpu"])
    assert config.engine.model_dump()["num_threads"] < limit


def test_probes_ask_for_the_model_and_its_step_loop() -> None:
    """A Triton whose model unloaded itself answers 200 on /v2/health/ready, and one whose step loop
    hangs on the model's own URL as well."""
    given = container(render({}))
    ready = f"/v2/models/{MODEL_NAME}/ready"
    assert given["readinessProbe"]["httpGet"]["path"] == ready
    assert given["startupProbe"]["httpGet"]["path"] == ready
    liveness = given["livenessProbe"]
    assert liveness["exec"]["command"] == ["python3", "/opt/smartspec/healthcheck.py"]
    assert LimitsConfig().hang_s == healthcheck.TIMEOUT_S
    assert healthcheck.TIMEOUT_S < liveness["timeoutSeconds"] <= liveness["periodSeconds"]
    assert patience_s({}) > LimitsConfig().engine_timeout_s
    startup = given["startupProbe"]
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert allowed_s >= LimitsConfig().start_s + 30  # which gives it up with its reason in the log


def patience_s(limits: dict[str, float]) -> int:
    """How long health checks may fail until the pod is restarted."""
    engine_json = {"engine": {"kind": "local", "model": "/models/m"}, "limits": limits}
    liveness = container(render({"engineJson": engine_json}))["livenessProbe"]
    return int(liveness["periodSeconds"] * liveness["failureThreshold"])


@pytest.mark.parametrize("name", ["engine_timeout_s", "hang_s"])
def test_a_server_with_long_steps_is_not_restarted_in_one(name: str) -> None:
    assert patience_s({name: 1200.5}) > 1200.5


def test_pods_have_no_rights() -> None:
    """They write to volumes only, take inference and metrics, and open no connection."""
    documents = render({})
    assert pod(documents)["securityContext"]["runAsNonRoot"] is True
    assert pod(documents)["automountServiceAccountToken"] is False
    security = container(documents)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    places = {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in container(documents)["volumeMounts"]
        if not mount.get("readOnly")
    }
    assert set(places) == {"/var/cache/smartspec", "/tmp", "/dev/shm"}
    policy = documents["NetworkPolicy"]["spec"]
    ports = [[each["port"] for each in rule["ports"]] for rule in policy["ingress"]]
    assert ports == [["http", "grpc", "openai"], ["metrics"]]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])


@pytest.mark.parametrize("keeps", [False, True])
def test_costs_can_be_kept_on_the_volume_of_the_models(keeps: bool) -> None:
    """An emptyDir is gone with its pod."""
    documents = render({"models": {"existingClaim": "claim", "keepsProfiles": keeps}})
    mounts = {mount["mountPath"]: mount for mount in container(documents)["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    assert ("/var/cache/smartspec/profiles" in mounts) == keeps
    [claim] = [
        v["persistentVolumeClaim"] for v in pod(documents)["volumes"] if v["name"] == "models"
    ]
    assert claim == {"claimName": "claim", "readOnly": not keeps}
    if keeps:
        assert mounts["/var/cache/smartspec/profiles"]["subPath"] == "profiles"
        engine = json.loads(ENGINE_JSON.read_text())["engine"]
        assert engine["profile_cache"] == "/var/cache/smartspec/profiles"


@pytest.mark.parametrize(("count", "first"), [(0, "new"), (1, "old")])
def test_a_new_pod_does_not_wait_for_the_gpu_of_an_old_one(count: int, first: str) -> None:
    strategy = render({"gpu": {"count": count}})["Deployment"]["spec"]["strategy"]
    new_first = {"maxSurge": 1, "maxUnavailable": 0}
    old_first = {"maxSurge": 0, "maxUnavailable": 1}
    assert strategy["rollingUpdate"] == {"new": new_first, "old": old_first}[first]


def test_autoscalers_use_the_waiting_requests() -> None:
    [metric] = render(EXAMPLES["cpu"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == WAITING.name
    [trigger] = render(EXAMPLES["gpu"])["ScaledObject"]["spec"]["triggers"]
    service = render(EXAMPLES["gpu"])["Service"]["metadata"]["name"]
    query = f'sum({WAITING.name}{{namespace="prod", service="{service}"}})'
    assert trigger["metadata"]["query"] == query


def test_alerts_are_those_of_prometheus() -> None:
    alerts = FOLDER.parent / "prometheus" / "alerts.yml"
    documents = render(EXAMPLES["cpu"])
    assert documents["PrometheusRule"]["spec"] == yaml.safe_load(alerts.read_text())
    # The alerts name job="smartspec": it is made from this label of the Service.
    label = documents["ServiceMonitor"]["spec"]["jobLabel"]
    assert documents["Service"]["metadata"]["labels"][label] == "smartspec"


def test_settings_of_the_openai_endpoint() -> None:
    """By the variables that the entry point reads."""
    assert "env" not in container(render({}))
    values = {"chatTemplate": "/models/chat.jinja", "cors": ["https://a.org", "http://b:3000"]}
    environment = {each["name"]: each["value"] for each in container(render(values))["env"]}
    assert environment == {
        "SMARTSPEC_CHAT_TEMPLATE": "/models/chat.jinja",
        "SMARTSPEC_CORS": "https://a.org,http://b:3000",
    }
    assert all(name in (entrypoint.__doc__ or "") for name in environment)
    assert container(render({"cors": ["*"]}))["env"][0]["value"] == "*"


DRAIN = {"engineJson": {"engine": {}, "limits": {"drain_s": 30.5}}}
"""30.5 s of draining, 5 s before and 20 s after: 55.5 s, and so at least 56."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5, "maxReplicas": 4}}, "got 5, must be at"),
        ({**DRAIN, "terminationGracePeriodSeconds": 55}, "got 55, must be at least 56"),
        ({"replicas": 2}, "replicas"),
        ({"gpu": {"number": 1}}, "number"),
        ({"autoscaling": {"kind": "vpa"}}, "kind"),
        ({"sharedMemory": "lots"}, "sharedMemory"),
        ({"tritonArgs": ["log-verbose"]}, "tritonArgs"),
        ({"cors": ["a.org"]}, "cors"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ChartError, match=message):
        render(values)


def test_a_pod_may_drain() -> None:
    assert pod(render({**DRAIN, "terminationGracePeriodSeconds": 56}))
