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
from pydantic import ValidationError

from smartspec_py.config import (
    ConfigError,
    LimitsConfig,
    ServerConfig,
    TrtllmEngineConfig,
)
from smartspec_py.engines.base import Prefill
from smartspec_py.engines.trtllm.build import _parallel_config, capabilities_of, place
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.engine_dir import EngineFiles as EngineDir
from smartspec_py.engines.trtllm.engine_dir import Role, read_engine
from smartspec_py.engines.trtllm.memory import (
    bytes_per_token,
    fixed_bytes,
    free_cache_tokens,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.intake import EngineFiles
from smartspec_py.serving.request import GenerateParams, RequestError
from smartspec_py.serving.server import Server
from smartspec_testing import fake_executor
from smartspec_testing.local import LocalSink

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
ENGINE = {"kind": "trtllm", "target": "target", "draft": "draft", "tokenizer": str(TOKENIZER)}
LIMITS: dict[str, Any] = {"max_sequences": 4, "max_context_len": 200, "max_draft_len": 4}


def engine_document(role: str, **build: Any) -> dict[str, Any]:
    is_target = role == "target"
    return {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": "float32",
            "num_hidden_layers": 32 if is_target else 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "vocab_size": 2048,
            "mapping": {"tp_size": 1, "pp_size": 1, "cp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_input_len": 300,
            "max_seq_len": 300,
            "max_batch_size": 8,
            "max_beam_width": 1,
            "max_num_tokens": 2000,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "max_draft_len": 4 if is_target else 0,
            "speculative_decoding_mode": 2 if is_target else 1,
            "plugin_config": {
                "gpt_attention_plugin": "auto",
                "remove_input_padding": True,
                "context_fmha": True,
                "use_paged_context_fmha": True,
            },
            **build,
        },
    }


def write_engine(folder: Path, role: str, **build: Any) -> None:
    folder.mkdir()
    document = engine_document(role, **build)
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "rank0.engine").write_bytes(bytes(1000))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `tensorrt_llm`, with fakes in it."""
    found = fake_executor.fake_bindings(texts={})
    package: Any = ModuleType("tensorrt_llm")
    package.__file__ = "/opt/tensorrt_llm/__init__.py"
    package.bindings = SimpleNamespace(executor=found)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", package.bindings)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H100")
    return found


def build(tmp_path: Path, *, draft: bool = True, **engine: Any) -> EngineFiles:
    for role in ("target", "draft"):
        if not (tmp_path / role).exists():
            write_engine(tmp_path / role, role)
    settings = {"kind": "trtllm", "target": "target", "tokenizer": str(TOKENIZER)}
    settings |= {"cache_tokens": 2048} | ({"draft": "draft"} if draft else {}) | engine
    return build_engine(
        ServerConfig.model_validate({"engine": settings, "limits": LIMITS}), tmp_path
    )


def test_directories_become_an_engine_that_serves(tmp_path: Path, bindings: Any) -> None:
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
    target, proposer = engine.target, engine.proposers["draft_model"]
    assert isinstance(target, TrtllmTarget)
    assert isinstance(proposer, TrtllmDraftProposer)
    harness = LoopHarness(target=target, proposer=proposer, cost=engine.cost)
    number = harness.submit((3, 4, 5), 30, policy="fixed:3", max_draft_len=4)
    harness.drain()
    assert harness.stories[number].tokens == fake_text((3, 4, 5), 30)
    assert harness.requests[number].num_drafted > 0


def test_min_p_is_refused_by_name(tmp_path: Path, bindings: Any) -> None:
    """The layer for external drafts ignores it, also in requests without drafts."""
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    server = Server(build(tmp_path), config)
    asked = GenerateParams(text="Task: qa", max_tokens=9, temperature=1.0, min_p=0.1)
    with pytest.raises(RequestError, match="min_p"):
        server.intake.receive(asked, LocalSink())


@pytest.mark.parametrize(("cache_tokens", "context_len"), [(2048, 296), (224, 220)])
def test_the_context_length_is_what_the_engines_can_hold(
    tmp_path: Path,
    bindings: Any,
    monkeypatch: pytest.MonkeyPatch,
    cache_tokens: int,
    context_len: int,
) -> None:
    """300 tokens of the build or 224 of the cache, less 4 drafts. Without limits.max_context_len,
    the profile reads prompts of this length too."""
    monkeypatch.setitem(LIMITS, "max_context_len", None)
    engine = build(tmp_path, cache_tokens=cache_tokens)
    assert engine.target.capabilities.max_context_len == context_len


def test_a_profile_is_of_one_model_of_gpu(
    tmp_path: Path, bindings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h100 = build(tmp_path, profile_cache="cache").profile_path
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H200")
    assert build(tmp_path, profile_cache="cache").profile_path != on_h100


def test_engines_with_several_ranks_give_no_log_probs(tmp_path: Path, bindings: Any) -> None:
    """The logits of a cancelled request can end a worker process."""
    document = engine_document("target")
    document["pretrained_config"]["mapping"]["tp_size"] = 2
    write_engine(tmp_path / "target", "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(document))
    (tmp_path / "target" / "rank1.engine").write_bytes(bytes(1000))
    assert "return_log_probs" in build(tmp_path).target.capabilities.unsupported


def test_an_engine_in_a_worker_process_gives_no_log_probs(tmp_path: Path, bindings: Any) -> None:
    assert "return_log_probs" in build(tmp_path, devices=[1]).target.capabilities.unsupported
    assert "return_log_probs" not in build(tmp_path).target.capabilities.unsupported


def test_without_a_draft_prompts_are_looked_up(tmp_path: Path, bindings: Any) -> None:
    engine = build(tmp_path, draft=False)
    assert set(engine.proposers) == {"prompt_lookup"}
    assert engine.cost.draft is None


@pytest.mark.parametrize("gathers", [True, False])
def test_log_probs_can_be_turned_off(tmp_path: Path, bindings: Any, gathers: bool) -> None:
    """With them the target gathers logits. Its vocabulary is larger than the tokenizer's."""
    write_engine(tmp_path / "target", "target")
    document = engine_document("target")
    document["pretrained_config"]["vocab_size"] = 2100
    (tmp_path / "target" / "config.json").write_text(json.dumps(document))
    engine = build(tmp_path, log_probs=gathers)
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    asked = GenerateParams(text="Task: qa", max_tokens=9, return_log_probs=True, bias_words=("a",),
                           bias_weights=(1.0,))  # fmt: skip
    server = Server(engine, config)
    if not gathers:
        with pytest.raises(RequestError, match="return_log_probs"):
            server.intake.receive(asked, LocalSink())
        top = replace(asked, return_log_probs=False, num_token_log_probs=1)
        with pytest.raises(RequestError, match="return_token_log_probs"):
            server.intake.receive(top, LocalSink())
        return
    with pytest.raises(RequestError, match="return_prompt_log_probs"):
        server.intake.receive(replace(asked, prompt_log_probs=True), LocalSink())
    request = server.intake.receive(asked, LocalSink()).request
    assert request.proposers == ()
    target = engine.target
    target.begin(1, request.tokens, request.num_prompt, request.sampling)
    target.submit([Prefill(1, tuple(request.tokens), 0, True)])
    (event,) = target.poll(1.0)
    assert len(event.log_probs) == 1
    assert target._executor.config.gather_generation_logits  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("build_config", "words"),
    [
        ({"max_draft_len": 2}, ["engine.target", "build_config.max_draft_len", "max-draft-len"]),
        ({"max_seq_len": 100}, ["max_seq_len", "200"]),
        ({"speculative_decoding_mode": 1}, ["speculative_decoding_mode"]),
    ],
)
def test_engines_that_cannot_serve_are_refused_before_they_are_loaded(
    tmp_path: Path, build_config: dict[str, Any], words: list[str]
) -> None:
    write_engine(tmp_path / "target", "target", **build_config)
    with pytest.raises(ConfigError) as raised:
        build(tmp_path)
    assert all(word in str(raised.value) for word in words), raised.value


