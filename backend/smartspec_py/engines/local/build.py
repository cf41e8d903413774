"""Builds the local engine of engine.json: reads files, loads models, and measures their cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from tokenizers import Tokenizer

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.trees import MAX_NODES
from smartspec_py.defaults import DRAFT_MODEL, HEADS, ConfigError
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.checkpoints.adapter_config import CONFIG_FILE
from smartspec_py.engines.checkpoints.adapters import (
    NO_ADAPTERS,
    Adapters,
    linear_layers,
    load_adapter,
)
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.pair import check_pair, has_window
from smartspec_py.engines.checkpoints.supported import ModelError, check_heads
from smartspec_py.engines.drafts.draft_model import DraftModelProposer
from smartspec_py.engines.drafts.eagle.head import (
    EagleConfig,
    EagleHead,
    is_eagle,
    load_eagle,
    read_config,
)
from smartspec_py.engines.drafts.eagle.proposer import EagleProposer
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.drafts.medusa.heads import MedusaHeads, load_heads
from smartspec_py.engines.drafts.medusa.proposer import HeadsProposer
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.local.context import choose_cache
from smartspec_py.engines.local.devices import Devices, dtype_of, dtype_text, place
from smartspec_py.engines.local.load import has_blocks, load, named, uses_graphs
from smartspec_py.engines.local.target import TorchTarget
from smartspec_py.engines.measure import PROMPT_GRID, ProfileShape
from smartspec_py.engines.model_files import (
    end_tokens,
    existing,
    load_tokenizer,
    log_unused_defaults,
    num_token_ids,
    stepwise_capabilities,
)
from smartspec_py.engines.profile import cached_profile, fingerprint, profile_path
from smartspec_py.engines.proposer import Proposer
from smartspec_py.engines.runtimes.machine import thread_count
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.float8 import use_float8
from smartspec_py.engines.runtimes.runner import FP8, PYTORCH, Runner, RunnerConfig

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig, TorchEngineConfig

logger = logging.getLogger(__name__)

MAX_PROFILED_CONTEXT, MAX_PROFILED_BYTES = 512, 1 << 30
"""Passes are timed at half of the context, but at most at this length, and with so many bytes of
keys and values of all rows, which take a second to write. Longer contexts are extrapolated."""


MAX_PROFILED_LONG = 4096
"""The same for one row with a long prompt."""


def build_torch(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    """Load target and draft model, and measure their cost. Raises ConfigError with the key's name.

    The build runs in a thread that ends with it. A thread that runs an operator on several cores
    keeps its OpenMP worker threads until it ends. Together with the workers of the loop's thread,
    there would be more threads than cores. OpenMP then lets workers sleep between operators instead
    of spinning: a step on two cores took 42 ms instead of 23 (docs/research/performance.md).
    """
    with ThreadPoolExecutor(1, "smartspec-build") as thread:
        return thread.submit(_build, config, limits, folder).result()


@dataclass(frozen=True, slots=True)
class _Setup:
    """What is known before models are loaded.

    run_config: how the target runs. memory: of its cache and those of its proposers. draft: the
    draft model's folder. medusa, eagle: heads; at most
    one of both, and an EAGLE head only without a draft model.
    """

    config: TorchEngineConfig
    limits: LimitsConfig
    devices: Devices
    tokenizer: Tokenizer
    run_config: RunnerConfig
    memory: Memory
    draft: Path | None
    medusa: MedusaHeads | None
    eagle: EagleConfig | None


def _build(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    # Its worker threads would spin on cores that OpenVINO's threads or other programs need: beside
    # a busy program, weights took 6 s to round with two threads, and 0.2 s with one.
    torch.set_num_threads(1)
    setup = _read(config, limits, folder)
    target = _target(setup)
    drafter = _drafter(setup, target.runner)
    runners = [target.runner] + ([drafter.runner] if drafter else [])
    if any(runner.runtime == PYTORCH for runner in runners):
        torch.set_num_threads(setup.run_config.num_threads)
    cost, stored_at = _measured(setup, target, drafter, folder)
    if isinstance(drafter, EagleProposer) and drafter.capabilities.drafts_trees:
        drafter.time_trees(setup.limits.max_sequences, _states_width(setup))
    for runner in runners:
        runner.release()
        runner.time_pass(1, 1, 0)  # warm up: with a cached profile, the first request would be slow
    return _engine(setup, target, drafter, cost, stored_at=stored_at)


def _read(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> _Setup:
    """Check the configuration and read the files, but for the models themselves."""
    devices = place(config)
    model, draft = _models(config, limits, folder)
    tokenizer = load_tokenizer("engine.model", model)
    dtype = dtype_of(config.dtype, devices.target, model)
    models = [(model, devices.target)] + ([(draft, devices.draft)] if draft else [])
    limits, cache_bytes = _sized(config, limits, models, dtype)
    run_config = RunnerConfig(
        path=model,
        device=devices.target,
        dtype=dtype,
        num_rows=limits.max_sequences,
        max_len=limits.context_len,
        vocab_size=num_token_ids(tokenizer),
        weights=config.weights,
        kv_cache=config.kv_cache,
        num_threads=thread_count(config.num_threads),
        adapters=_adapters(config, model, limits.context_len, folder),
        cache_bytes=cache_bytes,
    )
    medusa = eagle = None
    if config.heads is not None:
        heads = existing("engine.heads", folder / config.heads)
        with named("engine.heads"):
            check_heads(heads)
            if not is_eagle(heads):
                medusa = load_heads(heads, run_config)
            elif draft is not None:
                raise ModelError(
                    "an EAGLE head and a draft model cannot be loaded together: leave out "
                    "engine.draft, or engine.heads"
                )
            else:
                eagle = read_config(heads, load_config(model, run_config.max_len))
    layers = () if eagle is None else eagle.layer_ids
    run_config = replace(run_config, gives_hidden=medusa is not None, state_layers=layers)
    return _Setup(
        config=config,
        limits=limits,
        devices=devices,
        tokenizer=tokenizer,
        run_config=run_config,
        memory=Memory(cache_bytes),
        draft=draft,
        medusa=medusa,
        eagle=eagle,
    )


def _models(
    config: TorchEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Path, Path | None]:
    """The folders of the target and the draft model, which exist and fit together."""
    model = model_folder(existing("engine.model", folder / config.model))
    draft = None
    if config.draft is not None:
        draft = model_folder(existing("engine.draft", folder / config.draft))
    try:
        check_pair(model, draft, limits.max_context_len)
    except ModelError as error:
        raise ConfigError(f"engine.json: {error}") from error
    return model, draft


def _adapters(config: TorchEngineConfig, model: Path, max_len: int, folder: Path) -> Adapters:
    if not config.lora:
        return NO_ADAPTERS
    layers = linear_layers(load_config(model, max_len))
    loaded = []
    for name, path in config.lora.items():
        with named(f"engine.lora.{name}"):
            loaded.append(load_adapter(name, folder / path, layers))
    with named("engine.lora"):
        return Adapters(loaded)


def _target(setup: _Setup) -> TorchTarget:
    limits, run_config = setup.limits, setup.run_config
    runner = load("engine.model", run_config, setup.config)
    able = stepwise_capabilities(limits, run_config.vocab_size, runner.bytes_per_token)
    capabilities = replace(able, adapters=run_config.adapters.names)
    if not math.isinf(run_config.cache_bytes):
        capabilities = replace(
            capabilities,
            block_len=runner.cache.block_len,
            cache_bytes=int(run_config.cache_bytes),
        )
    return TorchTarget(
        runner,
        capabilities,
        reuses_prefixes=limits.reuse_prefixes,
        memory=setup.memory,
        long_prompt=_long_prompt(setup, runner),
    )


def _long_prompt(setup: _Setup, runner: Runner) -> int | None:
    """`config.TorchEngineConfig.long_prompt`; None without OpenVINO."""
    return None if runner.runtime == PYTORCH else setup.config.long_prompt


def _drafter(setup: _Setup, target: Runner) -> DraftModelProposer | None:
    """The draft model or the EAGLE head, which draft with passes of their own; None without either.
    Their weights are rounded as those of the target are."""
    run_config = replace(
        setup.run_config,
        weights=target.config.weights,
        gives_hidden=False,
        state_layers=(),
        adapters=NO_ADAPTERS,
    )
    limits, devices = setup.limits, setup.devices
    if setup.eagle is not None:
        with named("engine.heads"):
            head = _eagle_runner(load_eagle(setup.eagle, run_config), run_config, target.runtime)
        if uses_graphs(setup.config, run_config.device):
            head.warm()
        return EagleProposer(
            head,
            limits.max_sequences,
            limits.max_draft_len,
            reuses_prefixes=limits.reuse_prefixes,
            drafts_trees=_verifies_trees(setup, target),
            memory=setup.memory,
        )
    if setup.draft is None:
        return None
    # The draft model may have fewer positions than the served context.
    of_draft = load_config(setup.draft, run_config.max_len)
    positions = getattr(of_draft, "max_position_embeddings", None) or run_config.max_len
    max_len = min(run_config.max_len, positions)
    run_config = replace(run_config, path=setup.draft, device=devices.draft, max_len=max_len)
    return DraftModelProposer(
        load("engine.draft", run_config, setup.config),
        limits.max_sequences,
        limits.max_draft_len,
        reuses_prefixes=limits.reuse_prefixes,
        max_context_len=max_len,
        has_own_memory=devices.draft != devices.target,
        memory=setup.memory,
    )


def _verifies_trees(setup: _Setup, target: Runner) -> bool:
    """Whether the target reads trees of drafts."""
    max_len = setup.run_config.max_len
    windows = has_window(load_config(setup.run_config.path, max_len), max_len)
    has_room = setup.limits.max_draft_len > 0 and setup.run_config.max_len > MAX_NODES
    return target.runtime == PYTORCH and has_room and not windows


def _states_width(setup: _Setup) -> int:
    """Of the target's states that an EAGLE head reads with each token."""
    config = load_config(setup.run_config.path, setup.run_config.max_len)
    return int(len(setup.run_config.state_layers) * config.hidden_size)


