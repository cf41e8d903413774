"""Builds a PyTorch engine from engine.json: device, precision, models and profile."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from smartspec_py.defaults import (
    DRAFT_MODEL,
    HEADS,
    PROMPT_LOOKUP,
    ConfigError,
)
from smartspec_py.engines.base import Proposer
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.pair import check_pair
from smartspec_py.engines.checkpoints.supported import ModelError, check_heads, first_line
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.local.context import choose_context_len
from smartspec_py.engines.local.devices import Placement, place
from smartspec_py.engines.local.draft_model import DraftModelProposer
from smartspec_py.engines.local.eagle_proposer import EagleProposer
from smartspec_py.engines.local.medusa_proposer import HeadsProposer
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
from smartspec_py.engines.profile import (
    cached_profile,
    fingerprint,
    profile_path,
)
from smartspec_py.engines.runtimes.heads.eagle import (
    EagleConfig,
    EagleHead,
    EagleRunner,
    is_eagle,
    load_eagle,
    read_config,
)
from smartspec_py.engines.runtimes.heads.medusa import MedusaHeads, load_heads
from smartspec_py.engines.runtimes.machine import cpu_has, thread_count
from smartspec_py.engines.runtimes.openvino.supported import FAMILIES, can_write_out
from smartspec_py.engines.runtimes.pytorch.buckets import MAX_WIDTH
from smartspec_py.engines.runtimes.pytorch.causal import CausalRunner, load_runner
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import Runner, RunnerConfig

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig, TorchEngineConfig

logger = logging.getLogger(__name__)

MAX_PROFILED_CONTEXT, MAX_PROFILED_BYTES = 512, 1 << 30
"""Passes are timed at half of the context, but at most at this length, and with so many bytes of
keys and values of all rows, which take a second to write. Longer contexts are extrapolated."""


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


@dataclass(frozen=True, slots=True)
class _Setup:
    """What is known before models are loaded. own: how the target runs. heads: Medusa heads, or the
    configuration of an EAGLE head."""

    config: TorchEngineConfig
    limits: LimitsConfig
    places: Placement
    own: RunnerConfig
    draft: Path | None
    head_folder: Path | None
    heads: MedusaHeads | EagleConfig | None

    @property
    def drafting_folder(self) -> Path | None:
        """Of the model that drafts with passes of its own: the draft model or the EAGLE head."""
        return self.head_folder if isinstance(self.heads, EagleConfig) else self.draft


def _build(config: TorchEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    places = place(config)
    num_threads = thread_count(config.num_threads)
    # Its worker threads would spin on cores that OpenVINO's threads or other programs need: beside
    # a busy program, weights took 6 s to round with two threads, and 0.2 s with one.
    torch.set_num_threads(1)
    model, draft, head_folder = _files(config, limits, folder)
    tokenizer = load_tokenizer("engine.model", model)
    vocab_size = num_token_ids(tokenizer)
    dtype = dtype_of(config.dtype, places.target, model)
    models = [(model, places.target)] + ([(draft, places.draft)] if draft else [])
    limits = _with_context_len(limits, models, dtype, config.kv_cache)
    own = RunnerConfig(
        *(model, places.target, dtype, limits.max_sequences, limits.context_len, vocab_size),
        weights=config.weights,
        kv_cache=config.kv_cache,
        num_threads=num_threads,
    )
    heads = _load_heads(head_folder, own, draft)
    setup = _Setup(config, limits, places, own, draft, head_folder, heads)
    target = _target(setup)
    runner = target.runner
    setup = replace(setup, own=replace(own, weights=runner.config.weights))
    proposer = _proposer(setup, on_openvino=not isinstance(runner, CausalRunner))
    runners = [runner] + ([proposer.runner] if proposer else [])
    if any(isinstance(one, CausalRunner) for one in runners):
        torch.set_num_threads(num_threads)
    about = "; ".join(one.about for one in runners)
    identity = [
        fingerprint(model),
        fingerprint(setup.drafting_folder) if setup.drafting_folder else "no draft",
        f"{_device_names(places)}, {runner.config.dtype}, {num_threads} threads",
        about + (", with states" if isinstance(heads, MedusaHeads) else ""),
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    ]
    shape = _shape(limits, runner.bytes_per_token)
    cache = folder / config.profile_cache if config.profile_cache else None
    cost = cached_profile(target, proposer, shape, cache, identity, limits.profile_s)
    cost = replace(cost, target=replace(cost.target, is_padded=runner.is_padded))
    if proposer and cost.draft:
        draft_table = replace(cost.draft, is_padded=proposer.runner.is_padded)
        cost = replace(cost, draft=draft_table)
    for one in runners:
        one.release()
    proposers = _proposers(setup, proposer)
    logger.info(
        "%s on %s: %s, %s, %d threads; drafts from %s",
        *(model.name, places, str(runner.config.dtype).removeprefix("torch."), about),
        *(num_threads, ", ".join([*proposers, PROMPT_LOOKUP])),
    )
    for one in runners:
        one.time_pass(1, 1, 0)  # warm up: with a cached profile, the first request would be slow
    log_unused_defaults(model)
    runtime = "PyTorch" if isinstance(runner, CausalRunner) else "OpenVINO"
    weights = runner.config.weights
    return Engine(
        tokenizer,
        end_tokens(model, vocab_size, tokenizer),
        target,
        proposers,
        cost,
        profile_path(shape, cache, identity),
        about,
        facts={
            "model": model.name,
            "dtype": dtype_text(dtype, runner.config.dtype),
            "runtime": runtime + _weights_text(weights) + runner.config.cache_text,
            "threads": num_threads,
        },
    )


def _files(
    config: TorchEngineConfig, limits: LimitsConfig, folder: Path
) -> tuple[Path, Path | None, Path | None]:
    """The folders of the target, the draft model and the heads, which exist and fit together."""
    model = model_folder(existing("engine.model", folder / config.model))
    draft = None
    if config.draft is not None:
        draft = model_folder(existing("engine.draft", folder / config.draft))
    heads = None if config.heads is None else existing("engine.heads", folder / config.heads)
    try:
        check_pair(model, draft, limits.max_context_len)
    except ModelError as error:
        raise ConfigError(f"engine.json: {error}") from error
    return model, draft, heads


def _target(setup: _Setup) -> TorchTarget:
    limits, heads = setup.limits, setup.heads
    own = replace(
        setup.own,
        gives_hidden=isinstance(heads, MedusaHeads),
        state_layers=heads.layer_ids if isinstance(heads, EagleConfig) else (),
    )
    runner = _runner("engine.model", own, limits.max_draft_len + 1, setup.config)
    capabilities = stepwise_capabilities(limits, own.vocab_size, runner.bytes_per_token)
    return TorchTarget(runner, capabilities, reuses_prefixes=limits.reuse_prefixes)


def _proposer(setup: _Setup, on_openvino: bool) -> DraftModelProposer | None:
    """The draft model or EAGLE head; None without either. on_openvino: whether the target is, and
    so an EAGLE head."""
    own, limits, places = setup.own, setup.limits, setup.places
    num_rows, longest, reuses = limits.max_sequences, limits.max_draft_len, limits.reuse_prefixes
    if setup.head_folder is not None and isinstance(setup.heads, EagleConfig):
        with _named("engine.heads"):
            head = _eagle_runner(load_eagle(setup.head_folder, setup.heads, own), own, on_openvino)
        if uses_graphs(setup.config, own.device):
            head.warm(MAX_WIDTH)
        return EagleProposer(head, num_rows, longest, reuses_prefixes=reuses)
    if setup.draft is None:
        return None
    own = replace(own, path=setup.draft, device=places.draft)
    # The draft model may have fewer positions than the served context.
    positions = (
        getattr(load_config(own.path, own.max_len), "max_position_embeddings", None) or own.max_len
    )
    own = replace(own, max_len=min(own.max_len, positions))
    return DraftModelProposer(
        _runner("engine.draft", own, MAX_WIDTH, setup.config),
        num_rows,
        longest,
        reuses_prefixes=reuses,
        max_context_len=own.max_len,
        has_own_memory=places.draft != places.target,
    )


def _eagle_runner(head: EagleHead, own: RunnerConfig, on_openvino: bool) -> Runner:
    if not on_openvino:
        return EagleRunner(head, own)
    from smartspec_py.engines.runtimes.openvino.eagle import OpenVinoEagleRunner

    return OpenVinoEagleRunner(head, own)


def _proposers(setup: _Setup, proposer: DraftModelProposer | None) -> dict[str, Proposer]:
    """By the names that requests use. proposer: see `_proposer`."""
    limits, found = setup.limits, dict[str, Proposer]()
    if proposer is not None:
        found[HEADS if isinstance(proposer, EagleProposer) else DRAFT_MODEL] = proposer
    if isinstance(setup.heads, MedusaHeads):
        found[HEADS] = HeadsProposer(setup.heads, limits.max_sequences, limits.max_draft_len)
    return found


def _load_heads(
    folder: Path | None, target: RunnerConfig, draft: Path | None
) -> MedusaHeads | EagleConfig | None:
    """Medusa heads, or the configuration of an EAGLE head. Raises ConfigError."""
    if folder is None:
        return None
    with _named("engine.heads"):
        check_heads(folder)
        if not is_eagle(folder):
            return load_heads(folder, target)
        if draft is not None:
            raise ModelError(
                "an EAGLE head and a draft model cannot be loaded together: leave out "
                "engine.draft, or engine.heads"
            )
        return read_config(folder, load_config(target.path, target.max_len))


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Errors of the engine as ConfigError with the key's name."""
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"engine.json: {key}: {error}") from error


