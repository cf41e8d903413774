"""`bench live` and `bench lockstep` as commands, on a fake engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from servers import TINY
from typer.testing import CliRunner

from smartspec_bench.live import PER_PLACE
from smartspec_bench.results import read
from smartspec_cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(tmp_path: Path) -> str:
    engine = {"kind": "fake", "tokenizer": str(TINY / "target"), "step_s": 0.001}
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"engine": engine, "limits": {"max_sequences": 4}}))
    return str(path)


@pytest.mark.triton
def test_policies_on_triton_and_beside_it(fake: str, tmp_path: Path) -> None:
    out = tmp_path / "live.json"
    options = ["--policies", "none,goodput", "--concurrency", "1,4", "--rounds", "2"]
    options += ["--max-tokens", "8", "--overhead", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "live", "--config", fake, *options])
    assert result.exit_code == 0, result.output
    found = read(out)
    names = {"none", "goodput", "none, in process", "goodput, in process"}
    assert {phase.policy for phase in found.phases} == names
    assert {phase.load for phase in found.phases} == {1.0, 4.0}
    assert len(found.phases) == 2 * 2 * len(names)
    assert all(phase.num_finished == PER_PLACE * phase.load for phase in found.phases)
    assert "4 at once, mixed" in result.stdout


def test_lockstep_prints_its_table(fake: str) -> None:
    options = ["--shapes", "closed", "--repeats", "1", "--saturation-s", "0.05"]
    options += ["--max-tokens", "4", "--policies", "none,goodput", "--json", "-"]
    result = CliRunner().invoke(app, ["bench", "lockstep", "--config", fake, *options])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["phases"]) == 2
    assert "one request at a time" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_a_server_that_is_not_there(url: str) -> None:
    options = ["--url", url, "--rounds", "1"]
    result = CliRunner().invoke(app, ["bench", "live", *options])
    assert result.exit_code == 1
    assert "Cannot connect to host 127.0.0.1:1" in result.stderr


GPU_IMAGE = """
import sys
import pytest
missing = {"openvino", "aiohttp", "fastapi", "uvicorn", "tritonclient", "grpc", "pydantic"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
assert pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]) == 0
missing.remove("pydantic")
from smartspec_cli.app import app
app(["bench", "lockstep", *%r])
"""
"""Python without packages that the image of a GPU machine often lacks. What tests of a GPU import
needs none of them, and the command needs pydantic, too."""


@pytest.mark.slow
def test_what_a_gpu_machine_runs_needs_few_packages(tmp_path: Path) -> None:
    """The tests of a GPU, and the command as `scripts/bench --gpu` runs it, but small and on the
    CPU."""
    options = ["--model", str(TINY / "target"), "--draft", str(TINY / "draft")]
    options += ["--set", "engine.runtime=torch", "--set", "limits.profile_s=0"]
    options += ["--set", "limits.max_sequences=4", "--set", "engine.profile_cache=null"]
    options += ["--set", "engine.dtype=float32", "--set", "engine.num_threads=1"]
    options += ["--shapes", "closed", "--repeats", "1", "--saturation-s", "0.2"]
    options += ["--max-tokens", "8", "--policies", "none,goodput", "--workload", "tiny"]
    options += ["--json", str(tmp_path / "found.json")]
    environment = {"PYTHONPATH": f"{ROOT / 'backend'}:{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GPU_IMAGE % options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_captured_passes_on_a_gpu" in done.stdout
    phases = json.loads((tmp_path / "found.json").read_text())["phases"]
    assert len(phases) == 2
    assert all(phase["num_same_texts"] == phase["num_finished"] for phase in phases)
