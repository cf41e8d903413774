"""The benchmark for a CUDA device: its dry run on the CPU, and its arithmetic by hand."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from smartspec_bench.exactness import CheckReport, Divergence, reference
from smartspec_bench.expand import Size, expand, expanded
from smartspec_bench.gpu import __main__ as command
from smartspec_bench.gpu import models
from smartspec_bench.gpu.device import DeviceError
from smartspec_bench.gpu.document import PARTS, Document, ModelInfo
from smartspec_bench.gpu.exact import judged
from smartspec_bench.gpu.load import arrivals
from smartspec_bench.gpu.models import model_on_device, num_weights
from smartspec_bench.gpu.page import report as report_of
from smartspec_bench.gpu.pair import TARGET_FOLDER, build_pair, serving
from smartspec_bench.gpu.passes import PassTimes, accept_probs, predicted_tps
from smartspec_bench.gpu.plan import DRY_RUN, FULL, LOADED_POLICIES, LOADS, POLICIES
from smartspec_bench.gpu.run import run
from smartspec_bench.gpu.streams import LocalStreams, full_house, params_of
from smartspec_bench.open_loop import Bounds, OpenLoop
from smartspec_bench.prompts import Prompt
from smartspec_bench.report.blocks import markdown
from smartspec_bench.workloads import generate
from smartspec_py.core.types import FinishReason
from smartspec_py.engines.base import Event
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import LimitsConfig, ServerConfig
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.engines import FakeEngineConfig

REPOSITORY = Path(__file__).parents[1]
CPU = torch.device("cpu")
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """Exit status, document and page."""
    folder = tmp_path_factory.mktemp("gpu")
    status = command.main(["--dry-run", str(folder)])
    return status, json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


@pytest.mark.slow
def test_dry_run_has_all_parts_and_says_what_it_is(
    dry_run: tuple[int, dict[str, Any], str],
) -> None:
    status, document, text = dry_run
    assert status == 0
    assert document["left_out"] == []
    assert document["is_dry_run"]
    assert "figures mean nothing" in document["note"]
    assert f"**{document['note']}**" in text
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "Device", "Pair", "Share of the copy bandwidth", "Exactness", "Passes",
        "Policies by batch", "Latency under load",
    ]  # fmt: skip


@pytest.mark.slow
def test_dry_run_changes_no_text(dry_run: tuple[int, dict[str, Any], str]) -> None:
    arms = dry_run[1]["exactness"]
    assert [arm["mode"] for arm in arms] == ["alone", "alone", "mixed"]
    assert [arm["num_differences"] for arm in arms] == [0, 0, 0]
    assert all(arm["num_tokens"] > 0 and arm["num_drafted"] > 0 for arm in arms)
    share = arms[0]["num_accepted"] / arms[0]["num_drafted"]
    assert share > 0.4, "the expanded pair agrees as the small one does"


@pytest.mark.slow
def test_dry_run_measures_every_policy(dry_run: tuple[int, dict[str, Any], str]) -> None:
    """A share above 1 is possible on a CPU, whose caches hold small models."""
    document = dry_run[1]
    assert document["device"]["kind"] == "cpu"
    assert document["device"]["copy_gb_per_s"] > 0
    assert 0 < document["bandwidth"]["share"] < 20
    assert [point["batch_size"] for point in document["batches"]] == list(DRY_RUN.batches)
    for point in document["batches"]:
        assert [rate["policy"] for rate in point["rates"]] == list(POLICIES)
        assert all(len(rate["tokens_tps"]) == DRY_RUN.max_rounds for rate in point["rates"])
        assert all(tps > 0 for rate in point["rates"] for tps in rate["tokens_tps"])
        lengths = {rate["policy"]: rate["draft_len"] for rate in point["rates"]}
        assert lengths["none"] == 0 < lengths["fixed:1"] <= 1 < lengths["fixed:3"] <= 3
        assert len(point["target_ms"]) == 8
    assert all(0 <= prob <= 1 for prob in document["accept_probs"])


@pytest.mark.slow
def test_dry_run_loads_every_policy_alike(dry_run: tuple[int, dict[str, Any], str]) -> None:
    document = dry_run[1]
    by_load = {load: [p for p in document["load"] if p["load"] == load] for load in LOADS}
    for load, points in by_load.items():
        assert sorted(point["policy"] for point in points) == sorted(LOADED_POLICIES)
        assert len({point["num_requests"] for point in points}) == 1
        assert {point["num_failed"] for point in points} == {0}
        assert points[0]["rate_rps"] == pytest.approx(load * document["saturation_rps"])


def test_parts_without_time_are_named(tmp_path: Path) -> None:
    """What is measured in any case: the device, the pair, its bandwidth. In bfloat16 weights are
    not packed, so that a pass can also be timed without graphs."""
    plan = replace(DRY_RUN, total_s=0.0, batches=(1, 2), dtype="bfloat16")
    document = run(plan, CPU, tmp_path, time.monotonic(), lambda text: None)
    names = {name.partition(":")[0] for name in document.left_out}
    assert names == {"exactness", "batches", "load"}
    assert "batches: 2 at once" in document.left_out
    assert document.bandwidth is not None
    assert document.bandwidth.plain_ms is not None
    assert "batches: 2 at once" in (tmp_path / "gpu.md").read_text()


def test_differences_are_near_ties_or_faults() -> None:
    """A text said to have gone on with its own token differs by nothing; with one that the model
    would never take, by what no rounding explains."""
    plan = replace(DRY_RUN, batches=(1,))
    pair = build_pair(plan, CPU, lambda text: None)
    params = GenerateParams(text=generate("sql", 1, 1).prompt, max_tokens=3)
    with serving(pair) as server:
        (case,) = reference(server, [params])
    first, unlikely = case.tokens[0], pair.engine.end_tokens[0]
    tie, fault = (Divergence("", "", params, 0, (), first, found) for found in (first, unlikely))
    report = CheckReport("fixed:3", "alone", num_requests=2, divergences=(tie, fault))
    arm = judged(pair, server.intake, report)
    assert (arm.num_differences, arm.num_near_ties, arm.num_faults) == (2, 1, 1)
    document = Document(is_dry_run=True, date="", exactness=[arm])
    assert document.num_faults == 1
    assert "| fixed:3, alone | 2 | 0 | 0 of 0 | 2 | 1 | 1 |" in markdown(report_of(document))


def test_page_of_a_run_that_has_just_begun() -> None:
    text = markdown(report_of(Document(is_dry_run=False, date="2026-01-01T00:00:00+00:00")))
    assert f"Left out: {'; '.join(PARTS)}." in text
    assert "dry run" not in text


def test_missing_packages_end_it_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("json", "no_such_package"))
    assert command.main(["--dry-run"]) == 2
    assert f"run: {sys.executable} -m pip install no_such_package\n" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "out")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_script_starts_it_without_an_installation() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [REPOSITORY / "scripts/bench", "--gpu", "--help"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--dry-run" in done.stdout


def test_it_needs_nothing_of_the_command_line() -> None:
    """What an image for CUDA need not have is made unimportable."""
    code = (
        "import sys\n"
        "absent = ['rich', 'typer', 'tritonclient', 'aiohttp', 'altair', 'jinja2']\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "import smartspec_bench.gpu.run\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}/backend:{REPOSITORY}/tools"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@torch.inference_mode()
def test_model_made_without_memory_is_that_of_the_file(tmp_path: Path) -> None:
    """Every buffer, the rotary frequencies among them, and every logit, bit by bit."""
    size = Size(hidden_size=512, num_layers=4, intermediate_size=400, num_heads=16, vocab_size=2100)
    expand(TARGET_FOLDER, tmp_path / "large", **size, seed=3)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32).eval()
    config, tensors = expanded(TARGET_FOLDER, size, torch.Generator().manual_seed(3))
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    made = model_on_device(config, weights, CPU, torch.float32)
    made.set_attn_implementation("sdpa")
    buffers = dict(made.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    assert all(torch.equal(buffers[name], tensor) for name, tensor in loaded.named_buffers())
    tokens = torch.randint(1, 2048, (2, 12), generator=torch.Generator().manual_seed(4))
    assert torch.equal(made(tokens).logits, loaded(tokens).logits)


def test_model_refuses_weights_that_lack_a_tensor() -> None:
    config, tensors = expanded(TARGET_FOLDER, DRY_RUN.target, torch.Generator().manual_seed(0))
    del tensors["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"layers\.2\.mlp\.up_proj"):
        model_on_device(config, tensors, CPU, torch.bfloat16)


def test_full_run_costs_what_7b_does() -> None:
    """Made without memory, so that all sizes are those that transformers takes. The embeddings are
    in no pass: 2 * 32000 * 2048 weights of both ends, of which one is read."""
    config = json.loads((TARGET_FOLDER / "config.json").read_text())
    counts = {}
    for name, size in (("target", FULL.target), ("draft", FULL.draft)):
        sizes = {
            "hidden_size": size["hidden_size"],
            "num_hidden_layers": size["num_layers"],
            "intermediate_size": size["intermediate_size"],
            "num_attention_heads": size["num_heads"],
            "num_key_value_heads": size["num_heads"],
            "vocab_size": size["vocab_size"],
        }
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(config | sizes))
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
        assert counts[name] == pytest.approx(num_weights(size), rel=0.001)
    assert counts["target"] == pytest.approx(7.0e9, rel=0.01)
    embeddings = 32000 * 2048
    assert (counts["target"] - embeddings) / (counts["draft"] - embeddings) == pytest.approx(
        40, 0.05
    )


def test_memory_is_looked_at_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.2 B weights of 2 bytes are 14.4 GB, and 65.5 M random numbers of 4 bytes 0.3 GB."""
    sizes, cuda = (FULL.target, FULL.draft), torch.device("cuda")
    monkeypatch.setattr(models, "memory_bytes", lambda device: (int(14e9), int(16e9)))
    with pytest.raises(DeviceError, match=r"14\.0 GB are free, must be at least 14\.7 GB"):
        models.check_memory(sizes, cuda, torch.bfloat16)
    monkeypatch.setattr(models, "memory_bytes", lambda device: (int(16e9), int(16e9)))
    models.check_memory(sizes, cuda, torch.bfloat16)


