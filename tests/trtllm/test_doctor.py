"""The doctor on the fake: it finds planted differences, and its experiments tell fakes apart.

Nothing here says anything about the real executor.
"""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from smartspec_cli.app import app
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import Behaviour, DoubleBindings, FinishReason
from smartspec_trtllm import doctor_environment, doctor_sampling
from smartspec_trtllm.doctor import ALL_EXPERIMENTS, diagnose, experiment
from smartspec_trtllm.doctor_bench import Bench
from smartspec_trtllm.doctor_experiments import (
    cost_of_verification,
    default_priority,
    finish_of_full_acceptance,
    iteration_latency,
    post_processor_positions,
    reuse_after_cancel,
    reused_tokens_charged,
    specdec_stats,
    two_executors,
)
from smartspec_trtllm.doctor_finding import UNSETTLED, UnsettledError
from smartspec_trtllm.doctor_report import markdown
from smartspec_trtllm.doctor_sampling import sampling_with_logits, sampling_without_logits

TOKEN_S = 0.01


def engine(folder, **build):
    folder.mkdir(exist_ok=True)
    limits = {
        "max_batch_size": 16,
        "max_num_tokens": 2048,
        "max_input_len": 1024,
        "max_seq_len": 1024,
        "max_draft_len": 4,
        "speculative_decoding_mode": 2,
        "plugin_config": {"tokens_per_block": 32},
    }
    document = {"build_config": limits | build, "pretrained_config": {"vocab_size": 1000}}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def target(tmp_path):
    return engine(tmp_path / "target")


def bench(target, draft=None, *, cost=None, bindings=None, **behaviour):
    clock = VirtualClock()
    options = {"clock": clock, "cost": cost, "behaviour": Behaviour(**behaviour)}
    return Bench(bindings or DoubleBindings(**options), target, draft, clock.now, clock.sleep)


@pytest.mark.parametrize(
    ("made", "behaviour", "answer"),
    [
        (finish_of_full_acceptance, {}, "LENGTH"),
        (
            finish_of_full_acceptance,
            {"finish_of_full_acceptance": FinishReason.NOT_FINISHED},
            "NOT_FINISHED",
        ),
        (specdec_stats, {"fills_specdec_stats": True}, "yes"),
        (specdec_stats, {"fills_specdec_stats": False}, "no"),
        (reuse_after_cancel, {"keeps_blocks_after_cancel": True}, "yes"),
        (reuse_after_cancel, {"keeps_blocks_after_cancel": False}, "no"),
        (post_processor_positions, {"processes_all_positions": True}, "all"),
        (post_processor_positions, {"processes_all_positions": False}, "some"),
        (reused_tokens_charged, {"charges_reused_tokens": True}, "yes"),
        (reused_tokens_charged, {"charges_reused_tokens": False}, "no"),
        (default_priority, {}, "0.5"),
        (two_executors, {}, "works"),
    ],
)
def test_an_experiment_tells_two_doubles_apart(target, made, behaviour, answer):
    found = made(bench(target, **behaviour))
    assert (found.name, found.answer) == (made.__name__, answer)
    assert found.is_settled
    assert found.evidence


LOGITS = (1.0, 0.0)
"""At temperature 2 the likelier of the two comes with 1 / (1 + exp(-0.5)) = 0.622."""


@pytest.mark.parametrize(
    ("made", "behaviour", "answer"),
    [
        (sampling_without_logits, {"redraws_after_mismatch": True}, "no"),
        (sampling_without_logits, {"redraws_after_mismatch": False}, "yes"),
        (sampling_with_logits, {"tempers_draft_logits": False}, "as drawn"),
        (sampling_with_logits, {"tempers_draft_logits": True}, "before the temperature"),
    ],
)
def test_sampling_is_judged_by_counting(target, made, behaviour, answer):
    """Seeds are fixed, and so are the counts: no chance in this test."""
    found = made(bench(target, sampled_logits=LOGITS, **behaviour))
    assert found.answer == answer, found.evidence


def test_sampling_is_not_settled_where_one_token_is_certain(target):
    """The fake that follows the rule draws a token of its own for each seed."""
    with pytest.raises(UnsettledError, match="prompts has two tokens"):
        sampling_without_logits(bench(target))


def test_the_margin_is_that_of_chance():
    """0.5 against 0.6 of 3000 each: 0.1 / sqrt(2 * 0.55 * 0.45 / 3000) = 7.78."""
    assert doctor_sampling._z(0.5, 0.6) == pytest.approx(7.78, abs=0.01)


