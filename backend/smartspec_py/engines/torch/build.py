"""Builds a PyTorch engine from engine.json: device, precision, models and profile."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from smartspec_py.engines.base import SHORT_LAG, Proposer
from smartspec_py.engines.torch.context import choose_context_len
from smartspec_py.engines.torch.eagle import (
    EagleConfig,
    EagleRunner,
    is_eagle,
    load_eagle,
    read_config,
)
from smartspec_py.engines.torch.graphs import GraphRunner
from smartspec_py.engines.torch.llama import can_write_out
from smartspec_py.engines.torch.medusa import MedusaHeads, load_heads
from smartspec_py.engines.torch.pair import PairError, check_pair, has_window
from smartspec_py.engines.torch.placement import Placement, place
from smartspec_py.engines.torch.runner import (
    CausalRunner,
    ModelError,
    Runner,
    RunnerConfig,
    load_config,
    load_runner,
)
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.proposers.draft_model import DraftModelProposer
from smartspec_py.proposers.eagle import EagleProposer
from smartspec_py.proposers.heads import HeadsProposer
from smartspec_py.serving.defaults import CONTEXT_LINE, DRAFT_MODEL, HEADS, ConfigError
from smartspec_py.serving.intake import Engine
from smartspec_py.serving.model_files import (
    end_tokens,
    existing,
    load_tokenizer,
    log_unused_defaults,
    num_token_ids,
    stepwise_capabilities,
)
from smartspec_py.serving.profile import (
    ProfileShape,
    cached_profile,
    fingerprint,
    profile_path,
)

if TYPE_CHECKING:
    from smartspec_py.serving.config import LimitsConfig, TorchEngineConfig

logger = logging.getLogger(__name__)

MAX_PROFILED_CONTEXT = 512
"""Passes are timed at half of the context, but at most at this length. Longer ones are
extrapolated."""

TREE_WIDTH = 4
"""Guesses for one position in a tree on a GPU. On CPUs, chains were faster: with drafts chosen by
goodput by 2 to 3 % (docs/results/heads-amd.md)."""


def build_torch(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    """Load target and draft model, and measure their cost. Raises ConfigError with the key's name.

    The build runs in a thread that ends with it. A thread that runs an operator on several cores
    keeps its OpenMP worker threads until it ends. Together with the workers of the loop's thread,
    there would be more threads than cores. OpenMP then lets workers sleep between operators instead
    of spinning: a step on two cores took 42 ms instead of 23 (docs/research/performance.md).
    """
    logger.info("engine libraries imported")
    with ThreadPoolExecutor(1, "smartspec-build") as thread:
        return thread.submit(_build, config, limits, folder).result()


def _build(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    places = place(config)
    model, draft, heads = _files(config, limits, folder)
    tokenizer = load_tokenizer("engine.model", model)
    vocab_size = num_token_ids(tokenizer)
    num_threads = config.num_threads or max(1, (os.cpu_count() or 2) - 1)
    torch.set_num_threads(num_threads)
    device, dtype = places.target, dtype_of(config.dtype, places.target, model)
    models = [(model, device)] + ([(draft, places.draft)] if draft else [])
    limits = _with_context_len(limits, models, dtype)
    num_rows, context_len, reuses = limits.max_sequences, limits.context_len, limits.reuse_prefixes
    own = RunnerConfig(model, device, dtype, num_rows, context_len, vocab_size)
    eagle = None if heads is None else _eagle_config(heads, own, draft)
    medusa = None if heads is None or eagle else _heads(heads, own)
    of_target = replace(
        own,
        batch_invariant=config.batch_invariant,
        gives_hidden=medusa is not None,
        state_layers=eagle.layer_ids if eagle else (),
    )
    runner = _runner("engine.model", of_target, limits.max_draft_len + 1, config)
    target = _target(runner, of_target, limits)
    width = limits.max_tree_width or (1 if device.type == "cpu" else TREE_WIDTH)
    width = width if target.capabilities.verifies_trees else 1
    runners: list[Runner] = [runner]
    proposer: DraftModelProposer | EagleProposer | None = None
    proposers: dict[str, Proposer] = {}
    if draft is not None:
        of_draft = replace(own, path=draft, device=places.draft)
        draft_runner, proposer = _draft_model(of_draft, limits, config, places)
        runners.append(draft_runner)
        proposers[DRAFT_MODEL] = proposer
    if heads is not None and eagle is not None:
        head = _eagle(heads, eagle, own)
        runners.append(head)
        proposer = EagleProposer(head, num_rows, limits.max_draft_len, reuses_prefixes=reuses)
        proposers[HEADS] = proposer
    logger.info("%s on %s, %s, %d threads", model.name, places, dtype, num_threads)
    if not any(isinstance(one, CausalRunner) for one in runners):
        # PyTorch then runs only small operators. Its worker threads would spin on the cores that
        # OpenVINO's threads need.
        torch.set_num_threads(1)
    about = "; ".join(one.about for one in runners)
    logger.info("computed by %s", ", ".join(sorted({one.about for one in runners})))
    identity = [
        *_names(model, heads if eagle else draft),
        f"{_device_names(places)}, {dtype}, {num_threads} threads",
        about + (", with states" if medusa else ""),
        "in CUDA graphs" if isinstance(runner, GraphRunner) else "launched one by one",
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    ]
    shape = _shape(limits)
    cache = folder / config.profile_cache if config.profile_cache else None
    cost = cached_profile(target, proposer, shape, cache, identity, limits.profile_s)
    if medusa is not None:
        proposers[HEADS] = HeadsProposer(medusa, num_rows, limits.max_draft_len, width)
    for one in runners:
        one.time_pass(1, 1, 0)  # warm up: with a cached profile, the first request would be slow
    path = profile_path(shape, cache, identity)
    ends = end_tokens(model, vocab_size, tokenizer)
    log_unused_defaults(model)
    return Engine(tokenizer, ends, target, proposers, cost, path, about)


def _files(
    config: TorchEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Path, Path | None, Path | None]:
    """The folders of the target, the draft model and the heads, which exist and fit together."""
    model = existing("engine.model", folder / config.model)
    draft = None if config.draft is None else existing("engine.draft", folder / config.draft)
    heads = None if config.heads is None else existing("engine.heads", folder / config.heads)
    try:
        check_pair(model, draft, limits.max_context_len)
    except PairError as error:
        raise ConfigError(f"engine.json: {error}") from error
    return model, draft, heads


def _target(runner: Runner, own: RunnerConfig, limits: LimitsConfig) -> TorchTarget:
    capabilities = replace(
        stepwise_capabilities(limits, own.vocab_size, runner.bytes_per_token),
        verifies_trees=not has_window(load_config(own)),
    )
    return TorchTarget(runner, capabilities, reuses_prefixes=limits.reuse_prefixes)


def _draft_model(
    own: RunnerConfig, limits: LimitsConfig, config: TorchEngineConfig, places: Placement
) -> tuple[Runner, DraftModelProposer]:
    """own: the draft model's runner config, with the context length of the target. The draft model
    may have fewer positions."""
    positions = getattr(load_config(own), "max_position_embeddings", None) or own.max_len
    own = replace(own, max_len=min(own.max_len, positions))
    runner = _runner("engine.draft", own, SHORT_LAG + 1, config)
    proposer = DraftModelProposer(
        runner,
        limits.max_sequences,
        limits.max_draft_len,
        reuses_prefixes=limits.reuse_prefixes,
        max_context_len=own.max_len,
        has_own_memory=places.draft != places.target,
    )
    return runner, proposer


def _names(model: Path, drafter: Path | None) -> tuple[str, str]:
    """What the profile's key says of the models."""
    return fingerprint(model), fingerprint(drafter) if drafter else "no draft"


