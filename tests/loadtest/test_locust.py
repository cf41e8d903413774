"""Locust against a real Triton server on the fake engine: each user, each shape, each end."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from locust_runs import LOADTEST, STEP_S, TIMEOUT_S, LocustRun, start
from servers import fake_config, serving

from smartspec_launch.triton_server import TritonServer

pytestmark = pytest.mark.triton

ROWS = {"SseUser": "SSE", "GrpcUser": "gRPC"}


def test_users_read_whole_answers_as_they_come(
    fake_server: TritonServer, start_locust: Callable[..., LocustRun]
) -> None:
    """12 requests of 24 tokens without drafts, a step each: one that read its answer only at the
    end would see the first token with the last."""
    options = ["--users=2", "--max-requests=12", "--max-tokens=24", "--policy=none"]
    runs = {user: start_locust(fake_server, user, "--workload=qa", *options) for user in ROWS}
    for user, run in runs.items():
        assert run.wait() == 0, run.output
        assert len(run.lines) == 12
        for line in run.lines:
            check_line(line)
        # Of most: a machine that is busy elsewhere may hand some of them over at once.
        read_s = [line["chunk_s"][-1] - line["chunk_s"][0] for line in run.lines]
        assert statistics.median(read_s) > 12 * STEP_S
        for name in ("e2e", "ttft", "tpot"):
            assert run.counts[f"{ROWS[user]} {name}"] == (12, 0)


def check_line(line: dict[str, Any]) -> None:
    assert line["error"] is None
    assert (line["finish_reason"], line["kind"]) == ("length", "qa")
    assert sum(line["chunk_tokens"]) == 24
    assert len(line["chunk_tokens"]) > 12  # some tokens are half a character, and wait
    assert line["num_input_tokens"] > 0
    assert line["chunk_s"][-1] - line["sent_s"] > 24 * STEP_S


@pytest.fixture(scope="module")
def shapes(
    fake_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LocustRun]]:
    """A run of 6 s of each scenario, side by side: what they do is told by the times they note."""
    options = [f"--host={fake_server.address.http_url}", "--run-time=6", "--users=4"]
    options += ["--scale=0.125", "--workload=qa", "--shift-to=sql", "--max-tokens=8"]
    runs = {
        name: start(tmp_path_factory.mktemp(name), "SseUser", f"--scenario={name}", *options)
        for name in ("steady", "ramp", "step", "shift")
    }
    try:
        for run in runs.values():
            assert run.wait() == 0, run.output
        yield runs
    finally:
        for run in runs.values():
            run.close()


def most_at_once(run: LocustRun, start_s: float, end_s: float) -> int:
    """Requests that were out at once, of those sent in this time."""
    events = []
    for line in run.lines:
        if start_s <= line["sent_s"] < end_s:
            events += [(line["sent_s"], 1), (line["chunk_s"][-1], -1)]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("scenario", "users"),
    [("steady", [4, 4]), ("ramp", [1, 4]), ("step", [1, 6]), ("shift", [4, 4])],
)
def test_a_scenario_has_its_users(
    shapes: dict[str, LocustRun], scenario: str, users: list[int]
) -> None:
    """In the first and the last second of six; Locust asks once a second. 6 is step's 48 / 8."""
    run = shapes[scenario]
    found = [most_at_once(run, 0.0, 0.9), most_at_once(run, 5.1, 7.0)]
    assert found == users


def test_a_shift_changes_what_is_asked_and_not_how_many_ask(shapes: dict[str, LocustRun]) -> None:
    lines = shapes["shift"].lines
    assert {line["kind"] for line in lines if line["sent_s"] < 2.95} == {"qa"}
    assert {line["kind"] for line in lines if line["sent_s"] >= 3.05} == {"sql"}
    assert {line["kind"] for line in shapes["steady"].lines} == {"qa"}


def test_a_refused_request_is_one_failure(
    fake_server: TritonServer, start_locust: Callable[..., LocustRun]
) -> None:
    options = ["--users=1", "--max-requests=3", "--max-tokens=100000"]
    runs = {user: start_locust(fake_server, user, *options) for user in ROWS}
    for user, run in runs.items():
        assert run.wait() == 1, run.output
        assert run.counts[f"{ROWS[user]} e2e"] == (3, 3)
        assert run.counts["Aggregated"] == (3, 3)
        assert all("max_tokens" in line["error"] for line in run.lines)


def test_an_error_within_a_stream_of_status_200_is_a_failure(
    start_locust: Callable[..., LocustRun], tmp_path: Path
) -> None:
    """The engine fails at its tenth step, when each user has had some tokens."""
    config = fake_config(step_s=STEP_S, fail_at_step=10)
    with serving(config, tmp_path / "server") as server:
        options = ["--users=2", "--max-requests=2", "--max-tokens=200", "--policy=none"]
        run = start_locust(server, *options)
        assert run.wait() == 1, run.output
    assert [bool(line["chunk_tokens"]) for line in run.lines] == [True, True]
    assert all(
        line["error"] and "cancelled: the run ended" not in line["error"] for line in run.lines
    )
    assert run.counts["SSE e2e"] == run.counts["gRPC e2e"] == (1, 1)
    assert "SSE ttft" not in run.counts


def test_sigterm_ends_a_run_of_both_users_and_leaves_its_files(
    fake_server: TritonServer, start_locust: Callable[..., LocustRun]
) -> None:
    options = ["--users=4", "--run-time=60", "--max-tokens=400", "--policy=none"]
    run = start_locust(fake_server, *options, f"--html={fake_server.log_path.parent / 'r.html'}")
    run.wait_for("All users spawned")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1, run.output
    assert [line["error"] for line in run.lines] == ["cancelled: the run ended"] * 4
    assert (run.counts["SSE e2e"], run.counts["gRPC e2e"]) == ((2, 2), (2, 2))
    assert (fake_server.log_path.parent / "r.html").stat().st_size > 0


def test_a_mistake_ends_it_before_anything_is_sent(
    fake_server: TritonServer, start_locust: Callable[..., LocustRun]
) -> None:
    mistakes = {
        "--scale=0": "--scale: got 0.0",
        "--fields={": "--fields: got '{'",
        "--prompts=missing.jsonl": "missing.jsonl",
    }
    runs = {option: start_locust(fake_server, "SseUser", option) for option in mistakes}
    for option, run in runs.items():
        assert run.wait() == 1
        assert f"error: {mistakes[option]}" in run.output
        assert not (run.folder / "r.jsonl").exists()


def test_a_run_from_nothing_to_the_summary(fake_server: TritonServer, tmp_path: Path) -> None:
    command = [sys.executable, str(LOADTEST / "run.py"), f"--url={fake_server.address.http_url}"]
    command += [f"--grpc={fake_server.address.grpc_url}", "--transport=both", "--users=2"]
    command += ["--seconds=20", f"--folder={tmp_path}", "--", "--max-requests=6", "--max-tokens=8"]
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["num_finished"], summary["num_tokens"]) == (6, 48)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"requests.jsonl", "report.html", "locust_stats.csv"} <= files
