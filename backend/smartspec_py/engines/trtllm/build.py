"""Builds an engine from the TensorRT-LLM engine directories in engine.json, or from fakes.

Two executors may share a GPU. Its memory for keys and values is divided before either is loaded, so
that neither takes what the other needs; see `memory`. `placement` has the choice of GPUs. This
project never ran the loading code. The rest is tested with fakes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smartspec_py.engines.base import Proposer, TargetCapabilities
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.engines.trtllm.engine_dir import Load, faults_of, read_engines
from smartspec_py.engines.trtllm.memory import (
    LEAST_CONTEXT,
    bytes_per_token,
    free_cache_tokens,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.placement import Devices, place
from smartspec_py.engines.trtllm.requests import Bindings
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving import intake
from smartspec_py.serving.config import (
    DRAFT_MODEL,
    ConfigError,
    LimitsConfig,
    TrtllmEngineConfig,
)
from smartspec_py.serving.model_files import (
    end_tokens,
    existing,
    load_tokenizer,
    num_token_ids,
)
from smartspec_py.serving.profile import ProfileShape, cached_profile, profile_path

logger = logging.getLogger(__name__)

SCORES = frozenset({"return_log_probs", "return_token_log_probs"})
"""Fields that need the logits of generated tokens."""

UNSUPPORTED = frozenset({"min_p", "return_prompt_log_probs"})
"""Fields that no engine supports. An engine for external drafts ignores min_p, in all requests
(`ExternalDraftTokensLayer`). The logits of prompts are never requested."""

MPI_SETTINGS = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_rmaps_base_inherit": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
"""Settings of Open MPI 4 for worker processes that this process spawns in a container. The server
is not started by mpirun, so it counts as one process on a machine with one slot: more processes
need oversubscription, and spawned ones do not inherit it by default (Open MPI issue 6130).
Containers forbid the system call with which processes copy from each other's memory."""

NUM_GRAPHS = 64
"""CUDA graphs that the draft's executor keeps, if it uses them. It captures one for each number of
sequences and each range of 256 tokens of the longest text, while it serves."""

FREE_FRACTION = 0.95
"""Share of the free memory that an executor may use. max_tokens already limits its cache; without
this setting, the bindings use 0.9."""