def _eagle_config(folder: Path, own: RunnerConfig, draft: Path | None) -> EagleConfig | None:
    """None if the folder has no EAGLE head. Raises ConfigError."""
    if not is_eagle(folder):
        return None
    if draft is not None:
        raise ConfigError(
            "engine.json: engine.heads: an EAGLE head and a draft model cannot be loaded together: "
            "leave out engine.draft, or engine.heads"
        )
    try:
        return read_config(folder, load_config(own))
    except ModelError as error:
        raise ConfigError(f"engine.json: engine.heads: {error}") from error


def _eagle(folder: Path, config: EagleConfig, own: RunnerConfig) -> EagleRunner:
    try:
        return load_eagle(folder, config, own)
    except ModelError as error:
        raise ConfigError(f"engine.json: engine.heads: {error}") from error


def _heads(folder: Path, target: RunnerConfig) -> MedusaHeads:
    try:
        return load_heads(folder, target.path, target.vocab_size, target.dtype, target.device)
    except ModelError as error:
        raise ConfigError(f"engine.json: engine.heads: {error}") from error


def _with_context_len(
    limits: LimitsConfig, models: Sequence[tuple[Path, torch.device]], dtype: torch.dtype
) -> LimitsConfig:
    """Set the served context length, and log its value and what limits it."""
    length, reason = limits.max_context_len, "limits.max_context_len"
    if length is None:
        length, reason = choose_context_len(models, dtype, limits.max_sequences)
    logger.info("%s%d tokens, prompt and text together (%s)", CONTEXT_LINE, length, reason)
    return limits.model_copy(update={"max_context_len": length})


