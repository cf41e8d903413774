"""build_engines.sh: what it prints for the examples, and what it runs, runs again and leaves alone.

TensorRT-LLM is played by fake_build_tool.py; no real engine was ever built by these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smartspec_trtllm import build_steps
from smartspec_trtllm.build_plan import Step

ENGINES_BUILD = Path(__file__).parents[2] / "engines_build"
SCRIPT = ENGINES_BUILD / "build_engines.sh"
EXAMPLES = ENGINES_BUILD / "examples"
GOLDEN = Path(__file__).parent / "golden"
HUB = json.loads((GOLDEN / "hub.json").read_text())
FAKE_TOOL = Path(__file__).parent / "fake_build_tool.py"


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 2, "content": "<end>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def run_script(
    script: Path, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """With this interpreter as python3, and the directory bin of `cwd` before everything."""
    path = os.pathsep.join((str(cwd / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        [str(script), *arguments],
        cwd=cwd,
        env=os.environ | {"PATH": path, "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_example_has_a_golden_file() -> None:
    examples, files = EXAMPLES.iterdir(), GOLDEN.glob("*.txt")
    assert {path.stem for path in examples} == {path.stem for path in files}


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.sh")))
def test_examples_print_their_golden_commands(tmp_path: Path, example: str) -> None:
    """`UPDATE_GOLDEN=1 pytest` writes them anew; test_build_plan.py checks their flags."""
    for name, config in HUB.items():
        make_model(tmp_path / "hub" / name, config)
    script = EXAMPLES / f"{example}.sh"
    found = run_script(script, "--dry-run", cwd=tmp_path, HUB="hub", OUT="engines")
    assert (found.returncode, found.stderr) == (0, "")
    golden = GOLDEN / f"{example}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found.stdout)
    assert found.stdout == golden.read_text()
    assert not (tmp_path / "engines").exists()


class Workshop:
    """Two models, fakes of TensorRT-LLM's tools, and the real build_engines.sh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self._calls = folder / "calls"
        self._calls.touch()
        make_model(folder / "T", HUB["Llama-3.1-8B-Instruct"])
        make_model(folder / "D", HUB["Llama-3.2-1B-Instruct"])
        for place in ("bin/trtllm-build", "app/models/core/llama/convert_checkpoint.py"):
            path = folder / place
            path.parent.mkdir(parents=True)
            path.write_text(f"#!{sys.executable}\n{FAKE_TOOL.read_text()}")
            path.chmod(0o755)

    def build(
        self, *flags: str, break_at: str = "", paths: Sequence[str] = ("T", "D", "out")
    ) -> subprocess.CompletedProcess[str]:
        arguments = (*paths, "--examples", "app", *flags)
        environment = {"CALLS": str(self._calls), "BREAK": break_at}
        return run_script(SCRIPT, *arguments, cwd=self.folder, **environment)

    def calls(self) -> list[str]:
        """What the tools were called for since this was last asked."""
        calls = self._calls.read_text().splitlines()
        self._calls.write_text("")
        return calls


CONVERT, BUILD = "convert_checkpoint.py", "trtllm-build"
ALL = [f"{tool} {role}" for role in ("target", "draft") for tool in (CONVERT, BUILD)]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_a_build_ends_in_a_checked_pair(workshop: Workshop) -> None:
    answer = workshop.build("--tp", "2", "--max-batch-size", "8")
    assert answer.returncode == 0, answer.stderr
    assert workshop.calls() == ALL
    assert (workshop.out / "target" / "rank1.engine").read_bytes() == b"complete"
    files = sorted(path.name for path in (workshop.out / "tokenizer").iterdir())
    assert files == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert "engines can be served, by their files: 1 note" in answer.stdout
    log = (workshop.out / "logs" / "02-build-target.log").read_text()
    assert log.startswith(f"trtllm-build --checkpoint_dir {workshop.out}/checkpoints/target")


def test_what_has_not_changed_is_skipped(workshop: Workshop) -> None:
    assert workshop.build().returncode == 0
    assert workshop.calls() == ALL
    answer = workshop.build()
    assert (answer.returncode, workshop.calls()) == (0, [])
    assert answer.stdout.count("nothing has changed, skipped") == 5
    assert "engines can be served" in answer.stdout
    elsewhere = [str(workshop.folder / name) for name in ("T", "D", "out")]
    assert workshop.build(paths=elsewhere).returncode == 0
    assert workshop.calls() == []
    assert workshop.build("--force").returncode == 0
    assert workshop.calls() == ALL