def _eagle_runner(head: EagleHead, run_config: RunnerConfig, runtime: str) -> Runner:
    if runtime == PYTORCH:
        if run_config.device.type == "cuda":
            merge_products(head.parts)
        if run_config.weights == FP8:
            use_float8(head.parts)
        return EagleRunner(head, run_config)
    from smartspec_py.engines.drafts.eagle.openvino import OpenVinoEagleRunner

    return OpenVinoEagleRunner(head, run_config)


def _measured(
    setup: _Setup, target: TorchTarget, drafter: DraftModelProposer | None, folder: Path
) -> tuple[CostModel, Path | None]:
    """The costs, and the file that stores them."""
    config, limits, runner = setup.config, setup.limits, target.runner
    drafting = setup.draft if setup.eagle is None else setup.eagle.folder
    about = _about(target, drafter) + (", with states" if setup.medusa is not None else "")
    identity = [
        fingerprint(setup.run_config.path),
        fingerprint(drafting) if drafting else "no draft",
        f"{setup.devices.kinds}, {runner.config.dtype}, {setup.run_config.num_threads} threads",
        about,
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        *(
            f"adapter {name}: {fingerprint(folder / path, CONFIG_FILE)}"
            for name, path in config.lora.items()
        ),
    ]
    has_trees = bool(setup.eagle or setup.medusa) and _verifies_trees(setup, runner)
    shape = _shape(limits, runner.bytes_per_token, has_trees, _long_prompt(setup, runner))
    cache = folder / config.profile_cache if config.profile_cache else None
    cost = cached_profile(
        target, drafter, shape, folder=cache, identity=identity, budget_s=limits.profile_s
    )
    return cost, profile_path(shape, cache, identity)