def build_trtllm(config: TrtllmEngineConfig, limits: LimitsConfig, folder: Path) -> intake.Engine:
    """Check the directories, load the engines and time their passes.

    Raises ConfigError with the key's name and what to rebuild.
    """
    model = existing("engine.tokenizer", folder / config.tokenizer)
    tokenizer = load_tokenizer("engine.tokenizer", model)
    vocab_size = num_token_ids(tokenizer)
    engines = _engines(config, limits, folder, vocab_size)
    _set_up_mpi(config, engines)  # before the package is imported, because that starts MPI
    try:
        from tensorrt_llm.bindings import executor as bindings
    except ImportError as error:
        raise ConfigError(
            f"engine.json: engine.kind: trtllm needs the package tensorrt_llm ({error}): use the "
            "container that the Dockerfile's stage gpu begins from"
        ) from error
    logger.info("engine libraries imported")
    places = _places(config, engines)
    fraction = config.memory_fraction
    num_tokens = config.cache_tokens or free_cache_tokens(engines, places, fraction)
    has_logits = config.sampled_verification == "logits"
    gives_scores = config.log_probs and engines[0].num_ranks == 1
    executors = [
        bindings.Executor(
            str(engine.folder),
            bindings.ModelType.DECODER_ONLY,
            executor_config(
                bindings,
                engine,
                num_tokens,
                config,
                _parallel_config(bindings, places[engine.role], _num_nodes(config, engine)),
            ),
        )
        for engine in engines  # target first: if memory is short, its error message is clearer
    ]
    for engine, executor in zip(engines, executors, strict=True):
        num_tokens = min(num_tokens, loaded_cache_tokens(executor, bindings, engine, num_tokens))
    logger.info("each cache has room for %d tokens", num_tokens)
    capabilities = capabilities_of(engines[0], limits, config.decode_burst)
    capabilities = replace(
        capabilities,
        max_context_len=min(capabilities.max_context_len, num_tokens - _draft_room(engines[0])),
        vocab_size=vocab_size,
        max_cache_tokens=num_tokens,
        verifies_rejection=has_logits and len(engines) == 2,
        unsupported=UNSUPPORTED if gives_scores else UNSUPPORTED | SCORES,
    )
    num_logits = engines[0].vocab_size
    target = TrtllmTarget(executors[0], bindings, capabilities, num_logits=num_logits)
    draft = None
    if len(engines) == 2:
        draft = TrtllmDraftProposer(
            executors[1],
            bindings,
            max_draft_len=limits.max_draft_len,
            max_context_len=min(_longest_text(engines[1]), num_tokens),
            vocab_size=vocab_size,
            gives_logits=has_logits,
        )
    cache = folder / config.profile_cache if config.profile_cache else None
    identity = [repr(engine.config) for engine in engines] + _gpu_names(places)
    shape = _shape(capabilities, limits, engines[0].count("build_config.max_num_tokens"))
    cost = cached_profile(target, draft, shape, cache, identity, limits.profile_s)
    if config.charges_cached_tokens:
        charged = engines[0].count("build_config.max_num_tokens")
        cost = replace(cost, max_charged_tokens=charged)
    proposers: dict[str, Proposer] = {} if draft is None else {DRAFT_MODEL: draft}
    path = profile_path(shape, cache, identity)
    return intake.Engine(tokenizer, end_tokens(model, vocab_size), target, proposers, cost, path)


def _engines(
    config: TrtllmEngineConfig, limits: LimitsConfig, folder: Path, num_tokens: int
) -> list[Engine]:
    """Target and draft engine, read from their files. Raises ConfigError if they cannot serve these
    limits."""
    paths = {Role.TARGET: existing("engine.target", folder / config.target)}
    if config.draft is not None:
        paths[Role.DRAFT] = existing("engine.draft", folder / config.draft)
    engines, faults = read_engines(paths)
    load = Load(
        k=limits.max_draft_len,
        sequences=limits.max_sequences,
        context_len=limits.max_context_len,
        num_tokens=num_tokens,
        uses_logits=config.sampled_verification == "logits",
    )
    if faults := [*faults, *faults_of(engines, load)]:
        raise ConfigError(f"engine.json: {'; '.join(map(str, faults))}")
    return list(engines.values())


def capabilities_of(engine: Engine, limits: LimitsConfig, decode_burst: int) -> TargetCapabilities:
    """What a target engine can do within the limits.

    A request's prompt holds the text so far and up to max_draft_len drafts. A request without
    drafts reserves max_draft_len too. So the longest text is shorter by max_draft_len.
    """
    max_draft_len = _draft_room(engine)
    longest = _longest_text(engine) - max_draft_len
    return TargetCapabilities(
        max_sequences=min(limits.max_sequences, engine.count("build_config.max_batch_size")),
        max_context_len=min(limits.max_context_len or longest, longest),
        max_draft_len=min(limits.max_draft_len, max_draft_len),
        max_decode_tokens=decode_burst,
        max_prefill_tokens=None,
        verifies_sampling=False,
        vocab_size=engine.vocab_size,
        bytes_per_token=bytes_per_token(engine),
        takes_long_bursts=True,
    )


def _draft_room(engine: Engine) -> int:
    """Tokens of a request that are reserved for drafts, even if it has none."""
    return engine.count("build_config.max_draft_len")


def _longest_text(engine: Engine) -> int:
    """Tokens of the longest request, including its drafts and generated tokens."""
    names = ("max_input_len", "max_seq_len", "max_num_tokens")
    return min(engine.count(f"build_config.{name}") for name in names)