def _shape(limits: LimitsConfig) -> ProfileShape:
    return ProfileShape(
        limits.max_sequences,
        limits.max_draft_len,
        min(limits.context_len // 2, MAX_PROFILED_CONTEXT),
        limits.prefill_chunk,
        limits.context_len,
    )


def uses_graphs(config: TorchEngineConfig, device: torch.device) -> bool:
    """Whether short passes are captured as CUDA graphs; never on a CPU."""
    return config.cuda_graphs and device.type == "cuda"


def _runner(key: str, own: RunnerConfig, max_width: int, config: TorchEngineConfig) -> Runner:
    """Load a runner that is ready for decoding passes of max_width tokens per row.

    If its passes cannot be captured, they are launched kernel by kernel. This is slower, but the
    model is served. Raises ConfigError, with the key's name, if the engine cannot serve the model.
    """
    try:
        if (compiled := _openvino_runner(own, config.runtime)) is not None:
            logger.info("loaded %s", key)
            return compiled
        runner_class = GraphRunner if uses_graphs(config, own.device) else CausalRunner
        runner = load_runner(own, runner_class)
    except ModelError as error:
        raise ConfigError(f"engine.json: {key}: {error}") from error
    logger.info("loaded %s", key)
    try:
        runner.warm(max_width)
    except ModelError as error:
        logger.warning("%s. The model is served without CUDA graphs.", error)
        del runner  # free its cache before the next one is allocated
        return load_runner(own)
    return runner


def _openvino_runner(own: RunnerConfig, runtime: str) -> Runner | None:
    """None if PyTorch computes the model. OpenVINO has kernels for fewer processors.

    Raises ConfigError if OpenVINO is configured but cannot be used. Raises ModelError.
    """
    if runtime == "torch":
        return None
    reason = _no_openvino(own)
    if not reason:
        from smartspec_py.engines.torch.openvino_runner import load_openvino_runner

        try:
            return load_openvino_runner(own)
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            if runtime == "auto":
                logger.warning(
                    "OpenVINO cannot compute %s (%s): PyTorch computes it", own.path.name, reason
                )
    if runtime == "openvino":
        raise ConfigError(f"engine.json: engine.runtime: openvino cannot be used: {reason}")
    return None


def _no_openvino(own: RunnerConfig) -> str:
    """Why OpenVINO cannot be used; empty if it can. Raises ModelError."""
    if own.device.type != "cpu":
        return f"the device is {own.device.type}"
    if own.batch_invariant:
        return "engine.batch_invariant is set"
    if own.dtype not in (torch.float32, torch.bfloat16):
        return f"the precision is {str(own.dtype).removeprefix('torch.')}"
    if find_spec("openvino") is None:
        return "it is not installed: pip install smartspec-py[openvino]"
    hf_config = load_config(own)
    if not can_write_out(hf_config):
        return f"models of type {hf_config.model_type} with this config are not supported"
    return ""


def dtype_of(name: str, device: torch.device, model: Path) -> torch.dtype:
    """The configured precision; for auto, that of the checkpoint. model: the folder of the target.

    On a CPU, auto uses float32 instead of float16, and instead of bfloat16 if the processor has no
    instructions for it. This loses no precision.
    """
    if name == "auto":
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        if device.type == "cpu" and not (name == "bfloat16" and "avx512_bf16" in cpu_flags()):
            name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _device_names(places: Placement) -> str:
    """The kinds of devices. Costs do not depend on whether two models share one."""
    names = [_device_name(places.target), _device_name(places.draft)]
    return ", draft on ".join(dict.fromkeys(names))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
