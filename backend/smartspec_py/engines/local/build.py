"""Builds the local engine of engine.json: reads files, loads models, and measures their cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from smartspec_py.constants import HEADS
from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.trees import MAX_NODES
from smartspec_py.engines.base import Profilable
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.checkpoints.adapter_config import CONFIG_FILE
from smartspec_py.engines.checkpoints.adapters import (
    NO_ADAPTERS,
    Adapters,
    linear_layers,
    load_adapter,
)
from smartspec_py.engines.checkpoints.checks import ModelError, check_heads
from smartspec_py.engines.checkpoints.config import load_config, num_weights
from smartspec_py.engines.checkpoints.experts import has_experts
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.mtp import has_mtp
from smartspec_py.engines.checkpoints.pair import CheckedTokenizer, check_pair
from smartspec_py.engines.checkpoints.recurrent import has_tiled_heads
from smartspec_py.engines.drafts.assistant.model import is_assistant, read_assistant
from smartspec_py.engines.drafts.eagle.head import (
    is_eagle,
    read_config,
)
from smartspec_py.engines.drafts.medusa.heads import load_heads
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.local.context import choose_cache
from smartspec_py.engines.local.devices import device_name, dtype_of, dtype_text, place
from smartspec_py.engines.local.kinds import (
    AssistantKind,
    DraftKind,
    DraftModelKind,
    EagleKind,
    MedusaKind,
    MtpKind,
    Setup,
)
from smartspec_py.engines.local.load import NoOpenVinoError, load, named, runtime_of
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.measure import PROMPT_GRID, ProfileShape
from smartspec_py.engines.model_files import (
    end_tokens,
    existing,
    log_unused_defaults,
    stepwise_capabilities,
)
from smartspec_py.engines.phases import unreported
from smartspec_py.engines.profile import cached_profile, fingerprint, profile_path
from smartspec_py.engines.proposer import Proposer
from smartspec_py.engines.runtimes.machine import keeps_4_bits, keeps_experts, thread_count
from smartspec_py.engines.runtimes.openvino.model_types import auto_weights
from smartspec_py.engines.runtimes.runner import OPENVINO, PYTORCH, STORED, RunnerConfig
from smartspec_py.faults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig, LocalEngineConfig

logger = logging.getLogger(__name__)

MAX_PROFILED_CONTEXT, MAX_PROFILED_BYTES = 512, 1 << 30
"""Passes are timed at half of the context, but at most at this length, and with so many bytes of
keys and values of all rows, which take a second to write. Longer contexts are extrapolated."""


def build_local(config: LocalEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    """Load target and draft model, and measure their cost. Raises ConfigError with the key's name.

    The build runs in a thread that ends with it. A thread that runs an operator on several cores
    keeps its OpenMP worker threads until it ends. Together with the workers of the loop's thread,
    there would be more threads than cores. OpenMP then lets workers sleep between operators instead
    of spinning: a step on two cores took 42 ms instead of 23 (docs/research/performance.md).
    """
    with ThreadPoolExecutor(1, "smartspec-build") as thread:
        return thread.submit(_build, config, limits, folder).result()


def _build(config: LocalEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    # Its worker threads would spin on cores that OpenVINO's threads or other programs need: beside
    # a busy program, weights took 6 s to round with two threads, and 0.2 s with one.
    torch.set_num_threads(1)
    try:
        setup, kinds, target, proposers = _loaded(config, limits, folder)
    except NoOpenVinoError as error:
        # Every model: a cache of rows has another size, and so another context length.
        logger.warning("%s: PyTorch computes all models", error)
        config = config.model_copy(update={"runtime": "torch"})
        setup, kinds, target, proposers = _loaded(config, limits, folder)
    drafter: Any = next((p for p in proposers.values() if isinstance(p, Profilable)), None)
    runners = [target.runner] + ([drafter.runner] if drafter else [])
    if any(runner.runtime == PYTORCH for runner in runners):
        torch.set_num_threads(setup.run_config.num_threads)
    about = "; ".join(runner.about for runner in runners)
    cost, stored_at = _measured(setup, kinds, target, drafter, about, folder=folder)
    for proposer in proposers.values():
        proposer.time_drafts(setup.limits.max_sequences)
    for runner in runners:
        runner.release()
        runner.time_pass(1, 1, 0)  # warm up: with a cached profile, the first request would be slow
    return _engine(setup, target, proposers, cost, stored_at, about=about)


def _loaded(
    config: LocalEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Setup, list[DraftKind], LocalTarget, dict[str, Proposer]]:
    setup, kinds = _read(config, limits, folder)
    if setup.has_blocks:
        # OpenVINO prepares each matrix with one thread, so two models take little longer than one.
        with ThreadPoolExecutor(1, initializer=_prepare_thread) as beside:
            loading = [beside.submit(kind.load, setup) for kind in kinds]
            target = _target(setup)
        runners = [loaded.result() for loaded in loading]
    else:
        target = _target(setup)
        runners = [kind.load(setup) for kind in kinds]
    pairs = zip(kinds, runners, strict=True)
    proposers = {kind.name: kind.proposer(setup, runner, target) for kind, runner in pairs}
    return setup, kinds, target, proposers


def _prepare_thread() -> None:
    torch.set_num_threads(1)
    unreported.set(True)


def _read(
    config: LocalEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Setup, list[DraftKind]]:
    """Check the configuration and read the files, but for the models themselves."""
    device = place(config.device)
    model, draft, tokenizer = _models(config, limits, folder)
    dtype = dtype_of(config.dtype, device, model)
    models = [model] if draft is None else [model, draft]
    runtimes = [runtime_of(each, device, config, limits.context_len) for each in models]
    if runtimes[0] == OPENVINO and has_experts(load_config(model, limits.context_len)):
        dtype = torch.float32  # of products with experts
    weights = _weights(config, model, limits.context_len, runtimes[0])
    has_blocks = PYTORCH not in runtimes
    uses_mtp = drafts_itself(config, model, limits.context_len, runtimes[0])
    size = choose_cache(
        models,
        device,
        dtype,
        limits,
        config.kv_cache,
        weights,
        has_blocks,
        keeps_experts=keeps_experts(config.weights),
        has_mtp=uses_mtp,
    )
    text = "context: %d tokens, prompt and text together (%s)"
    logger.info(text, size.context_len, size.reason)
    found = {"max_context_len": size.context_len, "max_sequences": size.num_rows}
    limits = limits.model_copy(update=found)
    run_config = RunnerConfig(
        path=model,
        device=device,
        dtype=dtype,
        num_rows=limits.max_sequences,
        max_len=limits.context_len,
        vocab_size=tokenizer.num_ids,
        weights=weights,
        kv_cache=config.kv_cache,
        num_threads=thread_count(config.num_threads),
        adapters=_adapters(config, model, limits.context_len, folder),
        cache_bytes=size.num_bytes if has_blocks else math.inf,
        keeps_4_bits=keeps_4_bits(config.weights),
        keeps_experts=keeps_experts(config.weights),
        weights_cache_bytes=config.weights_cache_bytes,
        num_back=limits.max_draft_len,
        num_kept_states=size.num_kept_states,
        has_mtp=uses_mtp,
    )
    kinds: list[DraftKind] = [] if draft is None else [DraftModelKind(draft)]
    if config.heads is not None:
        heads = existing("engine.heads", folder / config.heads)
        with named("engine.heads"):
            kinds.append(_heads(heads, run_config, has_draft=draft is not None))
    if uses_mtp:
        kinds.append(MtpKind(model, load_config(model, limits.context_len)))
    run_config = replace(
        run_config,
        gives_hidden=any(kind.gives_hidden for kind in kinds),
        gives_keys=any(kind.gives_keys for kind in kinds),
        state_layers=tuple(layer for kind in kinds for layer in kind.state_layers),
        keeps_weights=any(kind.keeps_weights for kind in kinds),
    )
    memory = Memory(run_config.cache_bytes)
    return Setup(config, limits, tokenizer.tokenizer, run_config, memory, runtimes[0]), kinds


def drafts_itself(config: LocalEngineConfig, model: Path, max_len: int, runtime: str) -> bool:
    """Whether the target has a layer that drafts, and it is used."""
    is_used = config.mtp and config.draft is None and config.heads is None and runtime == OPENVINO
    return is_used and has_mtp(model, load_config(model, max_len))


def _weights(config: LocalEngineConfig, model: Path, max_len: int, runtime: str) -> str:
    """What `engine.weights` means for this target."""
    if config.weights != "auto":
        return config.weights
    return auto_weights(num_weights(load_config(model, max_len))) if runtime == OPENVINO else STORED


def _heads(folder: Path, run_config: RunnerConfig, has_draft: bool) -> DraftKind:
    check_heads(folder)
    target = load_config(run_config.path, run_config.max_len)
    if is_assistant(folder):
        if has_draft:
            raise _one_of_two("an assistant")
        return AssistantKind(read_assistant(folder, target))
    if not is_eagle(folder):
        return MedusaKind(folder, load_heads(folder, run_config))
    if has_draft:
        raise _one_of_two("an EAGLE head")
    return EagleKind(read_config(folder, target))


def _one_of_two(heads: str) -> ModelError:
    return ModelError(
        f"{heads} and a draft model cannot be loaded together: leave out engine.draft, or "
        "engine.heads"
    )


def _models(
    config: LocalEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Path, Path | None, CheckedTokenizer]:
    """The folders of the target and the draft model, which exist and fit together, and their
    tokenizer."""
    model = model_folder(existing("engine.model", folder / config.model))
    draft = None
    if config.draft is not None:
        draft = model_folder(existing("engine.draft", folder / config.draft))
    try:
        return model, draft, check_pair(model, draft, limits.max_context_len)
    except ModelError as error:
        raise ConfigError(f"engine.json: {error}") from error


def _adapters(config: LocalEngineConfig, model: Path, max_len: int, folder: Path) -> Adapters:
    if not config.lora:
        return NO_ADAPTERS
    hf_config = load_config(model, max_len)
    if has_tiled_heads(hf_config):
        raise ConfigError(
            f"engine.json: engine.lora: {model.name} is a GGUF file with heads in another order "
            "than adapters have: use the safetensors of this model"
        )
    layers = linear_layers(hf_config)
    loaded = []
    for name, path in config.lora.items():
        with named(f"engine.lora.{name}"):
            loaded.append(load_adapter(name, folder / path, layers))
    with named("engine.lora"):
        return Adapters(loaded)


def _target(setup: Setup) -> LocalTarget:
    limits, run_config = setup.limits, setup.run_config
    runner = load("engine.model", run_config, setup.config)
    able = stepwise_capabilities(limits, run_config.vocab_size, runner.bytes_per_token)
    capabilities = replace(able, adapters=run_config.adapters.names)
    if setup.has_blocks:
        capabilities = replace(
            capabilities,
            block_len=runner.cache.block_len,
            cache_bytes=int(run_config.cache_bytes),
        )
    return LocalTarget(
        runner,
        capabilities,
        reuses_prefixes=limits.reuse_prefixes,
        memory=setup.memory,
    )


def _measured(
    setup: Setup,
    kinds: Sequence[DraftKind],
    target: LocalTarget,
    drafter: Profilable | None,
    about: str,
    folder: Path,
) -> tuple[CostModel, Path | None]:
    """The costs, and the file that stores them."""
    config, limits, runner = setup.config, setup.limits, target.runner
    identity = [
        fingerprint(setup.run_config.path),
        *(f"{kind.name}: {fingerprint(kind.folder)}" for kind in kinds),
        f"{device_name(runner.config.device)}, {runner.config.dtype}",
        f"{setup.run_config.num_threads} threads",
        about + (", with states" if setup.run_config.gives_hidden else ""),
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        *(
            f"adapter {name}: {fingerprint(folder / path, CONFIG_FILE)}"
            for name, path in config.lora.items()
        ),
    ]
    has_heads = any(kind.name == HEADS for kind in kinds)  # a draft model drafts chains only
    has_trees = has_heads and setup.tree_context_len is not None
    shape = _shape(limits, runner.bytes_per_token, has_trees)
    cache = folder / config.profile_cache if config.profile_cache else None
    cost = cached_profile(
        target, drafter, shape, folder=cache, identity=identity, budget_s=limits.profile_s
    )
    return cost, profile_path(shape, cache, identity)


def _engine(
    setup: Setup,
    target: LocalTarget,
    proposers: Mapping[str, Proposer],
    cost: CostModel,
    stored_at: Path | None,
    about: str,
) -> Engine:
    run_config, used = setup.run_config, target.runner.config
    dtype = dtype_text(run_config.dtype, used.dtype)
    about += run_config.adapters.text
    logger.info(
        "%s on %s: %s, %s, %d threads",
        run_config.path.name,
        used.device,
        dtype,
        about,
        run_config.num_threads,
    )
    log_unused_defaults(run_config.path)
    return Engine(
        tokenizer=setup.tokenizer,
        end_tokens=end_tokens(run_config.path, run_config.vocab_size, setup.tokenizer),
        target=target,
        proposers=proposers,
        cost=cost,
        profile_path=stored_at,
        kernels=about,
        facts={
            "model": run_config.path.name,
            "dtype": dtype,
            "runtime": target.runner.runtime + used.weights_text + used.cache_text,
            "threads": run_config.num_threads,
        },
    )


def _shape(limits: LimitsConfig, bytes_per_token: int, has_trees: bool = False) -> ProfileShape:
    fitting = MAX_PROFILED_BYTES // (limits.max_sequences * bytes_per_token)
    return ProfileShape(
        max_sequences=limits.max_sequences,
        max_draft_len=limits.max_draft_len,
        context_len=min(limits.context_len // 2, MAX_PROFILED_CONTEXT, max(1, fitting)),
        prefill_chunk=limits.prefill_chunk,
        # Longer ones change no cost. The served context depends on the memory that is free.
        max_prompt=min(limits.context_len, PROMPT_GRID[-1]),
        max_nodes=MAX_NODES if has_trees else 0,
    )