@pytest.mark.parametrize(("free_gb", "expected"), [(62.0, 128), (10.0, 32), (0.2, 1)])
def test_as_many_rows_as_have_room(
    monkeypatch: pytest.MonkeyPatch, free_gb: float, expected: int
) -> None:
    """A row of 256 tokens of 512 KiB and 16 KiB is 138 MB, and 0.7 of the memory is for rows."""
    infos = [ModelInfo({}, 0, 0, num_bytes) for num_bytes in (512 * 1024, 16 * 1024)]
    monkeypatch.setattr(models, "memory_bytes", lambda device: (int(free_gb * 1e9), int(80e9)))
    rows = models.batch_size_that_fits(FULL.batches, torch.device("cuda"), infos)
    assert rows == expected


def test_no_room_for_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "memory_bytes", lambda device: (int(0.1e9), int(80e9)))
    info = ModelInfo({}, 0, 0, 512 * 1024)
    with pytest.raises(DeviceError, match=r"0\.1 GB are free .*, must be at least 0\.2 GB"):
        models.batch_size_that_fits(FULL.batches, torch.device("cuda"), [info])


@pytest.mark.parametrize("size", [FULL.target, FULL.draft, DRY_RUN.target, DRY_RUN.draft])
def test_norms_stay_exact(size: Size) -> None:
    """The shipped pair's hidden size times a power of 4."""
    assert math.log(size["hidden_size"] / 128, 4) == round(math.log(size["hidden_size"] / 128, 4))


