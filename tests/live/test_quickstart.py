"""The quickstart with models of a person's choice, against a stand-in of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"


@pytest.mark.triton
@pytest.mark.slow
def test_models_of_the_hub_are_compared(tmp_path: Path) -> None:
    hub = HubStandIn()
    for role in ("target", "draft"):
        files = {path.name: path.read_bytes() for path in (TINY / role).iterdir()}
        hub.add(f"acme/{role}", files)
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "smartspec_cli.commands.quickstart", "--json", str(result)]
    command += ["--model", "acme/target", "--draft", "acme/draft", "--set", "limits.profile_s=0"]
    command += ["--set", "engine.profile_cache=null", "--set", "engine.dtype=float32"]
    unset = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with hub.served() as url:
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("You: ") == done.stdout.count("\nacme/target: ") == 4
    assert "Task: chat" not in done.stdout, "its chat template is not shown"
    rows = json.loads(result.read_text())["rows"]
    assert [row["transport"] for row in rows] == ["HTTP", "gRPC"] * 2
    assert all(row["is_same_text"] for row in rows)
    assert any(row["mean_draft_len"] > 0 for row in rows)


def test_drafts_need_their_model() -> None:
    command = [sys.executable, "-m", "smartspec_cli.commands.quickstart", "--draft", "acme/draft"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "smartspec: --draft and --heads need --model\n"