def test_the_cost_of_a_verification_in_steps(target):
    """10 ms a token. A cached prompt leaves one token and 4 drafts to compute: 5 steps."""
    table = PassTable(rows=(1,), tokens_per_row=(1, 2), seconds=((TOKEN_S, 2 * TOKEN_S),))
    found = cost_of_verification(bench(target, cost=CostModel(target=table)))
    assert found.answer == "5.0"
    assert "50.00 ms" in found.evidence


@pytest.mark.parametrize(
    ("lags", "pass_s", "answer"),
    [
        (True, TOKEN_S, "of the iteration before, with idle time"),
        (False, TOKEN_S, "its own"),
        (True, 0.3, UNSETTLED),
    ],
)
def test_whose_time_the_statistics_have(target, lags, pass_s, answer):
    cost = CostModel(PassTable((1,), (1,), ((pass_s,),)))
    asked = bench(target, cost=cost, lags_latency=lags)
    (found,) = experiment(asked, [iteration_latency], lambda name: None)
    assert found.answer == answer
    assert answer == UNSETTLED or "10.0 ms" in found.evidence


def test_a_second_executor_that_fails_is_a_finding(target, tmp_path):
    found = two_executors(bench(target, tmp_path / "nothing"))
    assert found.answer == "fails"
    assert "File does not exist" in found.evidence


def test_an_engine_without_drafts_settles_what_it_can(tmp_path):
    plain = engine(tmp_path / "plain", speculative_decoding_mode=1, max_draft_len=0)
    found = {f.name: f for f in experiment(bench(plain), ALL_EXPERIMENTS, lambda name: None)}
    assert found["finish_of_full_acceptance"].answer == UNSETTLED
    assert "draft_tokens_external" in found["finish_of_full_acceptance"].evidence
    assert found["reused_tokens_charged"].answer == "yes"


def test_an_exception_is_a_finding_and_the_next_experiment_has_a_new_executor(target):
    asked = bench(target)

    def breaks(asked):
        asked.executor.shutdown()
        raise ZeroDivisionError("in the middle")

    first, second = experiment(asked, [breaks, specdec_stats], lambda name: None)
    assert (first.answer, first.evidence) == (UNSETTLED, "ZeroDivisionError: in the middle")
    assert second.answer == "no"


def test_a_failed_request_is_not_taken_for_an_answer(target):
    failing = DoubleBindings(clock=VirtualClock(), error_prob=1.0)
    (found,) = experiment(bench(target, bindings=failing), [specdec_stats], lambda name: None)
    assert found.answer == UNSETTLED
    assert "a request failed" in found.evidence


def install(monkeypatch, gpus=("NVIDIA H100, 580.1, 81559 MiB, 9.0",), **options):
    """A package tensorrt_llm made of the fake."""
    package, bindings = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.bindings")
    package.__version__ = "1.2.1"
    bindings.binding_type = "nanobind"
    bindings.executor = DoubleBindings(**options)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", bindings)
    monkeypatch.setattr(doctor_environment, "query_gpus", lambda: gpus)
    return bindings


def invoke(*arguments):
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_without_tensorrt_llm_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # an import fails
    monkeypatch.setattr(doctor_environment, "query_gpus", tuple)
    code, text, errors = invoke()
    assert code == 1
    assert "Traceback" not in text + errors
    assert "tensorrt_llm cannot be imported" in errors
    assert "trtllm-python-py3" in errors
    assert "nvidia-smi lists no GPU" in errors
    assert "There are no bindings to compare." in text


def test_bindings_without_an_executor_are_too_new(monkeypatch):
    bindings = install(monkeypatch)
    del bindings.executor
    code, _, errors = invoke()
    assert code == 1
    assert "has no executor" in errors
    assert "1.2.1" in errors


def test_a_driver_that_is_missing_is_no_traceback(monkeypatch, tmp_path):
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("libcuda.so.1: cannot open shared object")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    monkeypatch.setattr(doctor_environment, "query_gpus", tuple)
    (diagnosis,) = diagnose(None, None)
    assert diagnosis.environment.tensorrt_llm is None
    assert "libcuda.so.1" in diagnosis.environment.missing[0].what


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo 'GPU A, 580.1'; echo 'GPU B, 580.1'", ("GPU A, 580.1", "GPU B, 580.1")),
        ("echo 'no driver'; exit 9", ()),
    ],
)
def test_gpus_are_those_of_nvidia_smi(monkeypatch, tmp_path, script, gpus):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_environment.query_gpus() == gpus
    program.unlink()
    assert doctor_environment.query_gpus() == ()


