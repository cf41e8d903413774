"""`smartspec simulate` as a command: outputs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from smartspec_cli.commands.simulate import simulate

SMALL = ["--duration", "2", "--policies", "none,fixed:2", "--rows", "4", "--json", "-"]


def call(command: object, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)  # type: ignore[type-var]
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_simulate_prints_a_table_and_writes_one_json_document(tmp_path: Path) -> None:
    """The table is on stdout, unless the document is."""
    path = tmp_path / "out.json"
    load = ["--rates", "2,4", "--what-if", "rate=2x"]
    code, table, err = call(simulate, *SMALL, *load, "--json", str(path))
    assert code == 0, err
    code, out, err = call(simulate, *SMALL, *load)
    assert code == 0, err
    document = json.loads(out)
    assert json.loads(path.read_text()) == document
    assert len(document["rows"]) == 2 * 2 * 2
    assert any("published fit" in note for note in document["hardware"])
    assert all("fixed:2" in shown and "rate=2x" in shown for shown in (table, err))
    assert err.startswith("simulating: 0 of 8 runs\n"), "also without a terminal"


def test_simulate_reads_a_spec_and_a_profile(tmp_path: Path) -> None:
    spec = tmp_path / "load.json"
    spec.write_text('{"phases": [{"duration_s": 2, "rate": 3}]}')
    profile = tmp_path / "profile.json"
    table = {"rows": [1, 4], "tokens_per_row": [1, 8], "seconds": [[0.01, 0.01], [0.01, 0.02]]}
    profile.write_text(json.dumps({"cost": {"target": table, "draft": None}}))
    arguments = ["--workload", str(spec), "--profile", str(profile), "--goodput", "ttft:500"]
    code, out, err = call(simulate, *SMALL, *arguments)
    assert code == 0, err
    document = json.loads(out)
    assert document["hardware"] == ["measured profile profile.json"]
    assert "slo_goodput_rps" in document["rows"][0]


def test_simulate_with_costs_that_differ_from_what_is_told() -> None:
    code, out, err = call(simulate, *SMALL, "--wrong", "base=3", "--wrong", "slope=1.5@1.5")
    assert code == 0, err
    wrong = json.loads(out)
    code, out, _ = call(simulate, *SMALL)
    assert code == 0
    assert wrong["rows"][0]["tpot_ms"]["mean"] > json.loads(out)["rows"][0]["tpot_ms"]["mean"]
    assert [one["time_s"] for one in wrong["rows"][0]["deviations"]] == [0.0, 1.5]
    assert "steps really take: slope=1.5@1.5" in wrong["hardware"]
    assert "base=3" in err


def test_simulate_a_fleet(tmp_path: Path) -> None:
    short = [*SMALL, "--duration", "1", "--output", "50", "--policies", "none"]
    fleet = ["--replicas", "2", "--rolling-restart", "0.5:0.1"]
    code, out, err = call(simulate, *short, *fleet)
    assert code == 0, err
    [row] = json.loads(out)["rows"]
    assert (row["num_replicas"], row["num_failed"]) == (2, 0)
    plot = tmp_path / "fleet.svg"
    targets = ["--target", "p90 ttft < 2 s", "--target", "p50 e2e < 60 s"]
    code, out, err = call(simulate, *short, *targets, "--plot", str(plot))
    assert code == 0, err
    assert "fewest with p90 ttft < 2000 ms, p50 e2e < 60000 ms" in " ".join(err.split())
    assert [row["num_replicas"] for row in json.loads(out)["rows"]] == [1]
    assert "replicas with p90 ttft" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rates", "x"], "--rates"),
        (["--rates", "0"], "--rates"),
        (["--policies", "fast"], "--policies: 'fast'"),
        (["--max-cache-tokens", "9"], "--max-cache-tokens: got 9"),
        (["--replicas", "2", "--target", "p99 ttft < 1 s"], "--replicas and --target"),
        (["--target", "llama-3.1-70b"], "--target: got 'llama-3.1-70b', must be like 'p99"),
        (["--route", "random"], "--route: needs --replicas"),
        (["--replicas", "2", "--route", "fast"], "--route: got 'fast', must be one of least"),
        (["--replicas", "2", "--route", "prefix"], "--route: got 'prefix', but no request"),
        (["--replicas", "2", "--fail", "5"], "--fail: got '5', must be AT:RESTART"),
        (["--replicas", "2", "--fail=-1:2"], "--fail: got -1 s in '-1:2', must be in 0..1e7"),
        (["--rolling-restart", "1:2"], "--rolling-restart: needs --replicas"),
        (["--gpu", "abacus"], "--gpu: 'abacus'"),
        (["--model", "llama-3.1-70b", "--draft", "none"], "GB of weights"),
        (["--gpu", "l4", "--rows", "512", "--draft", "none"], "--rows to at most"),
        (["--what-if", "luck=2x"], "--what-if"),
        (["--wrong", "luck=2"], "--wrong: 'luck=2'"),
        (["--wrong", "draft=2@soon"], "--wrong: 'draft=2@soon'"),
        (
            ["--wrong", "draft=2", "--wrong", "base=2"],
            "--wrong: two changes begin at the same time",
        ),
        (["--wrong", "draft=2", "--draft", "none"], "--wrong: draft=2, but there is no draft"),
        (["--goodput", "soon"], "--goodput"),
        (["--accept", "2"], "--accept"),
        (["--workload", "missing.toml"], "missing.toml"),
        (["--record", "missing.jsonl"], "missing.jsonl"),
        (["--profile", "missing.json"], "--profile"),
        (["--oracle", "missing.jsonl"], "--oracle"),
        (["--record", "a", "--workload", "b"], "cannot be used together"),
    ],
)
def test_simulate_refuses_in_one_line(arguments: list[str], word: str) -> None:
    code, out, err = call(simulate, *arguments)
    assert code == 2
    assert word in err.replace("\n", " ")
    assert not out


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    code, _, err = call(simulate, *SMALL, "--plot", str(path))
    assert code == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")