def test_without_tensorrt_llm_the_error_says_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.kind: trtllm needs the package tensorrt_llm"):
        build(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.target"):
        build(tmp_path, target="nowhere")


def test_limits_are_the_lesser_of_both(tmp_path: Path) -> None:
    """300 less the 4 drafts that a request may bring, and the 8 rows of the build."""
    write_engine(tmp_path / "target", "target")
    target = read_engine(Role.TARGET, tmp_path / "target")
    config = trtllm_config(decode_burst=8)
    limits = LimitsConfig(max_context_len=4000, max_sequences=100)
    found = capabilities_of(target, limits, config, 10_000)
    assert (found.max_context_len, found.max_sequences, found.max_draft_len) == (296, 8, 4)
    shorter = replace(
        target, config=engine_document("target", max_num_tokens=100)
    )  # each verification is charged in full
    assert capabilities_of(shorter, LimitsConfig(), config, 10_000).max_context_len == 96


def test_memory_of_a_token_and_of_all_else(tmp_path: Path) -> None:
    """2 x 32 x 8 x 128 x 2 bytes per token in the target, half of it in the draft; half again with
    an fp8 cache. Weights of 1,000 bytes; buffers of 8 rows x 5 or 1 tokens x 2,048 x 24 bytes."""
    engines = []
    for role in (Role.TARGET, Role.DRAFT):
        write_engine(tmp_path / role, role)
        engines.append(read_engine(role, tmp_path / role))
    assert [bytes_per_token(engine) for engine in engines] == [131072, 65536]
    # Activations of 2,000 tokens: gate and up of 14,336, and three of 4,096, in 2 bytes.
    activations = 2000 * (2 * 14_336 + 3 * 4096) * 2
    for engine, width in zip(engines, (5, 1), strict=True):
        assert fixed_bytes(engine) == 1000 + activations + 8 * width * 2048 * 24
    quantized = engine_document("target")
    quantized["pretrained_config"]["quantization"]["kv_cache_quant_algo"] = "FP8"
    assert bytes_per_token(replace(engines[0], config=quantized)) == 65536
    split = engine_document("target")
    split["pretrained_config"]["mapping"]["tp_size"] = 4
    assert bytes_per_token(replace(engines[0], config=split)) == 131072 // 4
    of_rank = 2000 * (2 * 14_336 // 4 + 3 * 4096) * 2
    assert fixed_bytes(replace(engines[0], config=split)) == 1000 + of_rank + 8 * 5 * 2048 * 24


@pytest.mark.parametrize(
    ("sizes", "found"), [((256, 256), 256), ((256, 160), 160), ((None, None), 2048)]
)
def test_the_size_of_the_loaded_caches_counts(
    tmp_path: Path,
    bindings: Any,
    caplog: pytest.LogCaptureFixture,
    sizes: tuple[int | None, int | None],
    found: int,
) -> None:
    """2,048 tokens are requested; memory is short for the target, for both, or for neither."""
    left = list(sizes)
    bindings.Executor = lambda *args: fake_executor.Executor(*args, cache_tokens=left.pop(0))
    engine = build(tmp_path)
    assert engine.target.capabilities.max_cache_tokens == found
    assert engine.target.capabilities.max_context_len == min(200, found - 4)
    assert ("memory was short" in caplog.text) == (found < 2048)


def test_without_statistics_the_requested_cache_counts(caplog: pytest.LogCaptureFixture) -> None:
    executor = fake_executor.Executor(fake_executor.EngineLimits())
    executor.get_latest_iteration_stats = list  # type: ignore[method-assign]
    assert loaded_cache_tokens(executor, fake_executor, Role.TARGET, 77) == 77
    assert "engine.target" in caplog.text


def test_mpi_is_set_up_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TensorRT-LLM the build fails at its import, which comes after."""
    monkeypatch.setattr(os, "environ", environ := {"OMPI_MCA_rmaps_base_inherit": "0"})
    with pytest.raises(ConfigError, match="tensorrt_llm"):
        build(tmp_path)
    assert environ["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert environ["OMPI_MCA_rmaps_base_inherit"] == "0"  # it was set


@pytest.mark.parametrize(("engine", "is_on"), [({}, False), ({"cuda_graphs": True}, True)])
def test_cuda_graphs_are_for_the_draft_and_only_if_asked_for(
    tmp_path: Path, bindings: Any, engine: dict[str, Any], is_on: bool
) -> None:
    made = build(tmp_path, **engine)
    executors = [made.proposers["draft_model"]._executor, made.target._executor]  # type: ignore[attr-defined]
    knobs = [executor.config.extended_runtime_perf_knob_config for executor in executors]
    assert [knob.cuda_graph_mode for knob in knobs] == [is_on, False]
    assert knobs[0].cuda_graph_cache_size >= 64


def engines_of(tp_sizes: dict[Role, int]) -> dict[Role, EngineDir]:
    found = {}
    for role, tp_size in tp_sizes.items():
        document = engine_document(role)
        document["pretrained_config"]["mapping"]["tp_size"] = tp_size
        found[role] = EngineDir(role, Path(), document, {"rank0.engine": 1000})
    return found


def trtllm_config(**engine: Any) -> TrtllmEngineConfig:
    return TrtllmEngineConfig.model_validate({**ENGINE, **engine})


@pytest.mark.parametrize(
    ("engine", "ranks", "target", "draft"),
    [
        ({}, (1, 1), (0,), (0,)),
        ({}, (4, 1), (0, 1, 2, 3), (0,)),
        ({"devices": [2]}, (1, 1), (2,), (2,)),
        ({"draft_devices": [1]}, (1, 1), (0,), (1,)),
        ({"devices": [3, 1], "draft_devices": [0]}, (2, 1), (3, 1), (0,)),
        ({"devices": [2, 3]}, (2, 2), (2, 3), (2, 3)),
    ],
    ids=str,
)
def test_each_rank_has_a_gpu(
    engine: dict[str, Any], ranks: tuple[int, int], target: Any, draft: Any
) -> None:
    engines = engines_of(dict(zip(Role, ranks, strict=True)))
    assert place(trtllm_config(**engine), engines, 4) == {Role.TARGET: target, Role.DRAFT: draft}


@pytest.mark.parametrize(
    ("engine", "ranks", "sentence"),
    [
        ({"devices": [0]}, (2, 1), r"engine\.devices: got \[0\], must be 2 numbers"),
        ({"devices": [4]}, (1, 1), r"engine\.devices: got \[4\], must be numbers from 0 to 3"),
        ({}, (5, 1), r"engine\.devices: got \[0, 1, 2, 3, 4\], must be numbers from 0 to 3"),
        ({"draft_devices": [7]}, (1, 1), r"engine\.draft_devices: got \[7\], must be numbers"),
        ({"draft_devices": [0, 1]}, (1, 1), r"engine\.draft_devices: .* must be 1 numbers"),
    ],
    ids=str,
)
def test_gpus_that_do_not_fit_the_ranks_are_refused(
    engine: dict[str, Any], ranks: tuple[int, int], sentence: str
) -> None:
    engines = engines_of(dict(zip(Role, ranks, strict=True)))
    with pytest.raises(ConfigError, match=rf"^engine\.json: {sentence}"):
        place(trtllm_config(**engine), engines, 4)


def test_gpus_of_a_draft_that_is_missing_are_refused() -> None:
    config = trtllm_config(draft=None, draft_devices=[1])
    with pytest.raises(ConfigError, match=r"engine\.draft_devices: needs engine\.draft"):
        place(config, engines_of({Role.TARGET: 1}), 4)


@pytest.mark.parametrize("key", ["devices", "draft_devices"])
def test_a_gpu_is_named_once(key: str) -> None:
    with pytest.raises(ValidationError, match="must name each GPU once"):
        trtllm_config(**{key: [1, 1]})


def test_ranks_on_other_gpus_are_run_by_workers(bindings: Any) -> None:
    assert _parallel_config(bindings, (0,)) is None
    found = _parallel_config(bindings, (0, 1))
    assert found.device_ids == [0, 1]
    worker = found.orchestrator_config.worker_executable_path
    assert worker == "/opt/tensorrt_llm/bin/executorWorker"


def test_a_draft_on_its_own_gpu_takes_no_memory_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPU 0 has room for 1,000 tokens of the target, GPU 1 for 3,000 of the draft."""
    engines = list(engines_of({Role.TARGET: 1, Role.DRAFT: 1}).values())
    taken = list(map(fixed_bytes, engines))
    free = {
        0: taken[0] + 1000 * bytes_per_token(engines[0]),
        1: taken[1] + 3000 * bytes_per_token(engines[1]),
    }
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free[gpu], 0))
    apart = {Role.TARGET: (0,), Role.DRAFT: (1,)}
    assert free_cache_tokens(engines, apart, 1.0) == 1000
    with pytest.raises(ConfigError, match=r"memory_fraction: 1\.0 of .* memory of GPU 0 has no"):
        free_cache_tokens(engines, {Role.TARGET: (0,), Role.DRAFT: (0,)}, 1.0)


def test_the_gpus_of_engine_json_reach_the_executors(tmp_path: Path, bindings: Any) -> None:
    engine = build(tmp_path, draft_devices=[1])
    draft = engine.proposers["draft_model"]
    assert draft._executor.config.parallel_config.device_ids == [1]  # type: ignore[attr-defined]
    assert engine.target._executor.config.parallel_config is None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"engine\.draft_devices: got \[4\]"):
        build(tmp_path, draft_devices=[4])