def test_the_whole_report(monkeypatch, target, tmp_path):
    table = PassTable(rows=(1,), tokens_per_row=(1, 2), seconds=((TOKEN_S, 2 * TOKEN_S),))
    behaviour = Behaviour(sampled_logits=LOGITS)
    clock = VirtualClock()
    install(monkeypatch, clock=clock, cost=CostModel(target=table), behaviour=behaviour)
    draft = engine(tmp_path / "draft", speculative_decoding_mode=1)
    report = tmp_path / "doctor.md"
    code, text, _ = invoke("--target", target, "--draft", draft, "--report", report)
    assert code == 0, text
    assert report.read_text() == text.removesuffix("\n")
    assert "| TensorRT-LLM | 1.2.1 (expected: 1.2.1) |" in text
    assert "NVIDIA H100" in text
    document = json.loads(report.with_suffix(".json").read_text())
    answers = {finding["name"]: finding["answer"] for finding in document["findings"]}
    assert answers.pop("cost_of_verification")  # the real clock, on which nothing takes time
    assert answers.pop("iteration_latency")
    assert answers == {
        "cpp_backend": "no",
        "default_priority": "0.5",
        "finish_of_full_acceptance": "LENGTH",
        "specdec_stats": "no",
        "reuse_after_cancel": "no",
        "post_processor_positions": "some",
        "two_executors": "works",
        "reused_tokens_charged": "yes",
        "sampling_without_logits": "no",
        "sampling_with_logits": "as drawn",
    }
    for name, answer in answers.items():
        assert f"### {name}: {answer}" in text
    assert document["environment"]["binding_type"] == "nanobind"
    assert document["is_healthy"] is True


def test_a_report_is_there_before_the_process_dies(monkeypatch, target, tmp_path):
    """An abort in C++ cannot be caught; here it is an exception that nothing catches."""
    bindings = install(monkeypatch)

    class AbortError(BaseException):
        pass

    def abort(*arguments):
        raise AbortError

    monkeypatch.setattr(bindings.executor, "Executor", abort)
    report = tmp_path / "doctor.md"
    with pytest.raises(AbortError):
        CliRunner().invoke(app, ["doctor", "--target", str(target), "--report", str(report)])
    assert "### default_priority: 0.5" in report.read_text()
    assert "finish_of_full_acceptance" not in report.read_text()


def test_what_the_package_prints_does_not_get_into_the_json(monkeypatch, tmp_path, capfd):
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    text = 'import os\nprint("from Python")\nos.write(1, b"from C++")\nraise ImportError("no")'
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    monkeypatch.setattr(doctor_environment, "query_gpus", tuple)
    monkeypatch.setattr(sys, "argv", ["smartspec", "doctor", "--json", "-"])
    with pytest.raises(SystemExit):
        app()
    out, err = capfd.readouterr()
    assert json.loads(out)["is_healthy"] is False
    assert "from Python" in err
    assert "from C++" in err


def test_a_difference_that_the_adapter_meets_is_an_error(monkeypatch):
    bindings = install(monkeypatch)
    bindings.executor.FinishReason = SimpleNamespace(__members__={"END_ID": 1})
    code, text, _ = invoke("--json", "-")
    assert code == 1
    document = json.loads(text)
    broken = {d["name"] for d in document["differences"] if d["breaks_adapter"]}
    assert {"FinishReason.LENGTH", "FinishReason.STOP_WORDS"} <= broken
    assert "FinishReason.TIMED_OUT" not in broken
    (diagnosis,) = diagnose(None, None)
    assert "The adapter uses things that differ here" in markdown(diagnosis)
    assert not replace(diagnosis, differences=None).document()["differences"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--target", "nowhere"), "--target: nowhere has no config.json"),
        (("--draft", "nowhere"), "--draft: nowhere has no config.json"),
        (
            ("--report", "nowhere/report.md"),
            "--report: nowhere/report.md must be a writable file",
        ),
    ],
)
def test_wrong_options_are_named(options, sentence):
    code, _, errors = invoke(*options)
    assert code == 2
    assert sentence in errors


def test_a_draft_alone_is_refused(target):
    assert "needs --target" in invoke("--draft", target)[2]
