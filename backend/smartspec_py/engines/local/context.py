"""The memory for keys and values, and the context length if engine.json does not set it.

The memory is a share of what is free on the device after the weights are loaded. In a cache of
blocks, one request may use all of it. A cache of rows is reserved at the start, and each of its
rows has room for the full context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from smartspec_py.constants import DEFAULT_CONTEXT_LEN
from smartspec_py.engines.checkpoints.checks import GPT_OSS
from smartspec_py.engines.checkpoints.config import num_weights, text_config
from smartspec_py.engines.checkpoints.experts import has_experts
from smartspec_py.engines.checkpoints.mtp import num_own_weights
from smartspec_py.engines.checkpoints.pair import positions_of
from smartspec_py.engines.checkpoints.quantized import MXFP4_BYTES
from smartspec_py.engines.checkpoints.recurrent import state_shapes
from smartspec_py.engines.checkpoints.tensors import num_bytes as file_bytes
from smartspec_py.engines.runtimes.machine import cpu_has, free_bytes
from smartspec_py.engines.runtimes.runner import bytes_per_token, cache_dtype
from smartspec_py.faults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.5
"""Share of the memory left after the weights. Passes, CUDA graphs and other programs need some
too."""

COMPRESSED_BYTES = {"int8": 1.0, "int4": 0.65}
"""Of a weight, by `RunnerConfig.weights`: with 4 bits, of layers with the smallest groups."""

MOST_OF_FILE = 4 / 3
"""Bytes in memory of a matrix in 4 bits of a file, per byte there: those of GGUF, whose scales and
zeros become float32."""

STEP = 512
"""A context length that memory limits is a multiple of this. The cached profile depends on the
context length, so a start with slightly less free memory can still use it."""


LEAST = 64
"""Tokens for which a cache must have room: two blocks."""


class CacheSize(NamedTuple):
    """reason: what limits the context length, in words. num_bytes: for keys and values of a cache
    of blocks. num_rows: texts at once. num_kept_states: see `RunnerConfig`."""

    context_len: int
    reason: str
    num_bytes: int
    num_rows: int
    num_kept_states: int = 0


def choose_cache(
    models: Sequence[Path],
    device: torch.device,
    dtype: torch.dtype,
    limits: LimitsConfig,
    kv_cache: str = "auto",
    weights: str = "stored",
    has_blocks: bool = False,
    keeps_experts: bool = False,
    has_mtp: bool = False,
) -> CacheSize:
    """The cache for these models together.

    models: the folder of each model, the target first. kv_cache, weights, keeps_experts: see
    `RunnerConfig`. has_blocks: whether OpenVINO computes all models. has_mtp: whether the target's
    own layer drafts.

    Raises ConfigError.
    """
    configs = [text_config(folder) for folder in models]
    left, is_compressed = free_bytes(device), weights in COMPRESSED_BYTES
    reserved = 1 if has_blocks else limits.max_sequences
    each, of_states = 0, []  # each: bytes of a token of the reserved rows
    for folder, config in zip(models, configs, strict=True):
        of_weights = int(num_weights(config) * COMPRESSED_BYTES.get(weights, dtype.itemsize))
        if config.model_type == GPT_OSS and is_compressed:
            of_weights = int(MXFP4_BYTES * num_weights(config))
        elif keeps_experts and is_compressed and has_experts(config):
            of_weights = min(of_weights, int(MOST_OF_FILE * file_bytes(folder)))
        left -= of_weights
        of_keys = _key_dtype(dtype, is_compressed) if has_blocks else cache_dtype(device, dtype)
        each += reserved * bytes_per_token(config, of_keys, kv_cache)
        if (shapes := state_shapes(config)) is not None:
            of_states.append(shapes)
    if has_mtp:
        num_more = num_own_weights(configs[0])
        left -= int(num_more * COMPRESSED_BYTES.get(weights, dtype.itemsize))
    share = int(CACHE_SHARE * max(0, left))
    of_row = sum(shapes.row_bytes(limits.max_draft_len) for shapes in of_states)
    num_bytes = limits.cache_bytes or max(share, DEFAULT_CONTEXT_LEN * each + 2 * of_row)
    least = 2 * max(LEAST * each, of_row) if of_row else LEAST * each
    if num_bytes < least:
        raise ConfigError(
            f"engine.json: limits.cache_bytes: {num_bytes} is too small, must be at least {least} "
            "for these models"
        )
    num_rows, num_kept = limits.max_sequences, 0
    if of_row:
        of_prefix = sum(shapes.prefix_bytes for shapes in of_states)
        num_rows, num_kept = _room_for_states(num_bytes, of_row, of_prefix, num_rows)
        num_bytes -= num_rows * of_row + num_kept * of_prefix
    sizes = num_bytes, num_rows, num_kept
    fitting = num_bytes // each
    text = f"{num_bytes / 2**30:.1f} GiB for keys and values"
    if not limits.cache_bytes:
        text += f", {CACHE_SHARE:.0%} of what the weights leave free"
    if (asked := limits.max_context_len) is not None:
        if asked <= fitting or not has_blocks:
            return CacheSize(asked, "limits.max_context_len", *sizes)
        reason = f"limits.max_context_len is {asked}; one text in {text}"
        return CacheSize(fitting, reason, *sizes)
    fitting -= fitting % STEP if fitting > STEP else 0
    reach = positions_of(configs[0].to_dict())
    name = models[0].name if reach else ""
    reach = reach or DEFAULT_CONTEXT_LEN
    if reach <= fitting:
        why = f"all positions of {name}" if name else "the models set no limit"
        return CacheSize(reach, why, *sizes)
    rows = "one text" if has_blocks else f"{reserved} rows of this length"
    return CacheSize(fitting, f"{rows} in {text}; {name} has {reach} positions", *sizes)


def _room_for_states(
    num_bytes: int, of_row: int, of_prefix: int, max_sequences: int
) -> tuple[int, int]:
    """Texts at once, and prefixes whose states are kept. Together they take at most half of the
    memory, and texts at most a quarter, if there is more than one.

    of_row, of_prefix: bytes of each."""
    num_rows = min(max_sequences, max(1, num_bytes // 4 // of_row))
    num_kept = min(num_bytes // 4, num_bytes // 2 - num_rows * of_row) // of_prefix
    logger.info(
        "%d texts at once, each with %.2f GiB of recurrent states (limits.max_sequences is %d); "
        "states of %d prefixes are kept",
        num_rows,
        of_row / 2**30,
        max_sequences,
        num_kept,
    )
    return num_rows, num_kept


def _key_dtype(dtype: torch.dtype, is_compressed: bool) -> torch.dtype:
    """Of OpenVINO's keys and values, or one of the same size."""
    is_half = is_compressed or (dtype == torch.bfloat16 and cpu_has("avx512_bf16"))
    return torch.float16 if is_half else torch.float32
