"""Builds an engine from the TensorRT-LLM engine directories in engine.json. Never run on a GPU.

Two executors may share a GPU. Its memory for keys and values is divided before either is loaded, so
that neither takes what the other needs; see `memory`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from smartspec_py.config import LimitsConfig, TrtllmEngineConfig
from smartspec_py.constants import DRAFT_MODEL, GUIDE_FIELDS
from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.measure import ProfileShape
from smartspec_py.engines.model_files import (
    end_tokens,
    existing,
    load_tokenizer,
    log_unused_defaults,
)
from smartspec_py.engines.profile import cached_profile, profile_path
from smartspec_py.engines.proposer import Proposer
from smartspec_py.engines.tokenizer_file import num_token_ids
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.engine_dir import EngineFiles, Role, faults_of, read_engine
from smartspec_py.engines.trtllm.memory import (
    LEAST_CONTEXT,
    bytes_per_token,
    free_cache_tokens,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.requests import Bindings
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.faults import ConfigError

logger = logging.getLogger(__name__)

UNSUPPORTED = GUIDE_FIELDS | {"min_p", "return_prompt_log_probs", "lora_name"}
"""Fields that no engine supports. An engine for external drafts ignores min_p, in all requests
(`ExternalDraftTokensLayer`). How its guided decoding treats external drafts was never tried. The
logits of prompts are never requested. LoRA adapters were never tried."""

SCORES = frozenset({"return_log_probs", "return_token_log_probs"})
"""Fields that need the logits of generated tokens."""

MPI_SETTINGS = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_rmaps_base_inherit": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
"""Environment variables of Open MPI 4 for worker processes that this process spawns in a container.
Without mpirun, the machine has one slot, and spawned processes do not inherit oversubscription by
default (Open MPI issue 6130). Containers forbid copying from another process's memory."""

FREE_FRACTION = 0.95
"""Share of the free memory that an executor may use. max_tokens already limits its cache."""