def test_acceptance_by_position() -> None:
    """3 drafts of which 1 was accepted, 3 of which all were; a step without drafts says nothing."""
    steps = [
        [Event(1, num_drafted=3, num_accepted=1), Event(2)],
        [Event(2, num_drafted=3, num_accepted=3)],
    ]
    records: Any = [SimpleNamespace(events=events) for events in steps]
    assert accept_probs(records) == [1.0, 0.5, 1.0]
    assert accept_probs([]) == []


def test_rates_that_passes_speak_for() -> None:
    """10 ms a target pass and 1 ms a draft pass, acceptance 1/2 and 1/2: 1 token in 10 ms, 1.5 in
    11, 1.75 in 12."""
    times = PassTimes([10.0, 10.0, 10.0], 1.0)
    expected = [100.0, 1.5 / 0.011, 1.75 / 0.012]
    assert predicted_tps(1, times, [0.5, 0.5]) == pytest.approx(expected)
    assert predicted_tps(2, times, [0.5, 0.5]) == pytest.approx([2 * tps for tps in expected])


def test_there_is_always_an_arrival() -> None:
    assert arrivals(1e-9, 1.0) == [0.0]
    assert 60 < len(arrivals(100.0, 1.0)) < 140
    assert max(arrivals(100.0, 1.0)) < 1.0


