"""`smartspec explain` on a running server: what it planned, over the wire."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wire import generate, post

from smartspec_py.tracing.steps import parse_steps, unexplained
from smartspec_py.triton_server import TritonServer

pytestmark = pytest.mark.triton


def test_a_server_says_what_it_planned_and_why(torch_server: TritonServer, tmp_path: Path) -> None:
    generate(torch_server, text_input="Question: who?\nAnswer:", max_tokens=40, end_id=-1)
    status, body = post(
        torch_server, {"text_input": "-", "max_tokens": 1, "explain_steps": 8}, "generate"
    )
    assert status == 200, body
    trace = parse_steps("server", json.loads(body)["explanation"])
    assert 1 <= len(trace.steps) <= 8
    assert all(step.views for step in trace.steps)
    assert unexplained(trace) == []

    kept = tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "smartspec_py.cli", "explain"]
    for options in (["--url", torch_server.address.http_url, "--save", kept], ["--trace", kept]):
        result = subprocess.run(
            [*command, *map(str, options)], capture_output=True, text=True, check=True, timeout=120
        )
        document = json.loads(result.stdout.splitlines()[-1])
        assert document["step"]["candidates"][0]["name"] == "chosen"
        assert document["window"]["num_steps"] > 0
        assert "estimated regret" in result.stderr
