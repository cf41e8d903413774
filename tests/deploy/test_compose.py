"""compose.yaml, the files that it mounts, and the place of TensorRT-LLM engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from smartspec_launch.triton_server import DRAIN_MARGIN_S, EXIT_S, EXIT_TIMEOUT_S
from smartspec_py.config import LimitsConfig

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", ["smartspec", "smartspec-gpu"])
def test_servers_build_a_stage_that_exists_and_may_drain(name: str) -> None:
    service = SERVICES[name]
    assert f" AS {service['build']['target']}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert (FOLDER / service["build"]["context"]).resolve() == REPOSITORY
    longest_s = LimitsConfig().drain_s + DRAIN_MARGIN_S + EXIT_S + EXIT_TIMEOUT_S
    assert int(service["stop_grace_period"].removesuffix("s")) >= longest_s


def test_ports_are_on_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_mounted_files_exist() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    for source in (mount.split(":")[0] for mount in mounts):
        if source.startswith("../"):
            assert (FOLDER / source).exists(), source
        elif not source.startswith("${"):
            assert source in COMPOSE["volumes"]


def test_prometheus_scrapes_both_servers_by_one_name() -> None:
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["job_name"] == "smartspec"
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert port == "8002"
    assert host in SERVICES
    assert host in SERVICES["smartspec-gpu"]["networks"]["default"]["aliases"]
    mounted = [mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]]
    assert set(config["rule_files"]) <= set(mounted)
