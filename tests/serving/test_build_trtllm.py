"""From engine.json and engine directories to an engine, with fakes in the bindings' place."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from harness import LoopHarness, fake_text

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.engines.base import Prefill, SequenceStart
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.trtllm.build import capabilities_of
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.engine_dir import Role, read_engine
from smartspec_py.engines.trtllm.memory import (
    bytes_per_token,
    fixed_bytes,
    free_cache_tokens,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import RequestError
from smartspec_py.serving.server import Server
from smartspec_testing import fake_executor
from smartspec_testing.fake_executor import IterationStats, KvCacheStats
from smartspec_testing.local import LocalSink

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
ENGINE = {"kind": "trtllm", "target": "target", "tokenizer": str(TOKENIZER)}
LIMITS: dict[str, Any] = {"max_sequences": 4, "max_context_len": 200, "max_draft_len": 4}


def engine_document(role: str, *, tp_size: int = 1, quantized: bool = False) -> dict[str, Any]:
    is_target = role == "target"
    return {
        "version": "1.2.1",
        "pretrained_config": {
            "dtype": "bfloat16",
            "num_hidden_layers": 32 if is_target else 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "vocab_size": 2048,
            "mapping": {"tp_size": tp_size, "pp_size": 1, "cp_size": 1},
            "quantization": {"kv_cache_quant_algo": "FP8" if quantized else None},
        },
        "build_config": {
            "max_input_len": 300,
            "max_seq_len": 300,
            "max_batch_size": 8,
            "max_num_tokens": 2000,
            "gather_context_logits": False,
            "max_draft_len": 4 if is_target else 0,
            "speculative_decoding_mode": 2 if is_target else 1,
            "plugin_config": {"use_paged_context_fmha": True},
        },
    }


def write_engine(folder: Path, document: dict[str, Any] | None = None) -> None:
    """In a folder with the name of the role."""
    folder.mkdir()
    document = document or engine_document(folder.name)
    (folder / "config.json").write_text(json.dumps(document))
    for rank in range(document["pretrained_config"]["mapping"]["tp_size"]):
        (folder / f"rank{rank}.engine").write_bytes(bytes(1000))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `tensorrt_llm`, with fakes in it."""
    found = fake_executor.fake_bindings(texts={})
    package: Any = ModuleType("tensorrt_llm")
    package.__file__ = "/opt/tensorrt_llm/__init__.py"
    package.bindings = SimpleNamespace(executor=found)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", package.bindings)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H100")
    return found


def build(
    tmp_path: Path, *, draft: bool = True, limits: dict[str, Any] = LIMITS, **engine: Any
) -> Engine:
    for role in ("target", "draft"):
        if not (tmp_path / role).exists():
            write_engine(tmp_path / role)
    settings = ENGINE | {"cache_tokens": 2048} | ({"draft": "draft"} if draft else {}) | engine
    config = ServerConfig.model_validate({"engine": settings, "limits": limits})
    return build_engine(config, tmp_path)


