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
import torch
from harness import LoopHarness, fake_text
from pydantic import ValidationError

from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import DraftTask, Prefill
from smartspec_py.engines.trtllm.build import _parallel_config, capabilities_of
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer, drawn_from
from smartspec_py.engines.trtllm.engine_config import Engine as EngineDir
from smartspec_py.engines.trtllm.engine_config import Role, read_engine
from smartspec_py.engines.trtllm.memory import (
    activation_bytes,
    bytes_per_token,
    cache_tokens,
    free_cache_tokens,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.placement import place
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import (
    ConfigError,
    LimitsConfig,
    ServerConfig,
    TrtllmEngineConfig,
)
from smartspec_py.serving.intake import Engine
from smartspec_py.serving.request import GenerateParams, RequestError
from smartspec_py.serving.server import Server
from smartspec_testing import fake_executor
from smartspec_testing.fake_executor import DoubleBindings
from smartspec_testing.local import LocalSink
from smartspec_trtllm.contract import ContractBindings

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
def bindings(monkeypatch: pytest.MonkeyPatch) -> ContractBindings:
    """The package `tensorrt_llm`, with checked fakes in it."""
    found = ContractBindings(DoubleBindings())
    package: Any = ModuleType("tensorrt_llm")
    package.__file__ = "/opt/tensorrt_llm/__init__.py"
    package.bindings = SimpleNamespace(executor=found)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", package.bindings)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H100")
    return found


def build(tmp_path: Path, *, draft: bool = True, **engine: Any) -> Engine:
    for role in ("target", "draft"):
        if not (tmp_path / role).exists():
            write_engine(tmp_path / role, role)
    settings = {"kind": "trtllm", "target": "target", "tokenizer": str(TOKENIZER)}
    settings |= {"cache_tokens": 2048} | ({"draft": "draft"} if draft else {}) | engine
    return build_engine(
        ServerConfig.model_validate({"engine": settings, "limits": LIMITS}), tmp_path
    )


def test_directories_become_an_engine_that_serves(
    tmp_path: Path, bindings: ContractBindings
) -> None:
    engine = build(tmp_path, profile_cache="cache")
    capabilities = engine.target.capabilities
    assert capabilities.max_context_len == 200
    assert capabilities.max_draft_len == 4
    assert capabilities.max_decode_tokens == 16
    assert capabilities.max_cache_tokens == 2048
    assert capabilities.bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert engine.cost.max_charged_tokens == 2000
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
    assert {"KvCacheConfig(max_tokens)", "ExecutorConfig(kv_cache_config)"} <= bindings.used()


def test_min_p_is_refused_by_name(tmp_path: Path, bindings: ContractBindings) -> None:
    """The layer for external drafts ignores it, also in requests without drafts."""
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    server = Server(build(tmp_path), config)
    asked = GenerateParams(text="Task: qa", max_tokens=9, temperature=1.0, min_p=0.1)
    with pytest.raises(RequestError, match="min_p"):
        server.intake.receive(asked, LocalSink())


@pytest.mark.parametrize(("cache_tokens", "context_len"), [(2048, 296), (224, 220)])
def test_the_context_length_is_what_the_engines_can_hold(
    tmp_path: Path,
    bindings: ContractBindings,
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
    tmp_path: Path, bindings: ContractBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h100 = build(tmp_path, profile_cache="cache").profile_path
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "H200")
    assert build(tmp_path, profile_cache="cache").profile_path != on_h100


