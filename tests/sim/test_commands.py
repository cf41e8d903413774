"""`smartspec simulate` as a command: outputs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smartspec_cli.app import app

SMALL = ["--duration", "2", "--policies", "none,fixed:2", "--rows", "4", "--json", "-"]


def simulate(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_simulate_prints_a_table_and_writes_one_json_document(tmp_path: Path) -> None:
    """The table is on stdout, unless the document is."""
    path = tmp_path / "out.json"
    load = ["--rates", "2,4"]
    code, table, err = simulate(*SMALL, *load, "--json", str(path))
    assert code == 0, err
    code, out, err = simulate(*SMALL, *load)
    assert code == 0, err
    document = json.loads(out)
    assert json.loads(path.read_text()) == document
    assert len(document["rows"]) == 2 * 2
    assert "published fit" in document["hardware"][0]
    assert all("fixed:2" in shown for shown in (table, err))


def test_simulate_reads_a_spec_and_a_profile(tmp_path: Path) -> None:
    spec = tmp_path / "load.json"
    spec.write_text('{"phases": [{"duration_s": 2, "rate": 3}]}')
    profile = tmp_path / "profile.json"
    table = {"rows": [1, 4], "tokens_per_row": [1, 8], "seconds": [[0.01, 0.01], [0.01, 0.02]]}
    profile.write_text(json.dumps({"cost": {"target": table, "draft": None}}))
    arguments = ["--workload", str(spec), "--profile", str(profile), "--goodput", "ttft:500"]
    code, out, err = simulate(*SMALL, *arguments)
    assert code == 0, err
    document = json.loads(out)
    assert document["hardware"] == ["measured profile profile.json"]
    assert "slo_goodput_rps" in document["rows"][0]


def test_simulate_says_if_the_requests_are_too_few() -> None:
    load = ["--policies", "none", "--rates", "8", "--json", "-"]
    assert "requests are too few" in simulate(*load, "--duration", "2")[2]
    assert "requests are too few" not in simulate(*load, "--duration", "6")[2]


def test_simulate_a_fleet() -> None:
    short = [*SMALL, "--duration", "1", "--policies", "none"]
    code, out, err = simulate(*short, "--replicas", "2")
    assert code == 0, err
    [row] = json.loads(out)["rows"]
    assert (row["num_replicas"], row["num_failed"]) == (2, 0)
    targets = ["--target", "p90 ttft < 2 s", "--target", "p50 e2e < 60 s"]
    code, out, err = simulate(*short, *targets)
    assert code == 0, err
    assert "fewest with p90 ttft < 2000 ms, p50 e2e < 60000 ms" in " ".join(err.split())
    assert [row["num_replicas"] for row in json.loads(out)["rows"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rates", "x"], "--rates"),
        (["--rates", "0"], "--rates"),
        (["--rates", "100000"], "--rates: got 100000 for 10 s: about 1,000,000 requests are due"),
        (["--policies", "fast"], "--policies: 'fast'"),
        (["--replicas", "2", "--target", "p99 ttft < 1 s"], "--replicas and --target"),
        (["--target", "soon"], "--target: got 'soon', must be like 'p99"),
        (["--goodput", "soon"], "--goodput"),
        (["--accept", "2"], "--accept"),
        (["--workload", "missing.toml"], "missing.toml"),
        (["--record", "missing.jsonl"], "missing.jsonl"),
        (["--profile", "missing.json"], "--profile"),
        (["--record", "a", "--workload", "b"], "cannot be used together"),
        (["--workload", "MANY"], "about 200,000 requests are due"),
    ],
)
def test_simulate_refuses_in_one_line(arguments: list[str], word: str, tmp_path: Path) -> None:
    many = tmp_path / "many.toml"
    many.write_text("phases = [{duration_s = 10, rate = 20000}]")
    arguments = [str(many) if one == "MANY" else one for one in arguments]
    code, out, err = simulate(*arguments)
    assert code == 2
    assert word in err.replace("\n", " ")
    assert not out