def test_directories_become_an_engine_that_serves(
    tmp_path: Path, bindings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a draft engine, prompts are looked up. A profile is of one model of GPU."""
    undrafted = build(tmp_path, draft=False)
    assert (set(undrafted.proposers), undrafted.cost.draft) == ({"prompt_lookup"}, None)
    engine = build(tmp_path, profile_cache="cache")
    capabilities = engine.target.capabilities
    assert capabilities.max_context_len == 200
    assert capabilities.max_draft_len == 4
    assert capabilities.max_decode_tokens == 16
    assert capabilities.max_cache_tokens == 2048
    assert capabilities.bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert engine.cost.target.rows == (1, 2, 4)
    assert engine.profile_path is not None
    assert engine.profile_path.is_file()
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H200")
    assert build(tmp_path, profile_cache="cache").profile_path != engine.profile_path
    target, proposer = engine.target, engine.proposers["draft_model"]
    assert isinstance(target, TrtllmTarget)
    assert isinstance(proposer, TrtllmDraftProposer)
    assert target._executor.config.parallel_config is None
    harness = LoopHarness(target=target, proposer=proposer, cost=engine.cost)
    number = harness.submit((3, 4, 5), 30, policy="fixed:3", max_draft_len=4)
    harness.drain()
    assert harness.stories[number].tokens == fake_text((3, 4, 5), 30)
    assert harness.requests[number].num_drafted > 0


@pytest.mark.parametrize(("cache_tokens", "context_len"), [(2048, 296), (224, 220)])
def test_the_context_length_is_what_the_engines_can_hold(
    tmp_path: Path, bindings: Any, cache_tokens: int, context_len: int
) -> None:
    """300 tokens of the build or 224 of the cache, less 4 drafts."""
    engine = build(tmp_path, limits=LIMITS | {"max_context_len": None}, cache_tokens=cache_tokens)
    assert engine.target.capabilities.max_context_len == context_len


def test_ranks_run_in_worker_processes_and_give_no_log_probs(tmp_path: Path, bindings: Any) -> None:
    """The logits of a cancelled request can end a worker process."""
    write_engine(tmp_path / "target", engine_document("target", tp_size=2))
    engine = build(tmp_path)
    assert "return_log_probs" in engine.target.capabilities.unsupported
    assert engine.proposers["draft_model"]._executor.config.parallel_config is None
    found = engine.target._executor.config.parallel_config
    assert found.device_ids == [0, 1]
    worker = found.orchestrator_config.worker_executable_path
    assert worker == "/opt/tensorrt_llm/bin/executorWorker"


@pytest.mark.parametrize(
    ("log_probs", "fields", "name"),
    [
        (True, {"temperature": 1.0, "min_p": 0.1}, "min_p"),
        (True, {"prompt_log_probs": True}, "return_prompt_log_probs"),
        (False, {"return_log_probs": True}, "return_log_probs"),
        (False, {"num_token_log_probs": 1}, "return_token_log_probs"),
    ],
)
def test_fields_that_do_not_work_are_refused_by_name(
    tmp_path: Path, bindings: Any, log_probs: bool, fields: dict[str, Any], name: str
) -> None:
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    server = Server(build(tmp_path, log_probs=log_probs), config)
    with pytest.raises(RequestError, match=name):
        server.intake.receive(GenerateParams(text="Task", max_tokens=9, **fields), LocalSink())


def test_log_probs_need_the_logits_of_the_target(tmp_path: Path, bindings: Any) -> None:
    """The vocabulary of the engine is larger than the tokenizer's."""
    document = engine_document("target")
    document["pretrained_config"]["vocab_size"] = 2100
    write_engine(tmp_path / "target", document)
    target = build(tmp_path).target
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    asked = GenerateParams("Task: qa", 9, return_log_probs=True, bias_words=("a",),
                           bias_weights=(1.0,))  # fmt: skip
    request, _ = Server(build(tmp_path), config).intake.receive(asked, LocalSink())
    assert request.proposers == ()
    target.begin(SequenceStart(1, request.tokens, request.num_prompt, request.sampling))
    target.submit([Prefill(1, tuple(request.tokens), 0, True)])
    (event,) = target.poll(1.0)
    assert len(event.log_probs) == 1
    assert target._executor.config.gather_generation_logits


def test_engines_that_cannot_serve_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    """Without TensorRT-LLM: its import comes later."""
    with pytest.raises(ConfigError, match=r"engine\.target"):
        build(tmp_path, target="nowhere")
    document = engine_document("target")
    document["build_config"]["max_draft_len"] = 2
    (tmp_path / "target" / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"engine\.target: build_config\.max_draft_len is 2"):
        build(tmp_path)


def test_mpi_is_set_up_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TensorRT-LLM the build fails at its import, which comes after."""
    monkeypatch.setattr(os, "environ", environ := {"OMPI_MCA_rmaps_base_inherit": "0"})
    with pytest.raises(ConfigError, match=r"engine.kind: trtllm needs the package tensorrt_llm"):
        build(tmp_path)
    assert environ["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert environ["OMPI_MCA_rmaps_base_inherit"] == "0"  # it was set


def test_limits_are_the_lesser_of_both(tmp_path: Path) -> None:
    """300 less the 4 drafts that a request may bring, and the 8 rows of the build."""
    write_engine(tmp_path / "target")
    target = read_engine(Role.TARGET, tmp_path / "target")
    config: Any = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS}).engine
    limits = LimitsConfig(max_context_len=4000, max_sequences=100)
    found = capabilities_of(target, limits, config, 10_000)
    assert (found.max_context_len, found.max_sequences, found.max_draft_len) == (296, 8, 4)
    document = engine_document("target")
    document["build_config"]["max_num_tokens"] = 100  # each verification is charged in full
    shorter = replace(target, config=document)
    assert capabilities_of(shorter, LimitsConfig(), config, 10_000).max_context_len == 96


@pytest.mark.parametrize(
    ("role", "change", "per_token", "share", "width"),
    [
        ("target", {}, 131_072, 1, 5),
        ("draft", {}, 65_536, 1, 1),
        ("target", {"quantized": True}, 65_536, 1, 5),
        ("target", {"tp_size": 4}, 131_072 // 4, 4, 5),
    ],
)
def test_memory_of_a_token_and_of_all_else(
    tmp_path: Path, role: str, change: dict[str, Any], per_token: int, share: int, width: int
) -> None:
    """2 x 32 x 8 x 128 x 2 bytes per token in the target, half of it in the draft. Weights of 1,000
    bytes; activations of 2,000 tokens: gate and up of 14,336, and three of 4,096, in 2 bytes;
    buffers of 8 rows x 5 or 1 tokens x 2,048 x 24 bytes."""
    write_engine(tmp_path / role, engine_document(role, **change))
    engine = read_engine(Role(role), tmp_path / role)
    assert bytes_per_token(engine) == per_token
    activations = 2000 * (2 * 14_336 // share + 3 * 4096) * 2
    assert fixed_bytes(engine) == 1000 + activations + 8 * width * 2048 * 24


def test_the_cache_has_what_is_left_of_the_first_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 tokens of 131,072 and 65,536 bytes; other GPUs are not asked."""
    for role in ("target", "draft"):
        write_engine(tmp_path / role)
    engines = [read_engine(role, tmp_path / role) for role in Role]
    taken = sum(map(fixed_bytes, engines))
    free = {0: taken + 1000 * (131_072 + 65_536)}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free[gpu], 0))
    assert free_cache_tokens(engines, 1.0) == 1000
    with pytest.raises(ConfigError, match=r"memory_fraction: 0\.1 of .* memory of GPU 0 has no"):
        free_cache_tokens(engines, 0.1)


@pytest.mark.parametrize(("sizes", "found"), [((256, 256), 256), ((256, 160), 160)])
def test_the_size_of_the_loaded_caches_counts(
    tmp_path: Path, bindings: Any, sizes: tuple[int, int], found: int
) -> None:
    """2,048 tokens are requested, and memory is short for the target or for both. Without
    statistics, the requested number counts."""
    left = list(sizes)

    def short_of_memory(*args: Any) -> Any:
        executor: Any = fake_executor.Executor(*args)
        stats = IterationStats(KvCacheStats(left.pop(0) // 32, 32))
        executor.get_latest_iteration_stats = lambda: [stats]
        return executor

    bindings.Executor = short_of_memory
    target = build(tmp_path).target
    assert target.capabilities.max_cache_tokens == found
    assert target.capabilities.max_context_len == min(200, found - 4)
    target._executor.get_latest_iteration_stats = list
    assert loaded_cache_tokens(target._executor, fake_executor, Role.TARGET, 77) == 77
