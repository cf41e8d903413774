"""Locust against a real Triton server on the fake engine, and its load shapes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import fake_config, serving

from smartspec_launch.triton_server import TritonServer

LOADTEST = Path(__file__).parents[2] / "loadtest"
sys.path.append(str(LOADTEST))

from shapes import SCENARIOS, users_at  # noqa: E402

STEP_S = 0.005
"""Of the fake engine's steps."""


@pytest.mark.parametrize(
    ("scenario", "users"),
    [
        ("steady", [9] * 9),
        # From 1 to 9 over 0.8 of the run: 10 users a whole run, so 1 + 2 = 3 after 0.2.
        ("ramp", [1, 3, 4, 5, 6, 7, 8, 9, 9]),
        ("step", [1, 1, 1, 3, 3, 3, 9, 9, 9]),
    ],
)
def test_users_over_a_run(scenario: str, users: list[int]) -> None:
    stages = SCENARIOS[scenario](9)
    shares = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.5)
    assert [users_at(stages, share) for share in shares] == users


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(fake_config(step_s=STEP_S), tmp_path_factory.mktemp("fake")) as server:
        yield server


def locust(server: TritonServer, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST / "locustfile.py"), "--headless"]
    command += ["--only-summary", f"--host={server.address.http_url}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.triton
def test_users_read_whole_answers_as_they_come(server: TritonServer, tmp_path: Path) -> None:
    """12 requests of 24 tokens without drafts, a step each: one that read its answer only at the
    end would see the first token with the last."""
    path = tmp_path / "r.jsonl"
    options = ["--users=2", "--max-requests=12", "--max-tokens=24", "--policy=none"]
    run = locust(server, "--workload=qa", *options, f"--jsonl={path}")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (summary["num_finished"], summary["num_failed"], summary["num_tokens"]) == (12, 0, 288)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"qa"}
    # Of most: a machine that is busy elsewhere may hand some of them over at once.
    assert statistics.median(line["chunk_s"][-1] - line["chunk_s"][0] for line in lines) > (
        12 * STEP_S
    )


@pytest.mark.triton
def test_a_refused_request_is_one_failure(server: TritonServer) -> None:
    run = locust(server, "--users=1", "--max-requests=3", "--max-tokens=100000")
    assert run.returncode == 1
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["num_failed"] == 3
    assert sum(summary["errors"].values()) == 3
    assert all("max_tokens" in error for error in summary["errors"])


@pytest.mark.triton
def test_a_wrong_option_ends_it_before_anything_is_sent(server: TritonServer) -> None:
    for option, message in {
        "--users=0": "--users: got 0",
        "--fields={": "--fields: got '{'",
        "--prompts=missing.jsonl": "missing.jsonl",
    }.items():
        run = locust(server, option)
        assert run.returncode == 1
        assert f"error: {message}" in run.stderr
