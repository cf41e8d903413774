"""Chooses the runtime of a model, and loads the model with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smartspec_py.engines.checkpoints.checks import OPENVINO_ONLY, ModelError, first_line
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.phases import PREPARING, begin
from smartspec_py.engines.runtimes.openvino.model_types import MODEL_TYPES, can_write_out
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner, load_runner
from smartspec_py.engines.runtimes.pytorch.float8 import has_float8
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import FP8, OPENVINO, PYTORCH, Runner, RunnerConfig
from smartspec_py.faults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.config import LocalEngineConfig

logger = logging.getLogger(__name__)


class NoOpenVinoError(Exception):
    """OpenVINO was chosen and cannot compile a model. The message says which, and why."""


@contextmanager
def named(key: str) -> Iterator[None]:
    """Errors of the engine as ConfigError with the key's name."""
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"engine.json: {key}: {error}") from error


def uses_graphs(config: LocalEngineConfig, device: torch.device) -> bool:
    """Whether passes are captured as CUDA graphs; never on a CPU."""
    return config.cuda_graphs and device.type == "cuda"


def load(key: str, run_config: RunnerConfig, config: LocalEngineConfig) -> Runner:
    """Load a runner. Raises ConfigError, with the key's name, if the engine cannot serve the
    model, and NoOpenVinoError."""
    with named(key):
        if config.weights == FP8 and not has_float8(run_config.device):
            raise ConfigError(
                "engine.json: engine.weights: fp8 needs a GPU that multiplies float8 (NVIDIA Ada, "
                f"Hopper or newer), and the device is {run_config.device.type}: use int8 or stored"
            )
        runner = _openvino_runner(run_config, config.runtime)
        if runner is None and config.weights in ("int8", "int4"):
            raise _only_openvino(f"engine.weights: {config.weights}", "stored")
        if runner is None and config.kv_cache == "u8":
            raise _only_openvino("engine.kv_cache: u8", "auto")
        if runner is None:
            runner_class = GraphRunner if uses_graphs(config, run_config.device) else PyTorchRunner
            weights = FP8 if config.weights == FP8 else "stored"
            runner = load_runner(replace(run_config, weights=weights), runner_class)
    logger.info("loaded %s", key)
    begin(PREPARING)
    runner.warm()
    return runner


def _only_openvino(value: str, other: str) -> ConfigError:
    return ConfigError(
        f"engine.json: {value} needs OpenVINO and one of the model types {', '.join(MODEL_TYPES)}: "
        f"use {other}"
    )


def runtime_of(folder: Path, device: torch.device, config: LocalEngineConfig, max_len: int) -> str:
    """OPENVINO or PYTORCH: what will compute this model. Raises ModelError, and ConfigError if the
    model needs the other one."""
    is_torch = config.runtime == "torch"
    reason = "engine.runtime is torch" if is_torch else _no_openvino(folder, device, max_len)
    if reason and (kind := load_config(folder, max_len).model_type) in OPENVINO_ONLY:
        raise ConfigError(
            f"engine.json: {folder.name} is of the type {kind}, which only OpenVINO computes, on a "
            f"CPU: {reason}"
        )
    return PYTORCH if reason else OPENVINO


def _openvino_runner(run_config: RunnerConfig, runtime: str) -> Runner | None:
    """None if PyTorch computes the model. OpenVINO has kernels for fewer processors.

    Raises ConfigError if OpenVINO is configured but cannot be used. Raises ModelError and, if it
    fails to compile the model, NoOpenVinoError.
    """
    if runtime == "torch":
        return None
    reason = _no_openvino(run_config.path, run_config.device, run_config.max_len)
    if not reason:
        from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner

        try:
            return load_openvino_runner(run_config)
        except RuntimeError as error:
            reason = first_line(error)
            if runtime == "auto":
                text = f"OpenVINO cannot compute {run_config.path.name} ({reason})"
                raise NoOpenVinoError(text) from error
    if runtime == "openvino":
        raise ConfigError(f"engine.json: engine.runtime: openvino cannot be used: {reason}")
    return None


def _no_openvino(folder: Path, device: torch.device, max_len: int) -> str:
    """Why OpenVINO cannot be used; empty if it can. Raises ModelError."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if find_spec("openvino") is None:
        return "it is not installed: pip install smartspec-py[openvino]"
    hf_config = load_config(folder, max_len)
    if not can_write_out(hf_config):
        return f"models of type {hf_config.model_type} with this config are not supported"
    return ""
