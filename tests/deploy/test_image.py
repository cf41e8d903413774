"""What the image promises is what compose, the chart and scripts/check_image rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import containers
import pytest
import yaml
from charts import render

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCKERFILE = (DEPLOY.parent / "Dockerfile").read_text()
STAGES = {name: DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0] for name in ("cpu", "gpu")}
SERVERS: dict[str, dict[str, Any]] = {
    name: service
    for name, service in yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())[
        "services"
    ].items()
    if "build" in service
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_ports_user_and_volume_are_those_of_the_check(stage: str) -> None:
    [ports] = re.findall(r"^EXPOSE (.+)$", stage, re.MULTILINE)
    assert tuple(map(int, ports.split())) == containers.PORTS
    assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1] == f"{containers.USER}:1000"
    [volumes] = re.findall(r"^VOLUME (.+)$", stage, re.MULTILINE)
    assert json.loads(volumes) == [containers.CACHE]
    assert f"install -d -o 1000 -g 1000 {containers.CACHE}" in stage
    assert f"HF_HOME={containers.CACHE}/" in stage


@pytest.mark.parametrize("service", SERVERS.values(), ids=SERVERS)
def test_compose_agrees(service: dict[str, Any]) -> None:
    assert {int(port.rpartition(":")[2]) for port in service["ports"]} == set(containers.PORTS)
    assert f"cache:{containers.CACHE}" in service["volumes"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service.get("user", "1000:1000") == "1000:1000"


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_chart_agrees(gpus: int) -> None:
    pod = render({"gpu": {"count": gpus}})["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {port["containerPort"] for port in container["ports"]} == set(containers.PORTS)
    assert pod["securityContext"]["runAsUser"] == containers.USER
    assert pod["securityContext"]["fsGroup"] == 1000
    assert containers.CACHE in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name, words in (("podman", "podman"), (None, "docker, podman and buildah")):
        with pytest.raises(LookupError, match=f"^{words}: not installed, or not running$"):
            containers.found(name)