def _about(target: TorchTarget, drafter: DraftModelProposer | None) -> str:
    return "; ".join(model.runner.about for model in (target, drafter) if model is not None)


def _engine(
    setup: _Setup,
    target: TorchTarget,
    drafter: DraftModelProposer | None,
    cost: CostModel,
    stored_at: Path | None,
) -> Engine:
    """The engine with its proposers, by the names that requests use."""
    run_config, limits, used = setup.run_config, setup.limits, target.runner.config
    proposers: dict[str, Proposer] = {}
    if drafter is not None:
        proposers[DRAFT_MODEL if setup.eagle is None else HEADS] = drafter
    if setup.medusa is not None:
        proposers[HEADS] = HeadsProposer(
            setup.medusa,
            limits.max_sequences,
            limits.max_draft_len,
            run_config.max_len if _verifies_trees(setup, target.runner) else None,
        )
    about, dtype = _about(target, drafter), dtype_text(run_config.dtype, used.dtype)
    about += run_config.adapters.text
    logger.info(
        "%s on %s: %s, %s, %d threads",
        run_config.path.name,
        setup.devices,
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


def _sized(
    config: TorchEngineConfig,
    limits: LimitsConfig,
    models: Sequence[tuple[Path, torch.device]],
    dtype: torch.dtype,
) -> tuple[LimitsConfig, float]:
    """The limits with the served context length, and the memory for caches of blocks. Logs the
    length and what limits it."""
    is_blocks = all(has_blocks(*model, config, limits.context_len) for model in models)
    length, reason, num_bytes = choose_cache(
        models, dtype, limits, config.kv_cache, config.weights, has_blocks=is_blocks
    )
    text = "context: %d tokens, prompt and text together (%s)"
    logger.info(text, length, reason)
    limits = limits.model_copy(update={"max_context_len": length})
    return limits, num_bytes if is_blocks else math.inf


def _shape(
    limits: LimitsConfig,
    bytes_per_token: int,
    has_trees: bool = False,
    long_prompt: int | None = None,
) -> ProfileShape:
    fitting = MAX_PROFILED_BYTES // (limits.max_sequences * bytes_per_token)
    timed_long = min(limits.context_len // 2, MAX_PROFILED_LONG)
    has_long = long_prompt is not None and timed_long >= long_prompt
    return ProfileShape(
        max_sequences=limits.max_sequences,
        max_draft_len=limits.max_draft_len,
        context_len=min(limits.context_len // 2, MAX_PROFILED_CONTEXT, max(1, fitting)),
        prefill_chunk=limits.prefill_chunk,
        # Longer ones change no cost. The served context depends on the memory that is free.
        max_prompt=min(limits.context_len, PROMPT_GRID[-1]),
        max_nodes=MAX_NODES if has_trees else 0,
        long_context=long_prompt if has_long and long_prompt else 0,
        timed_long=timed_long if has_long else 0,
    )