def test_only_what_changed_is_run_again(workshop: Workshop) -> None:
    """A longer draft: the target's engine. Other weights of the draft: all of the draft."""
    workshop.build()
    workshop.calls()
    workshop.build("--max-draft-len", "5")
    assert workshop.calls() == [f"{BUILD} target"]
    (workshop.folder / "D" / "model.safetensors").write_bytes(b"other weights")
    workshop.build("--max-draft-len", "5")
    assert workshop.calls() == [f"{CONVERT} draft", f"{BUILD} draft"]


def test_another_configuration_of_the_same_size_is_converted_again(workshop: Workshop) -> None:
    """Small files count by content, with the time of their last change put back."""
    workshop.build()
    workshop.calls()
    path = workshop.folder / "D" / "config.json"
    times = path.stat()
    path.write_text(path.read_text().replace("131072", "131073"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    workshop.build()
    assert workshop.calls() == [f"{CONVERT} draft", f"{BUILD} draft"]


def test_engines_that_cannot_be_served_are_an_error(workshop: Workshop) -> None:
    answer = workshop.build(break_at="out/target unfit")
    assert (answer.returncode, workshop.calls()) == (1, ALL)
    assert "max_draft_len: 0" in answer.stdout
    assert "engines cannot be served, by their files: 1 error" in answer.stdout


def test_an_engine_that_was_damaged_is_built_again(workshop: Workshop) -> None:
    workshop.build()
    workshop.calls()
    (workshop.out / "draft" / "rank0.engine").write_bytes(b"")
    workshop.build()
    assert workshop.calls() == [f"{BUILD} draft"]


def test_a_failure_stops_the_build_and_names_the_log(workshop: Workshop) -> None:
    answer = workshop.build(break_at="out/target fail")
    assert answer.returncode == 1
    assert workshop.calls() == ALL[:2]
    log = workshop.out / "logs" / "02-build-target.log"
    assert f"build-target failed with exit code 3; full log: {log}" in answer.stderr
    assert "out of memory" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert workshop.build().returncode == 0
    assert workshop.calls() == ALL[1:]


def test_a_tool_that_ends_well_without_its_files_has_failed(workshop: Workshop) -> None:
    answer = workshop.build(break_at="checkpoints/draft forget")
    assert answer.returncode == 1
    assert f"exit code 0, but {workshop.out}/checkpoints/draft lacks rank0" in answer.stderr


def test_a_half_written_engine_never_counts_as_done(workshop: Workshop) -> None:
    """The tool writes half and the build is killed: the next one begins that step again."""
    answer = workshop.build(break_at="out/target die")
    assert answer.returncode == -signal.SIGKILL
    assert (workshop.out / "target" / "rank0.engine").read_bytes() == b"half"
    workshop.calls()
    assert workshop.build().returncode == 0
    assert workshop.calls() == ALL[1:]
    assert (workshop.out / "target" / "rank0.engine").read_bytes() == b"complete"


def test_another_version_of_tensorrt_llm_builds_all_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    command = ("cp", "/dev/null", str(tmp_path / "out"))
    step = Step("copy", command, (tmp_path / "in",), tmp_path / "out", ())
    before = build_steps._fingerprint(step)
    assert build_steps._fingerprint(replace(step, name="other")) == before
    monkeypatch.setattr(build_steps, "_trtllm_version", lambda: "1.2.0")
    assert build_steps._fingerprint(step) != before


def test_files_of_others_are_never_removed(workshop: Workshop) -> None:
    (workshop.out / "target").mkdir(parents=True)
    (workshop.out / "target" / "thesis.txt").write_text("mine")
    answer = workshop.build()
    assert answer.returncode == 2
    assert "out/target: contains files that no earlier build made" in answer.stderr
    assert (workshop.out / "target" / "thesis.txt").read_text() == "mine"


def test_missing_tools_are_said_before_anything_runs(workshop: Workshop) -> None:
    shutil.rmtree(workshop.folder / "app")
    answer = workshop.build()
    assert answer.returncode == 2
    assert "convert_checkpoint.py: no such file: run this in the container" in answer.stderr
    assert not workshop.out.exists()


def test_what_is_refused_is_one_line(workshop: Workshop) -> None:
    answer = workshop.build("--tp", "3")
    assert answer.returncode == 2
    assert answer.stderr.startswith("build_engines: --tp: 3 does not divide")
    assert answer.stderr.count("\n") == 1
    assert workshop.build("--quantization", "int3").returncode == 2
    assert workshop.calls() == []


def test_a_shell_without_the_packages_is_told_what_to_install(tmp_path: Path) -> None:
    """A python3 that can import nothing comes first on PATH."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    answer = run_script(SCRIPT, "T", "D", "out", cwd=tmp_path)
    assert answer.returncode == 1
    assert "python3 -m pip install rich typer" in answer.stderr