def _with_context_len(
    limits: LimitsConfig,
    models: Sequence[tuple[Path, torch.device]],
    dtype: torch.dtype,
    kv_cache: str,
) -> LimitsConfig:
    """Set the served context length, and log its value and what limits it."""
    length, reason = limits.max_context_len, "limits.max_context_len"
    if length is None:
        length, reason = choose_context_len(models, dtype, limits.max_sequences, kv_cache)
    text = "context: %d tokens, prompt and text together (%s)"
    logger.info(text, length, reason)
    return limits.model_copy(update={"max_context_len": length})


def _shape(limits: LimitsConfig, bytes_per_token: int) -> ProfileShape:
    fitting = MAX_PROFILED_BYTES // (limits.max_sequences * bytes_per_token)
    return ProfileShape(
        limits.max_sequences,
        limits.max_draft_len,
        min(limits.context_len // 2, MAX_PROFILED_CONTEXT, max(1, fitting)),
        limits.prefill_chunk,
        # Longer ones change no cost. The served context depends on the memory that is free.
        min(limits.context_len, PROMPT_GRID[-1]),
    )


def uses_graphs(config: TorchEngineConfig, device: torch.device) -> bool:
    """Whether short passes are captured as CUDA graphs; never on a CPU."""
    return config.cuda_graphs and device.type == "cuda"


def _runner(
    key: str,
    own: RunnerConfig,
    max_width: int,
    config: TorchEngineConfig,
) -> Runner:
    """Load a runner that is ready for decoding passes of max_width tokens per row. Raises
    ConfigError, with the key's name, if the engine cannot serve the model."""
    with _named(key):
        runner = _openvino_runner(own, config.runtime)
        if runner is None and config.weights in ("int8", "int4"):
            raise _only_openvino(f"engine.weights: {config.weights}", "stored")
        if runner is None and config.kv_cache == "u8":
            raise _only_openvino("engine.kv_cache: u8", "auto")
        if runner is None:
            runner_class = GraphRunner if uses_graphs(config, own.device) else CausalRunner
            runner = load_runner(replace(own, weights="stored"), runner_class)
    logger.info("loaded %s", key)
    runner.warm(max_width)
    return runner


def _only_openvino(value: str, other: str) -> ConfigError:
    return ConfigError(
        f"engine.json: {value} needs OpenVINO and one of the model types {', '.join(FAMILIES)}: "
        f"use {other}"
    )


def _openvino_runner(own: RunnerConfig, runtime: str) -> Runner | None:
    """None if PyTorch computes the model. OpenVINO has kernels for fewer processors.

    Raises ConfigError if OpenVINO is configured but cannot be used. Raises ModelError.
    """
    if runtime == "torch":
        return None
    reason = _no_openvino(own)
    if not reason:
        from smartspec_py.engines.runtimes.openvino.runner import load_openvino_runner

        try:
            return load_openvino_runner(own)
        except RuntimeError as error:
            reason = first_line(error)
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
    if find_spec("openvino") is None:
        return "it is not installed: pip install smartspec-py[openvino]"
    hf_config = load_config(own.path, own.max_len)
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
        if device.type == "cpu" and not (name == "bfloat16" and cpu_has("avx512_bf16")):
            name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_text(wanted: torch.dtype, used: torch.dtype) -> str:
    """The precision in words, and why it is not the configured one."""
    of_wanted, of_used = (str(one).removeprefix("torch.") for one in (wanted, used))
    if used == wanted:
        return of_used
    return f"{of_used} (this processor has no instructions for {of_wanted})"


def _weights_text(weights: str) -> str:
    """What to say of the weights behind the name of the runtime."""
    return "" if weights == "stored" else f", {weights} weights"


def _device_names(places: Placement) -> str:
    """The kinds of devices. Costs do not depend on whether two models share one."""
    names = [_device_name(places.target), _device_name(places.draft)]
    return ", draft on ".join(dict.fromkeys(names))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