@pytest.fixture
def server() -> Iterator[Server]:
    config = ServerConfig(
        engine=FakeEngineConfig(kind="fake", tokenizer=str(TARGET_FOLDER)),
        limits=LimitsConfig(max_sequences=4),
    )
    server = Server(build_engine(config, REPOSITORY), config)
    server.start()
    yield server
    server.stop()


def requests(max_tokens: int = MAX_TOKENS) -> Iterator[GenerateParams]:
    return repeat(params_of(Prompt("Task: chat"), "fixed:2", max_tokens))


def test_full_house_sends_the_next_when_one_has_ended(server: Server) -> None:
    """3 out and 5 that count: 4 more leave, and the 2 that are out at the end may finish too."""
    done = full_house(server, requests(), 3, 5, time.monotonic() + 60, drains=True)
    assert [request.finish_reason for request in done.requests] == [FinishReason.LENGTH] * 7
    assert {request.num_tokens for request in done.requests} == {MAX_TOKENS}
    assert {record.batch_size for record in done.records} <= {0, 1, 2, 3}
    assert done.rate is not None
    assert done.rate.tokens_tps > 0
    assert 0 <= done.rate.num_accepted <= done.rate.num_drafted <= 2 * done.rate.num_decoded


def test_full_house_leaves_nothing_behind(server: Server) -> None:
    done = full_house(server, requests(400), 3, 3, time.monotonic() - 1)
    assert len(done.requests) == 3
    assert {request.num_finals for request in done.requests} == {1}
    again = full_house(server, requests(), 2, 2, time.monotonic() + 60)
    ends = [request.finish_reason for request in again.requests]
    assert len(ends) == 3
    assert ends.count(FinishReason.LENGTH) >= 2


def test_local_streams_serve_the_open_loop(server: Server) -> None:
    """Two that are due at once, of which one asks for more tokens than a sequence may have."""
    prompts = [Prompt("Task: qa"), Prompt("Task: qa", max_tokens=100_000)]
    fields = {"max_tokens": MAX_TOKENS, "speculation_policy": "none"}
    loop = OpenLoop(LocalStreams(server), Bounds(2, 1.0, timeout_s=60.0), fields)
    good, bad = asyncio.run(loop.run([0.0, 0.0], iter(prompts)))
    assert good.error is None
    assert good.num_tokens == MAX_TOKENS
    assert good.last["finish_reason"] == "length"
    assert bad.error is not None
    assert "max_tokens" in bad.error
