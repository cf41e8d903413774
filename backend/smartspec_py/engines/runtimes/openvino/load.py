"""Loads a model that OpenVINO computes, from the files of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from smartspec_py.cache_dir import cache_dir
from smartspec_py.engines.checkpoints.checks import GPT_OSS
from smartspec_py.engines.checkpoints.config import load_config, model_without_weights
from smartspec_py.engines.checkpoints.experts import (
    EXPERT_BIAS,
    ByExpert,
    has_experts,
    usual_name,
)
from smartspec_py.engines.checkpoints.mtp import mtp_parameters
from smartspec_py.engines.checkpoints.quantized import MXFP4_BYTES
from smartspec_py.engines.checkpoints.tensors import (
    CheckedTensors,
    check_complete,
    check_tied,
    check_used,
    source_files,
)
from smartspec_py.engines.runtimes.machine import has_vnni
from smartspec_py.engines.runtimes.openvino.model_types import unused_weights
from smartspec_py.engines.runtimes.openvino.precision import NUM_BITS, draft_weights
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.openvino.weights_file import WeightsFile
from smartspec_py.engines.runtimes.runner import RunnerConfig


def load_openvino_runner(config: RunnerConfig) -> OpenVinoRunner:
    """Load weights from a local directory, tensor by tensor. Raises ModelError."""
    hf_config = load_config(config.path, config.max_len)
    model = model_without_weights(hf_config)
    if config.has_draft_weights:
        config = replace(config, weights=draft_weights(model))
    files = checked_files(model, hf_config, config)
    file = _weights_file(config, model.num_parameters(), hf_config)
    return OpenVinoRunner(model, config, Weights(files, config.num_threads, file=file))


def checked_files(model: Any, hf_config: Any, config: RunnerConfig) -> CheckedTensors:
    """The tensors in the files of a model, by the names of its parameters. model: without weights.
    Raises ModelError if there are others, or not all."""
    files = CheckedTensors(config.path, config.dtype)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    is_tied, names = hf_config.tie_word_embeddings, set(files)
    of_mtp = mtp_parameters(hf_config) if config.has_mtp else {}
    tensors = ByExpert({**model.state_dict(), **of_mtp})
    if is_tied and head in names and embedding not in names:
        files.rename(head, embedding)  # so `safetensors.torch.save_model` writes tied tensors
    for name in names:
        if name not in tensors and (usual := usual_name(name)) != name:
            files.rename(name, usual)
    needed = {**dict(model.named_parameters()), **of_mtp}
    needed |= {name: tensor for name, tensor in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    missing = set(ByExpert(needed)) - set(files)
    check_complete(missing, config.path)
    unexpected = set(files) - set(tensors)
    unused = {name for name in unexpected if name.startswith(unused_weights(model))}
    check_used(unexpected - unused, files, config.path)
    files.leave_out(unexpected)
    files.expect(tensors)
    if is_tied and {head, embedding} <= names:
        check_tied(torch.equal(files[embedding], files[head]), config.path)
    return files


def _weights_file(config: RunnerConfig, num_parameters: int, hf_config: Any) -> WeightsFile | None:
    """None if weights are as stored, or joined with adapters."""
    num_bytes = num_parameters * NUM_BITS[config.weights] // 8
    if not num_bytes or not config.weights_cache_bytes or config.adapters.names:
        return None
    keeps_experts = config.keeps_experts and has_experts(hf_config)
    if keeps_experts and hf_config.model_type == GPT_OSS:
        num_bytes = int(num_parameters * MXFP4_BYTES)
    return WeightsFile(
        cache_dir() / "weights",
        source_files(config.path),
        f"{config.weights}, {config.dtype}, {'' if has_vnni() else 'no '}VNNI"
        + (", 4 bits as they are" if config.keeps_4_bits else "")
        + (", those of experts as they are" if keeps_experts else ""),
        num_bytes=num_bytes,
        most_bytes=config.weights_cache_bytes,
    )
