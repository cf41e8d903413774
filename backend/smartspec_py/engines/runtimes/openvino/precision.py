"""Chooses how the products of a model are computed on this processor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.experts import EXPERTS, ByExpert, has_experts
from smartspec_py.engines.checkpoints.recurrent import state_shapes
from smartspec_py.engines.runtimes.machine import cpu_has, has_vnni
from smartspec_py.engines.runtimes.openvino.weights import KEPT_GROUPS, Weights
from smartspec_py.engines.runtimes.runner import RunnerConfig

GROUPS = (128, 64, 32)
"""With compressed weights, so many activations are rounded to 8 bits with one scale: the first of
these that divides the width of every product. One scale for a whole row would be less accurate.
Weights of 4 bits have the same groups."""

NUM_BITS = {"stored": 0, "int8": 8, "int4": 4}

LEAST_WEIGHTS, LEAST_BLOCK, MOST_BLOCK = 1_000_000, 32, 64
"""With AVX2 and without VNNI, products of whole numbers (`Products`) need about ten small operators
each. So they pay if matrices have so many weights on average: passes of Qwen2.5-0.5B take 0.63 to
1.06 of the time, those of SmolLM2-135M 0.95 to 1.3 (AMD EPYC Zen 3). Weights are rotated in blocks
of columns: the largest power of 2 that divides all widths, from LEAST_BLOCK to MOST_BLOCK."""

MOST_WIDTH, MOST_TOKENS = 2_048, 80
"""Without rounded activations, OpenVINO 2026.4 converts compressed weights in each pass. It then
sums in another order in passes of more than 80 tokens, and of up to 4 or 8 tokens in wider products
(with AVX2 from 4,224, with AVX512 from 2,304). So wider products are computed in parts, and larger
passes in several. A pass of 1.0 B over one token then takes 1.1 of the time, and one over more
tokens 0.75 to 0.97 (docs/research/performance.md)."""

EVEN_ROWS, FEWER_TOKENS = 32, 64
"""The same happens in passes of more than 64 tokens if a weight has a number of rows that 32 does
not divide, such as the output layer of a vocabulary of 151,665 tokens (with AVX2, and products
wider than 512)."""

DRAFT_PARAMETERS = 300_000_000
"""Parameters from which a draft model has 4 bits with VNNI, where its target has 8. A pass of 0.5 B
over one token then takes 0.77 of the time, and as many first drafts are accepted, though rounding
changes the most probable token of 16 % (Intel Xeon with AMX). Of 135 M, it changes 27 %."""

HALF = {torch.bfloat16: "BF16", torch.float16: "FP16"}
"""Precisions that not every processor has, by their names in OpenVINO."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """How products are computed. num_bits, block, has_half_attention: see `Products`. group:
    activations that are rounded with one scale; 0 rounds none. is_bounded: whether products have at
    most MOST_WIDTH columns, and passes at most MOST_TOKENS tokens."""

    num_bits: int
    group: int
    block: int
    is_bounded: bool
    has_half_attention: bool = False


def choose_numbers(
    model: Any, config: RunnerConfig, weights: Weights, precisions: Sequence[str]
) -> tuple[RunnerConfig, Numbers]:
    """How this processor computes the products, and the config with the precision that they have.
    precisions: of the processor."""
    num_bits = NUM_BITS[config.weights]
    group = _group(model) if num_bits else 0
    if num_bits == 4 and not group:
        raise ModelError(
            f"engine.weights: int4 needs products whose width {GROUPS[-1]} divides: use int8"
        )
    kept_group = weights.kept_group if config.keeps_4_bits and group else 0
    if kept_group:  # the scale of a group of activations is multiplied by one of the weights
        group = min(group, kept_group)
    has_integers = group > 0 and has_vnni()
    is_whole = num_bits == 8 and not has_integers and cpu_has("avx2")
    block = _block(model) if is_whole else 0
    is_bounded = num_bits > 0 and not has_integers and not block
    # In half precision and with AMX, those of experts would have other kernels for a lone token,
    # and compressed weights for up to 4 tokens. More tokens then take twice as long as in float32.
    # States are in float32, and drafts may never change one.
    is_float = is_bounded or block or (num_bits > 0 and cpu_has("amx_tile"))
    is_float = is_float or has_experts(model.config) or state_shapes(model.config) is not None
    is_half = not is_float and HALF.get(config.dtype) in precisions
    dtype = config.dtype if is_half else torch.float32
    config = replace(config, keeps_4_bits=kept_group > 0, dtype=dtype)
    # Rounding to 16 bits changes less than compressed weights do.
    has_half_attention = (
        num_bits > 0 and dtype == torch.float32 and HALF[torch.bfloat16] in precisions
    )
    return config, Numbers(num_bits, group, block, is_bounded, has_half_attention)


def draft_weights(model: Any) -> str:
    """`RunnerConfig.weights` of a draft model whose target has int8. No text depends on it."""
    is_large = model.num_parameters() >= DRAFT_PARAMETERS
    return "int4" if is_large and has_vnni() and _group(model) in KEPT_GROUPS else "int8"


def settings_of(config: RunnerConfig, numbers: Numbers) -> dict[str, Any]:
    """Of OpenVINO."""
    precision = HALF.get(config.dtype, "f32").lower()
    of_keys = "f16" if numbers.num_bits and precision == "f32" else precision
    if numbers.has_half_attention:
        of_keys = "bf16"
    return {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": numbers.group,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": "u8" if config.kv_cache == "u8" else of_keys,
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "INFERENCE_NUM_THREADS": config.num_threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }


def most_tokens(model: Any, config: RunnerConfig) -> int:
    """Of a pass with products that are bounded."""
    rows = {layer.out_features for layer in _linear_layers(model)}
    rows |= {config.vocab_size, config.adapters.rank}
    is_even = not any(num % EVEN_ROWS for num in rows)
    return MOST_TOKENS if is_even else FEWER_TOKENS


def _group(model: Any) -> int:
    """Numbers with one scale; 0, which rounds no activations, if no group divides all widths."""
    widths = {layer.in_features for layer in _linear_layers(model)}
    matrices = ByExpert(dict(model.named_parameters()))
    widths |= {matrices[name].shape[-1] for name in matrices if f"{EXPERTS}0." in name}
    return next((g for g in GROUPS if not any(width % g for width in widths)), 0)


def _block(model: Any) -> int:
    """See LEAST_WEIGHTS."""
    layers = _linear_layers(model)
    mean = sum(layer.weight.numel() for layer in layers) / len(layers)
    block = math.gcd(MOST_BLOCK, *(layer.in_features for layer in layers))
    return block if mean >= LEAST_WEIGHTS and block >= LEAST_BLOCK else 0


def _linear_layers(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
