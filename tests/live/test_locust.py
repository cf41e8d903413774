"""Locust against a real Triton server on the fake engine, and its load shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from smartspec_launch.triton_server import TritonServer

LOADTEST = Path(__file__).parents[2] / "loadtest"
sys.path.append(str(LOADTEST))

from shapes import SCENARIOS  # noqa: E402


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
    shares = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.5)
    assert [SCENARIOS[scenario](share, 9) for share in shares] == users


def locust(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST / "locustfile.py"), "--headless"]
    command += ["--only-summary", f"--host={url}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.triton
def test_users_read_answers_as_they_come(narrow_server: TritonServer, tmp_path: Path) -> None:
    """24 tokens without drafts, a step each. A busy machine may deliver some tokens at once."""
    path = tmp_path / "r.jsonl"
    options = ["--users=1", "--max-requests=6", "--max-tokens=24", "--policy=none"]
    run = locust(narrow_server.address.http_url, "--workload=qa", *options, f"--jsonl={path}")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (summary["num_finished"], summary["num_failed"], summary["num_tokens"]) == (6, 0, 144)
    assert summary["kinds"].keys() == {"qa"}
    assert summary["kinds"]["qa"]["num_requests"] == 6
    assert summary["kinds"]["qa"]["num_output_tokens"] == 144
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"qa"}
    assert all(1 < len(line["chunk_s"]) <= 24 for line in lines)


@pytest.mark.triton
def test_a_refused_request_is_one_failure(narrow_server: TritonServer) -> None:
    options = ["--users=1", "--max-requests=3", "--max-tokens=100000"]
    run = locust(narrow_server.address.http_url, *options)
    assert run.returncode == 1
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["num_failed"] == sum(summary["errors"].values()) == 3
    assert all("max_tokens" in error for error in summary["errors"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--users=0", "--users: got 0"),
        ("--fields={", "--fields: got '{'"),
        ("--prompts=missing.jsonl", "missing.jsonl"),
    ],
)
def test_a_wrong_option_ends_it_before_anything_is_sent(option: str, message: str) -> None:
    run = locust("http://127.0.0.1:9", option)
    assert run.returncode == 1
    assert f"error: {message}" in run.stderr
