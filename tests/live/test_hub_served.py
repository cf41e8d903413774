"""`smartspec serve` with names of the hub, as a person types it, against a stand-in of the hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn

from smartspec_launch.address import free_address

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"


@pytest.mark.triton
@pytest.mark.slow
def test_a_pair_of_the_hub_is_served(tmp_path: Path) -> None:
    hub = HubStandIn()
    for role in ("target", "draft"):
        folder = TINY / role
        hub.add(f"acme/{role}", {path.name: path.read_bytes() for path in folder.iterdir()})
    address = free_address()
    options = ["--model", "acme/target", "--draft", "acme/draft", "--openai-port", "0"]
    options += ["--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port)]
    options += ["--metrics-port", str(address.metrics_port), "--run-dir", str(tmp_path / "run")]
    options += ["--set", "limits.profile_s=0", "--set", "limits.start_s=120"]
    options += ["--set", "engine.profile_cache=null"]
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", *options]
    unset = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with hub.served() as url:
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf")}
        serve = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert serve.stderr is not None
        said = []
        try:
            for line in serve.stderr:
                said.append(line.rstrip())
                if line.startswith("Serving"):
                    break
        finally:
            serve.send_signal(signal.SIGTERM)
            _, rest = serve.communicate(timeout=60)
    assert serve.returncode == 0, "\n".join(said) + rest
    assert said[0] == "Looking up acme/target and acme/draft"
    assert any(line.startswith("Fetching 4 MB to ") for line in said)
    assert said[-1].startswith("Serving acme/target, ")
    assert hub.fetched(".safetensors") == ["model.safetensors"] * 2
