"""The script for a GPU, tried on a CPU: each part prints its table."""

from __future__ import annotations

import importlib

import pytest
import ragged_reference

from smartspec_bench import gpu
from smartspec_py.engines.runtimes.pytorch import graphs


def test_all_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reference in place of the kernel, which Triton's interpreter computes slowly."""
    monkeypatch.setattr(graphs, "kernel", lambda: ragged_reference.attend)
    pytest.importorskip("triton")
    kernel = importlib.import_module("smartspec_py.engines.runtimes.pytorch.attention")
    monkeypatch.setattr(kernel, "attend", ragged_reference.attend)
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