def test_engines_with_several_ranks_give_no_log_probs(
    tmp_path: Path, bindings: ContractBindings
) -> None:
    """The logits of a cancelled request can end a worker process."""
    document = engine_document("target")
    document["pretrained_config"]["mapping"]["tp_size"] = 2
    write_engine(tmp_path / "target", "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(document))
    (tmp_path / "target" / "rank1.engine").write_bytes(bytes(1000))
    assert "return_log_probs" in build(tmp_path).target.capabilities.unsupported


def test_without_a_draft_prompts_are_looked_up(tmp_path: Path, bindings: ContractBindings) -> None:
    engine = build(tmp_path, draft=False, charges_cached_tokens=False)
    assert set(engine.proposers) == {"prompt_lookup"}
    assert engine.cost.max_charged_tokens == 0
    assert engine.cost.draft is None


@pytest.mark.parametrize("gathers", [True, False])
def test_log_probs_can_be_turned_off(
    tmp_path: Path, bindings: ContractBindings, gathers: bool
) -> None:
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
    assert request.proposer is None
    target = engine.target
    target.begin(1, request.tokens, request.num_prompt, request.sampling)
    target.submit([Prefill(1, tuple(request.tokens), 0, True)])
    (event,) = target.poll(1.0)
    assert len(event.log_probs) == 1
    assert {
        "ExecutorConfig(gather_generation_logits)",
        "Request(embedding_bias)",
    } <= bindings.used()


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
    found = capabilities_of(target, LimitsConfig(max_context_len=4000, max_sequences=100), 8)
    assert (found.max_context_len, found.max_sequences, found.max_draft_len) == (296, 8, 4)
    shorter = replace(
        target, config=engine_document("target", max_num_tokens=100)
    )  # each verification is charged in full
    assert capabilities_of(shorter, LimitsConfig(), 8).max_context_len == 96


def test_memory_is_divided_into_equally_many_tokens(tmp_path: Path) -> None:
    """2 x 32 x 8 x 128 x 2 bytes of a token in the target, half of it in the draft; half again
    each with an fp8 cache. Weights of 1,000 bytes each; decoders 8 rows x 5 and x 1 x 2,048 x 24."""
    engines = []
    for role in (Role.TARGET, Role.DRAFT):
        write_engine(tmp_path / role, role)
        engines.append(read_engine(role, tmp_path / role))
    assert [bytes_per_token(engine) for engine in engines] == [131072, 65536]
    # Of 2,000 tokens: gate and up of 14,336, and three of 4,096, in 2 bytes.
    assert activation_bytes(engines[0]) == 2000 * (2 * 14_336 + 3 * 4096) * 2
    taken = 2 * 1000 + 8 * (5 + 1) * 2048 * 6 * 4 + 2 * activation_bytes(engines[0])
    assert cache_tokens(engines, taken + 1000 * (131072 + 65536)) == 1000
    quantized = engine_document("target")
    quantized["pretrained_config"]["quantization"]["kv_cache_quant_algo"] = "FP8"
    assert bytes_per_token(replace(engines[0], config=quantized)) == 65536
    split = engine_document("target")
    split["pretrained_config"]["mapping"]["tp_size"] = 4
    assert bytes_per_token(replace(engines[0], config=split)) == 131072 // 4
    of_rank = activation_bytes(replace(engines[0], config=split))
    assert of_rank == 2000 * (2 * 14_336 // 4 + 3 * 4096) * 2


@pytest.mark.parametrize(
    ("num_blocks", "found"), [((8, 8), 256), ((8, 5), 160), ((200, 200), 2048)]
)
def test_the_cache_that_was_made_counts_and_not_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: tuple[int, int], found: int,
    bindings: ContractBindings, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """2,048 tokens were asked for, in blocks of 32; memory was short for the target, the draft, or
    neither."""
    makes = fake_executor.make_blocks
    left = list(num_blocks)

    def make_fewer(limits: Any, config: Any) -> Any:
        return makes(replace(limits, num_blocks=left.pop(0)), config)

    monkeypatch.setattr(fake_executor, "make_blocks", make_fewer)
    engine = build(tmp_path)
    assert engine.target.capabilities.max_cache_tokens == found
    assert ("memory was short" in caplog.text) == (found < 2048)


def test_an_executor_that_tells_nothing_of_its_cache_is_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = fake_executor.Executor(
        fake_executor.EngineLimits(),
        None,
        fake_executor.ExecutorConfig(iter_stats_max_iterations=0),
    )
    engine = EngineDir(Role.TARGET, Path(), {}, {})
    assert loaded_cache_tokens(executor, fake_executor, engine, 77) == 77
    assert "engine.target" in caplog.text


@pytest.mark.parametrize("is_running", [False, True])
def test_mpi_is_set_up_for_workers_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    is_running: bool,
) -> None:  # fmt: skip
    """Nothing is set for engines on GPU 0 alone, and what is set stays. Without TensorRT-LLM the
    build fails at its import, which comes after."""
    environ = {"OMPI_MCA_rmaps_base_inherit": "0"}
    monkeypatch.setattr(os, "environ", environ)
    if is_running:
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI"))
    cases: list[tuple[int, dict[str, Any], int]] = [
        (1, {}, 1),
        (2, {}, 3),
        (1, {"devices": [1]}, 3),
    ]
    for number, (num_ranks, engine, num_variables) in enumerate(cases):
        environ.clear()
        environ["OMPI_MCA_rmaps_base_inherit"] = "0"
        folder = tmp_path / str(number)
        folder.mkdir()
        write_engine(folder / "target", "target")
        document = engine_document("target")
        document["pretrained_config"]["mapping"]["tp_size"] = num_ranks
        (folder / "target" / "config.json").write_text(json.dumps(document))
        (folder / "target" / "rank1.engine").write_bytes(bytes(1000))
        with pytest.raises(ConfigError, match="tensorrt_llm"):
            build(folder, **engine)
        assert len(environ) == num_variables
    assert environ["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert environ["OMPI_MCA_rmaps_base_inherit"] == "0"
    assert ("already running" in caplog.text) == is_running


@pytest.mark.parametrize(("is_on", "num_replayed"), [(True, 10), (False, 0)])
def test_the_draft_replays_cuda_graphs(
    tmp_path: Path, bindings: ContractBindings, is_on: bool, num_replayed: int
) -> None:
    """Of 4, 4, 4 and 2 drafts each first comes with a context; 3 + 3 + 3 + 1 iterations follow. The
    profile left graphs for 1 and 2 sequences. The target runs none."""
    engine = build(tmp_path, cuda_graphs=is_on)
    proposer, target = engine.proposers["draft_model"], engine.target
    assert isinstance(proposer, TrtllmDraftProposer)
    assert isinstance(target, TrtllmTarget)
    executor = proposer._executor._inner_
    before = executor.num_replayed
    for rows, draft_len in ((2, 4), (2, 4), (1, 4), (1, 2)):
        tasks = [DraftTask(n, (3, 4, n), 3, draft_len, SamplingParams()) for n in range(rows)]
        proposer.propose(tasks)
    assert executor.num_replayed - before == num_replayed
    assert target._executor._inner_.num_replayed == 0
    assert "ExtendedRuntimePerfKnobConfig.cuda_graph_mode" in bindings.used()


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
        ({"num_nodes": 2}, (8, 1), (0, 1, 2, 3), (0,)),
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
        (
            {"devices": [0]},
            (2, 1),
            r"engine\.devices: got \[0\], but .* target engine is 2:",
        ),
        (
            {"devices": [0, 1], "num_nodes": 2},
            (2, 1),
            r"engine\.devices: got \[0, 1\], but .* is 2, and engine\.num_nodes is 2",
        ),
        ({"num_nodes": 3}, (4, 1), r"engine\.devices: got \[0, 1\], but .* is 4, and .* is 3"),
        (
            {"devices": [4]},
            (1, 1),
            r"engine\.devices: got \[4\], must be numbers from 0 to 3",
        ),
        ({}, (5, 1), r"engine\.devices: got \[0, 1, 2, 3, 4\], must be numbers from 0 to 3"),
        (
            {"draft_devices": [7]},
            (1, 1),
            r"engine\.draft_devices: got \[7\], must be numbers",
        ),
        (
            {"draft_devices": [0, 1]},
            (1, 1),
            r"engine\.draft_devices: .* draft engine is 1:",
        ),
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
    with pytest.raises(ConfigError, match=r"engine\.draft_devices: got \[1\], but there is no"):
        place(config, engines_of({Role.TARGET: 1}), 4)


@pytest.mark.parametrize("key", ["devices", "draft_devices"])
def test_a_gpu_is_named_once(key: str) -> None:
    with pytest.raises(ValidationError, match="must name each GPU once"):
        trtllm_config(**{key: [1, 1]})


def test_ranks_on_other_gpus_are_run_by_workers(bindings: ContractBindings) -> None:
    assert _parallel_config(bindings, (0,), 1) is None
    found = _parallel_config(bindings, (1,), 1)
    assert (found.device_ids, found.num_nodes) == ([1], None)
    assert _parallel_config(bindings, (0, 1), 2).num_nodes == 2
    worker = found.orchestrator_config.worker_executable_path
    assert worker == "/opt/tensorrt_llm/bin/executorWorker"


def test_a_draft_on_its_own_gpu_takes_no_memory_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPU 0 has room for 1,000 tokens of the target, GPU 1 for 3,000 of the draft."""
    engines = list(engines_of({Role.TARGET: 1, Role.DRAFT: 1}).values())
    taken = [-cache_tokens([one], 0) * bytes_per_token(one) for one in engines]
    free = {
        0: taken[0] + 1000 * bytes_per_token(engines[0]),
        1: taken[1] + 3000 * bytes_per_token(engines[1]),
    }
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free[gpu], 0))
    apart = {Role.TARGET: (0,), Role.DRAFT: (1,)}
    assert free_cache_tokens(engines, apart, 1.0) == 1000
    with pytest.raises(ConfigError, match=r"memory_fraction: 1\.0 of .* memory of GPU 0 has no"):
        free_cache_tokens(engines, {Role.TARGET: (0,), Role.DRAFT: (0,)}, 1.0)


def test_the_gpus_of_engine_json_reach_the_executors(
    tmp_path: Path, bindings: ContractBindings
) -> None:
    build(tmp_path, draft_devices=[1])
    assert "ParallelConfig(device_ids)" in bindings.used()
    with pytest.raises(ConfigError, match=r"engine\.draft_devices: got \[4\]"):
        build(tmp_path, draft_devices=[4])


def test_sampled_text_is_verified_by_logits_where_both_ask_for_it(
    tmp_path: Path, bindings: ContractBindings
) -> None:
    engine = build(tmp_path, sampled_verification="logits")
    capabilities = engine.target.capabilities
    sampling = SamplingParams(temperature=0.5, top_p=0.9, seed=3)
    assert "set verification" in capabilities.why_unverified(sampling)
    rejecting = replace(sampling, verification=Verification.REJECTION)
    assert capabilities.can_verify(rejecting)
    assert not capabilities.can_verify(replace(rejecting, min_p=0.1))
    # Look-ups have no logits: alone they draft nothing, beside the draft they are no choice.
    config = ServerConfig.model_validate({"engine": ENGINE, "limits": LIMITS})
    intake = Server(engine, config).intake
    asked = GenerateParams(
        text="Task: qa", max_tokens=9, temperature=0.5, verification=Verification.REJECTION
    )
    request = intake.receive(asked, LocalSink()).request
    assert (request.proposer, request.alternatives) == ("draft_model", ())
    looked_up = intake.receive(replace(asked, proposer="prompt_lookup"), LocalSink())
    assert looked_up.request.proposer is None
    assert "prompt_lookup" in looked_up.response.no_speculation
    greedy = intake.receive(replace(asked, temperature=0.0), LocalSink()).request
    assert greedy.alternatives == ("prompt_lookup",)
    task = DraftTask(1, (3, 4, 5), 3, 2, rejecting)
    (draft,) = engine.proposers["draft_model"].propose([task])
    assert draft.probs.shape == (2, 2048)
    # Over the target: the logits go with the drafts, and greedy text brings none.
    harness = LoopHarness(
        target=engine.target,  # type: ignore[arg-type]
        proposer=engine.proposers["draft_model"],  # type: ignore[arg-type]
        cost=engine.cost,
    )
    number = harness.submit((3, 4, 5), 12, policy="fixed:2", sampling=rejecting)
    harness.drain()
    assert harness.requests[number].num_drafted > 0
    assert "ExternalDraftTokensConfig(logits)" in bindings.used()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"temperature": 0.5}, [0, 1, 2, 3]),
        ({"temperature": 1.0, "top_k": 2}, [0, 1]),
        # Of 0.5, 0.25, 0.125, 0.125 the first two have 0.75.
        ({"temperature": 1.0, "top_p": 0.75}, [0, 1]),
        ({"temperature": 1.0, "top_p": 0.76}, [0, 1, 2]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [0]),
    ],
)
def test_draft_logits_are_those_that_were_drawn_from(
    sampling: dict[str, Any], kept: list[int]
) -> None:
    """The executor takes their softmax as it is."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    found = drawn_from(probs.log(), SamplingParams(**sampling)).softmax(-1)[0]
    wanted = probs[0] ** (1 / sampling["temperature"])
    wanted[[i for i in range(4) if i not in kept]] = 0.0
    assert torch.allclose(found, wanted / wanted.sum(), atol=1e-6)
