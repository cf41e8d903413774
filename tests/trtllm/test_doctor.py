"""The doctor on a fake executor: it finds missing names.

Nothing here says anything about the real executor.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from smartspec_cli.app import app
from smartspec_cli.commands import doctor
from smartspec_cli.commands.doctor import NAMES, missing_names
from smartspec_testing import fake_executor


def test_the_fake_has_the_names_that_the_adapter_uses_and_no_others() -> None:
    """So the adapter, which runs on the fake in other tests, uses no other name."""
    assert list(missing_names(fake_executor)) == []
    for class_name, names in NAMES.items():
        found = getattr(fake_executor, class_name)
        if dataclasses.is_dataclass(found):
            fields = {field.name for field in dataclasses.fields(found)}
            assert fields == set(names.split()) - {"has_error"}, class_name


@pytest.mark.parametrize(
    "make",
    [
        lambda: fake_executor.Request([], 1),
        lambda: fake_executor.Request([3, 4], 0),
        lambda: fake_executor.Request([np.int64(3)], 1),
        lambda: fake_executor.ExternalDraftTokensConfig([]),
    ],
)
def test_the_fake_refuses_what_the_bindings_refuse(make: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        make()


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str] = ("NVIDIA H100",)) -> Any:
    """A package tensorrt_llm made of the fake."""
    package, bindings = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.bindings")
    package.__version__ = "1.2.1"  # type: ignore[attr-defined]
    executor = ModuleType("tensorrt_llm.bindings.executor")
    vars(executor).update(vars(fake_executor.fake_bindings()))
    for module in (package, bindings, executor):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(doctor, "query_gpus", lambda: gpus)
    return executor


def invoke() -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["doctor"])
    return result.exit_code, result.stdout.splitlines()


def test_a_whole_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    code, (version, _, *others) = invoke()
    assert (code, version) == (0, "TensorRT-LLM: 1.2.1 (supported: 1.2.1)")
    assert others == ["GPU: NVIDIA H100", "Nothing is missing."]


def test_without_tensorrt_llm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # an import fails
    monkeypatch.setattr(doctor, "query_gpus", lambda: ["NVIDIA H100"])
    code, lines = invoke()
    assert code == 1
    (package,) = (line for line in lines if line.startswith("Missing: "))
    assert "tensorrt_llm cannot be imported" in package
    assert "run in a Triton container with TensorRT-LLM 1.2.1, with --gpus all" in package


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ())
    code, lines = invoke()
    assert (code, lines[-1][:33]) == (1, "Missing: nvidia-smi lists no GPU:")


def test_on_a_cpu_it_checks_what_a_server_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    monkeypatch.setattr(doctor, "query_gpus", tuple)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, lines = invoke()
    assert (code, lines[-1]) == (0, "Nothing is missing.")
    names = ["TensorRT-LLM", "Python", "Processor", "OpenVINO", "Free memory", "Cache directory"]
    assert [line.partition(": ")[0] for line in lines[:-1]] == names
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    code, lines = invoke()
    package, folder = (line for line in lines if line.startswith("Missing: "))
    assert code == 1
    assert "openvino" in package
    assert "run pip install 'smartspec-py[torch,openvino]'" in package
    assert "cannot be written (Not a directory): set XDG_CACHE_HOME" in folder


def test_a_missing_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = install(monkeypatch)
    del executor.KvCacheStats
    executor.FinishReason = type("FinishReason", (), {"END_ID": 1})
    code, lines = invoke()
    assert code == 1
    assert lines[-3:] == [
        "Missing: the bindings have no FinishReason(LENGTH)",
        "Missing: the bindings have no FinishReason(STOP_WORDS)",
        "Missing: the bindings have no KvCacheStats",
    ]


@pytest.mark.parametrize(
    ("script", "gpus"),
    [("echo 'GPU A'; echo 'GPU B'", ("GPU A", "GPU B")), ("echo 'no driver'; exit 9", ())],
)
def test_gpus_are_those_of_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, gpus: tuple[str, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.query_gpus() == gpus
    program.unlink()
    assert doctor.query_gpus() == ()