def build_trtllm(config: TrtllmEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    """Check the directories, load the engines and time their passes.

    Raises ConfigError with the key's name and what to rebuild.
    """
    model = existing("engine.tokenizer", folder / config.tokenizer)
    tokenizer = load_tokenizer("engine.tokenizer", model)
    vocab_size = num_token_ids(tokenizer)
    engines = _engines(config, limits, folder, vocab_size)
    for name, value in MPI_SETTINGS.items():
        os.environ.setdefault(name, value)  # before the import below, because that starts MPI
    bindings = _bindings()
    logger.info("engine libraries imported")
    import torch

    asked = config.cache_tokens or free_cache_tokens(engines, config.memory_fraction)
    # Target first: if memory is short, its error message is clearer.
    executors = [_executor(bindings, engine, config, asked) for engine in engines]
    num_tokens = min(
        loaded_cache_tokens(executor, bindings, engine.role, asked)
        for engine, executor in zip(engines, executors, strict=True)
    )
    logger.info("each cache has room for %d tokens", num_tokens)
    capabilities = replace(
        capabilities_of(engines[0], limits, config, num_tokens), vocab_size=vocab_size
    )
    target = TrtllmTarget(executors[0], bindings, capabilities, num_logits=engines[0].vocab_size)
    draft = None
    if len(engines) == 2:
        draft = TrtllmDraftProposer(
            executors[1],
            bindings,
            max_draft_len=limits.max_draft_len,
            max_context_len=min(engines[1].longest_text, num_tokens),
            vocab_size=vocab_size,
        )
    cache = folder / config.profile_cache if config.profile_cache else None
    identity = [torch.cuda.get_device_name(0), *(repr(engine.config) for engine in engines)]
    shape = _shape(capabilities, engines[0])
    cost = cached_profile(
        target, draft, shape, folder=cache, identity=identity, budget_s=limits.profile_s
    )
    proposers: dict[str, Proposer] = {} if draft is None else {DRAFT_MODEL: draft}
    log_unused_defaults(model)
    return Engine(
        tokenizer=tokenizer,
        end_tokens=end_tokens(model, vocab_size, tokenizer),
        target=target,
        proposers=proposers,
        cost=cost,
        profile_path=profile_path(shape, cache, identity),
    )


def _engines(
    config: TrtllmEngineConfig, limits: LimitsConfig, folder: Path, num_tokens: int
) -> list[EngineFiles]:
    """Target and draft engine, read from their files. Raises ConfigError if they cannot serve these
    limits."""
    paths = {Role.TARGET: existing("engine.target", folder / config.target)}
    if config.draft is not None:
        paths[Role.DRAFT] = existing("engine.draft", folder / config.draft)
    engines = {role: read_engine(role, path) for role, path in paths.items()}
    if faults := list(faults_of(engines, limits, num_tokens)):
        raise ConfigError(f"engine.json: {'; '.join(faults)}")
    return list(engines.values())


def _bindings() -> Bindings:
    try:
        from tensorrt_llm.bindings import executor
    except ImportError as error:
        raise ConfigError(
            f"engine.json: engine.kind: trtllm needs the package tensorrt_llm ({error}): use the "
            "container that the Dockerfile's stage gpu begins from"
        ) from error
    return executor


def capabilities_of(
    engine: EngineFiles, limits: LimitsConfig, config: TrtllmEngineConfig, cache_tokens: int
) -> TargetCapabilities:
    """What a target engine can do within the limits.

    A request's prompt holds the text so far and up to max_draft_len drafts. A request without
    drafts reserves max_draft_len too. So the longest text is shorter by max_draft_len.
    """
    max_draft_len = engine.built("max_draft_len")
    longest = min(engine.longest_text, cache_tokens) - max_draft_len
    return TargetCapabilities(
        max_sequences=min(limits.max_sequences, engine.built("max_batch_size")),
        max_context_len=min(limits.max_context_len or longest, longest),
        max_draft_len=min(limits.max_draft_len, max_draft_len),
        max_decode_tokens=config.decode_burst,
        max_prefill_tokens=None,
        verifies_sampling=False,
        vocab_size=engine.vocab_size,
        bytes_per_token=bytes_per_token(engine),
        max_cache_tokens=cache_tokens,
        unsupported=UNSUPPORTED if _gathers_logits(config, engine) else UNSUPPORTED | SCORES,
    )


def _gathers_logits(config: TrtllmEngineConfig, engine: EngineFiles) -> bool:
    """Whether the executor keeps the logits of generated tokens. In a worker process, a cancelled
    request with logits may end the process."""
    return config.log_probs and engine.role is Role.TARGET and engine.num_ranks == 1


def _executor(
    bindings: Bindings, engine: EngineFiles, config: TrtllmEngineConfig, num_tokens: int
) -> Any:
    """Load an engine. Chunked context is off: it drops drafts silently if not all of them fit."""
    settings = bindings.ExecutorConfig(
        kv_cache_config=bindings.KvCacheConfig(
            enable_block_reuse=True,  # otherwise the executor rejects external drafts
            max_tokens=num_tokens,
            free_gpu_memory_fraction=FREE_FRACTION,
        ),
        enable_chunked_context=False,
        parallel_config=_workers(bindings, engine.num_ranks),
        gather_generation_logits=_gathers_logits(config, engine),
    )
    return bindings.Executor(str(engine.folder), bindings.ModelType.DECODER_ONLY, settings)


def _workers(bindings: Bindings, num_ranks: int) -> Any:
    """Rank n runs on GPU n. One rank runs in this process: None. Several run in worker processes,
    which MPI starts, and this process talks to the first."""
    if num_ranks == 1:
        return None
    import tensorrt_llm

    worker = Path(tensorrt_llm.__file__).parent / "bin" / "executorWorker"
    return bindings.ParallelConfig(
        communication_mode=bindings.CommunicationMode.ORCHESTRATOR,
        device_ids=list(range(num_ranks)),
        orchestrator_config=bindings.OrchestratorConfig(
            is_orchestrator=True, worker_executable_path=str(worker)
        ),
    )


def _shape(capabilities: TargetCapabilities, engine: EngineFiles) -> ProfileShape:
    """The passes to time. At their context length, a whole batch fits into one iteration."""
    rows, most = capabilities.max_sequences, capabilities.max_draft_len + 1
    fitting = engine.built("max_num_tokens") // rows - most
    context_len = max(LEAST_CONTEXT, min(capabilities.max_context_len // 2, fitting))
    longest = capabilities.max_context_len - 1  # a prompt leaves room for one token
    return ProfileShape(
        max_sequences=rows,
        max_draft_len=capabilities.max_draft_len,
        context_len=context_len,
        prefill_chunk=longest,
        max_prompt=longest,
    )