def executor_config(
    bindings: Bindings,
    engine: Engine,
    num_tokens: int,
    config: TrtllmEngineConfig,
    parallel_config: Any = None,
) -> Any:
    """Chunked context is off: it drops drafts silently if not all of them fit."""
    is_draft = engine.role is Role.DRAFT
    knobs = bindings.ExtendedRuntimePerfKnobConfig()
    # Only iterations without contexts use graphs, and a verification is a context.
    knobs.cuda_graph_mode = is_draft and config.cuda_graphs
    knobs.cuda_graph_cache_size = NUM_GRAPHS
    return bindings.ExecutorConfig(
        kv_cache_config=bindings.KvCacheConfig(
            enable_block_reuse=True,  # otherwise the executor rejects external drafts
            max_tokens=num_tokens,
            free_gpu_memory_fraction=FREE_FRACTION,
        ),
        enable_chunked_context=False,
        parallel_config=parallel_config,
        extended_runtime_perf_knob_config=knobs,
        gather_generation_logits=(
            config.sampled_verification == "logits"
            if is_draft
            else config.log_probs and engine.num_ranks == 1
        ),
    )


def _set_up_mpi(config: TrtllmEngineConfig, engines: Sequence[Engine]) -> None:
    """Set MPI_SETTINGS if there may be worker processes. Variables that are set already win."""
    on_first = config.devices is None and config.draft_devices is None
    if on_first and all(engine.num_ranks == 1 for engine in engines):
        return
    if "mpi4py.MPI" in sys.modules:
        logger.warning("MPI is already running: %s have no effect", ", ".join(MPI_SETTINGS))
    for name, value in MPI_SETTINGS.items():
        os.environ.setdefault(name, value)


def _places(config: TrtllmEngineConfig, engines: list[Engine]) -> dict[Role, Devices]:
    import torch

    return place(config, {engine.role: engine for engine in engines}, torch.cuda.device_count())


def _gpu_names(places: Mapping[Role, Devices]) -> list[str]:
    """A profile is valid for these models of GPUs only."""
    import torch

    gpus = sorted({gpu for devices in places.values() for gpu in devices})
    return [torch.cuda.get_device_name(gpu) for gpu in gpus]


def _num_nodes(config: TrtllmEngineConfig, engine: Engine) -> int:
    return config.num_nodes if engine.role is Role.TARGET else 1


def _parallel_config(bindings: Bindings, devices: Devices, num_nodes: int) -> Any:
    """None on GPU 0 alone: the executor runs in this process. Otherwise worker processes run the
    ranks, and this process talks to the first. MPI starts them: on this machine, or on all those
    that `mpirun` was given when it started the server."""
    if devices == (0,) and num_nodes == 1:
        return None
    import tensorrt_llm

    worker = Path(tensorrt_llm.__file__).parent / "bin" / "executorWorker"
    return bindings.ParallelConfig(
        communication_mode=bindings.CommunicationMode.ORCHESTRATOR,
        device_ids=list(devices),
        num_nodes=num_nodes if num_nodes > 1 else None,
        orchestrator_config=bindings.OrchestratorConfig(
            is_orchestrator=True, worker_executable_path=str(worker)
        ),
    )


def _shape(
    capabilities: TargetCapabilities, limits: LimitsConfig, max_num_tokens: int
) -> ProfileShape:
    """The passes to time. At their context length, a whole batch fits into one iteration. The cost
    of further iterations is charged by `CostModel.max_charged_tokens`."""
    rows, most = capabilities.max_sequences, capabilities.max_draft_len + 1
    fitting = max_num_tokens // rows - most
    context_len = max(LEAST_CONTEXT, min(capabilities.max_context_len // 2, fitting))
    whole = capabilities.max_context_len - 1  # one token is generated
    return ProfileShape(rows, capabilities.max_draft_len, context_len, whole, whole)
