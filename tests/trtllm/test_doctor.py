"""The doctor on a fake executor: it finds missing names, and its experiments tell fakes apart.

Nothing here says anything about the real executor.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from smartspec_cli import doctor_environment
from smartspec_cli.app import app
from smartspec_cli.doctor_environment import NAMES, missing_names
from smartspec_cli.doctor_experiments import (
    EXPERIMENTS,
    Bench,
    cost_of_verification,
    drafts_accepted,
    finding_of,
    two_executors,
)
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import Executor, FinishReason

TOKEN_S = 0.01
COST = CostModel(PassTable((1, 2), (1, 2), ((TOKEN_S, 2 * TOKEN_S), (2 * TOKEN_S, 4 * TOKEN_S))))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    build = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 1024, "max_draft_len": 4}
    document = {"build_config": build, "pretrained_config": {"vocab_size": 1000}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    return tmp_path


def bench(target: Path, made: type[Executor] = Executor, **options: Any) -> Bench:
    clock = VirtualClock()
    bindings = fake_executor.fake_bindings()
    bindings.Executor = lambda *args: made(*args, clock=clock, **options)
    return Bench(bindings, target, now=clock.now)


class StoppingExecutor(Executor):
    """Ends a text whose drafts were all accepted."""

    def _draw_step(self, job: Any) -> FinishReason:
        finish = super()._draw_step(job)
        return FinishReason.STOP_WORDS if job.drafts else finish


@pytest.mark.parametrize(
    ("experiment", "made", "answer"),
    [
        (drafts_accepted, Executor, "yes"),
        (drafts_accepted, StoppingExecutor, "no"),
        (cost_of_verification, Executor, "5.0"),  # the last token and 4 drafts, 10 ms each
        (two_executors, Executor, "works"),
    ],
)
def test_an_experiment_tells_fakes_apart(
    target: Path, experiment: Any, made: type[Executor], answer: str
) -> None:
    found = experiment(bench(target, made, cost=COST))
    assert (found.name, found.answer) == (experiment.__name__, answer), found.evidence


def test_an_exception_is_a_finding_and_the_next_experiment_has_a_new_executor(
    target: Path,
) -> None:
    def breaks(asked: Bench) -> Any:
        """What breaks?"""
        asked.executor.shutdown()
        raise ZeroDivisionError("in the middle")

    asked = bench(target)
    first = finding_of(asked, breaks)
    assert (first.answer, first.evidence) == ("not settled", "ZeroDivisionError('in the middle')")
    assert finding_of(asked, drafts_accepted).answer == "yes"
    failed = finding_of(bench(target, error_prob=1.0), drafts_accepted)
    assert (failed.answer, "a request failed" in failed.evidence) == ("not settled", True)


def test_the_fake_has_the_names_that_the_adapter_uses_and_no_others() -> None:
    """So the adapter, which runs on the fake in other tests, uses no other name."""
    assert list(missing_names(fake_executor)) == []
    for class_name, names in NAMES.items():
        found = getattr(fake_executor, class_name)
        if dataclasses.is_dataclass(found):
            fields = {field.name for field in dataclasses.fields(found)}
            assert fields == set(names.split()) - {"has_error"}, class_name


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str] = ("NVIDIA H100",)) -> Any:
    """A package tensorrt_llm made of the fake."""
    package, bindings = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.bindings")
    package.__version__ = "1.2.1"  # type: ignore[attr-defined]
    executor = ModuleType("tensorrt_llm.bindings.executor")
    vars(executor).update(vars(fake_executor.fake_bindings(clock=VirtualClock())))
    for module in (package, bindings, executor):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(doctor_environment, "query_gpus", lambda: gpus)
    return executor


def invoke(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_without_tensorrt_llm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # an import fails
    monkeypatch.setattr(doctor_environment, "query_gpus", tuple)
    code, text, _ = invoke()
    assert code == 1
    assert "tensorrt_llm cannot be imported" in text
    assert "nvidia-smi lists no GPU" in text


def test_a_missing_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = install(monkeypatch)
    del executor.KvCacheStats
    executor.FinishReason = type("FinishReason", (), {"END_ID": 1})
    code, text, _ = invoke("--json", "-")
    missing = json.loads(text)["missing"]
    assert code == 1
    assert missing == [
        "the bindings have no FinishReason(LENGTH)",
        "the bindings have no FinishReason(STOP_WORDS)",
        "the bindings have no KvCacheStats",
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
    assert doctor_environment.query_gpus() == gpus
    program.unlink()
    assert doctor_environment.query_gpus() == ()


def test_the_report_is_written_after_each_experiment(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    """An abort in C++ code cannot be caught; here it is an exception that nothing catches."""
    executor = install(monkeypatch)
    report = tmp_path / "doctor.md"
    code, text, errors = invoke("--target", target, "--report", report)
    assert code == 0, errors
    assert report.read_text() == text.removesuffix("\n")
    assert "| TensorRT-LLM | 1.2.1 (supported: 1.2.1) |" in text
    assert "| drafts_accepted | yes |" in text
    assert "not settled |" not in text
    assert [line.removeprefix("doctor: ") for line in errors.splitlines()] == [
        experiment.__name__ for experiment in EXPERIMENTS
    ]

    class AbortError(BaseException):
        pass

    def end(*arguments: Any) -> Any:
        raise AbortError

    monkeypatch.setattr(executor.Executor, "enqueue_requests", end)
    with pytest.raises(AbortError):
        CliRunner().invoke(app, ["doctor", "--target", str(target), "--report", str(report)])
    assert "Nothing is missing." in report.read_text()
    assert "drafts_accepted" not in report.read_text()


def test_the_package_s_output_is_not_in_the_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    text = 'import os\nprint("from Python")\nos.write(1, b"from C++")\nraise OSError("libcuda.so")'
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    monkeypatch.setattr(doctor_environment, "query_gpus", tuple)
    monkeypatch.setattr(sys, "argv", ["smartspec", "doctor", "--json", "-"])
    with pytest.raises(SystemExit):
        app()
    out, err = capfd.readouterr()
    assert "libcuda.so" in json.loads(out)["missing"][0]
    assert "from Python" in err
    assert "from C++" in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--target", "nowhere"), "--target: nowhere has no config.json"),
        (("--report", "nowhere/a.md"), "--report: nowhere/a.md must be a writable file"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, str], sentence: str) -> None:
    code, _, errors = invoke(*options)
    assert (code, sentence in errors) == (2, True)


def test_a_draft_alone_is_refused(target: Path) -> None:
    assert "needs --target" in invoke("--draft", target)[2]
