"""`smartspec explain` on a running server: what it planned, over the wire."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wire import generate, post

from smartspec_launch.triton_server import TritonServer
from smartspec_py.core.plan.planner import plan
from smartspec_sim.traces import parse_steps

pytestmark = pytest.mark.triton


def test_a_server_says_what_it_planned_and_why(local_server: TritonServer, tmp_path: Path) -> None:
    generate(
        local_server,
        text_input="Question: who?\nAnswer:",
        max_tokens=40,
        end_id=-1,
        speculation_policy="fixed:2",
    )
    status, body = post(
        local_server, {"text_input": "-", "max_tokens": 1, "explain_steps": 8}, "generate"
    )
    assert status == 200, body
    steps = parse_steps("server", json.loads(body)["explanation"])
    assert len(steps) == 8
    assert {view.policy for step in steps for view in step.decision.views} == {"fixed:2"}
    for one in (step.decision for step in steps):
        assert plan(one.views, one.cost, one.settings) == one.plan

    kept = tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "smartspec_cli.app", "explain", "--steps", "8", "--json", "-"]
    for options in (["--url", local_server.address.http_url, "--save", kept], ["--trace", kept]):
        result = subprocess.run(
            [*command, *map(str, options)], capture_output=True, text=True, check=True, timeout=120
        )
        document = json.loads(result.stdout)
        found = {one["name"]: one for one in document["step"]["candidates"]}
        planned = steps[-1].decision.plan
        assert found["chosen"]["draft_lens"] == list(planned.draft_lens.values())
        assert found["chosen"]["tokens_per_s"] == pytest.approx(planned.goodput)
        # Steps of `fixed:2` are what one length for all makes of them, at the same worth.
        alike = found[f"all {max(planned.draft_lens.values())}"]
        assert alike["tokens_per_s"] == found["chosen"]["tokens_per_s"]
        assert found["all 0"]["expected_tokens"] == pytest.approx(1.0)
        assert document["window"]["num_steps"] == 8


def test_an_explanation_must_be_switched_on(narrow_server: TritonServer) -> None:
    status, body = post(
        narrow_server, {"text_input": "-", "max_tokens": 1, "explain_steps": 8}, "generate"
    )
    assert status == 400
    assert "explain_steps: got 8, must be left out" in body
    assert "set explain to true in engine.json" in body
