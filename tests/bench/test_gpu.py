"""The scripts for a GPU, tried on a CPU: each part prints its tables."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import ragged_reference

from smartspec_bench import gpu, gpu_served
from smartspec_py.engines.runtimes.pytorch import graphs


def test_all_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reference in place of the kernel, which Triton's interpreter computes slowly; and in
    one process, which imports PyTorch once."""
    monkeypatch.setattr(graphs, "kernels", ragged_reference.kernels)
    pytest.importorskip("triton")
    kernel = importlib.import_module("smartspec_py.engines.runtimes.pytorch.attention")
    monkeypatch.setattr(kernel, "attend", ragged_reference.attend)

    def run(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> Any:
        assert command[1:3] == ["-m", gpu.__spec__.name]
        assert env["CUBLASLT_WORKSPACE_SIZE"] == "1"
        gpu.main(command[3:])
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    gpu.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    for title in (
        "Bandwidth",
        "random passes",
        "one layer",
        "Products",
        "Passes, merged",
        "drafts",
    ):
        assert f"### {title}" in printed or title in printed, title
    assert printed.count("in CUDA graphs") == 2
    assert printed.count("### Products") == 2, "the second with other settings"
    assert "### Products, us\n" in printed


@pytest.mark.slow
def test_served_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each precision is float32 here, so no text may differ."""
    monkeypatch.setattr(gpu_served, "FIXED", ("fixed:3",))
    gpu_served.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    tables = [text.splitlines() for text in printed.split("### ")[1:]]
    titles = [lines[0] for lines in tables]
    loads = ["3 requests, 1 at once", "3 requests, 2 at once"]
    checks = [f"Texts in {precision}" for precision in gpu_served.CHECKED]
    assert titles == [*loads, *loads, *loads, *checks]
    rows = []
    for lines in tables:
        head, _, *body = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        rows += [dict(zip(head, cells, strict=True)) for cells in body]
    assert len(rows) > 30
    assert {row["texts differ"] for row in rows} == {"0"}
    drafted = [row for row in rows if row["policy"].startswith(("goodput", "fixed"))]
    assert any(float(row["drafts"]) > 0 for row in drafted if "drafts" in row)


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        (gpu, ["pases"], "PART: got 'pases', must be one of device, "),
        (gpu_served, ["polices"], "PART: got 'polices', must be one of policies, "),
        (gpu_served, ["--heads", "nowhere"], "--heads: nowhere is no folder"),
    ],
)
def test_a_wrong_option_takes_no_time_on_a_gpu(
    script: Any, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert reason in capsys.readouterr().err
