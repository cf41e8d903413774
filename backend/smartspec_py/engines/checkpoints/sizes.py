"""Checks of the numbers in the configuration of a model. Transformers checks few itself."""

from __future__ import annotations

import math
from typing import Any

from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GRANITE_4,
    settings_of_rotations,
    wrong_field,
)
from smartspec_py.engines.checkpoints.recurrent import TILE

OF_MAMBA = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_expand",
)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    *OF_MAMBA,
)
"""Fields of a configuration that count something, if they are there."""

OF_LAYERS = ("num_key_value_heads", "head_dim")
"""Those that differ by layer in Gemma 4."""

MOST_SIZE = 100_000_000

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
OF_ROTATION = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Numbers of a rotary embedding, which Transformers does not check. With wrong ones, such as
negative ones under a root, all logits are NaN, and texts are empty."""

OF_GATE = ("swiglu_alpha", "swiglu_limit")
"""Numbers by which experts of gpt-oss join gate and up."""


def check_sizes(name: str, config: Any) -> None:
    """Raise ModelError unless numbers of a Transformers config are possible."""
    is_gemma_4 = getattr(config, "model_type", None) in GEMMA_4
    for field in SIZES:
        if is_gemma_4 and field in OF_LAYERS:
            continue
        value = getattr(config, field, None)
        if value is not None and (type(value) is not int or not 0 < value <= MOST_SIZE):
            raise wrong_field(name, field, value, f"a whole number in 1..{MOST_SIZE}")
    if is_gemma_4:
        _check_gemma_4(name, config)
    if getattr(config, "model_type", None) == GRANITE_4:
        _check_granite_4(name, config)
    _check_experts(name, config)
    num_keys = getattr(config, "linear_num_key_heads", None)
    if num_keys and config.linear_num_value_heads % num_keys:
        rule = f"a multiple of the {num_keys} linear_num_key_heads"
        raise wrong_field(name, "linear_num_value_heads", config.linear_num_value_heads, rule)
    if num_keys and config.linear_conv_kernel_dim > TILE:
        rule = f"a whole number in 1..{TILE}"
        raise wrong_field(name, "linear_conv_kernel_dim", config.linear_conv_kernel_dim, rule)
    for field in EPSILONS:
        value = getattr(config, field, None)
        if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
            raise wrong_field(name, field, value, "a number in 0..1")
    for field in OF_GATE:
        _check_positive(name, field, getattr(config, field, None))
    for settings in settings_of_rotations(getattr(config, "rope_parameters", None)):
        for field in OF_ROTATION:
            _check_positive(name, field, settings.get(field))
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and padding >= config.vocab_size:
        rule = f"less than the vocab_size of {config.vocab_size}"
        raise wrong_field(name, "pad_token_id", padding, rule)


def _check_positive(name: str, field: str, value: Any) -> None:
    """value: None if there is none."""
    is_number = type(value) in (int, float)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise wrong_field(name, field, value, "a number above 0")


def _check_gemma_4(name: str, config: Any) -> None:
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    if not 0 <= config.num_kv_shared_layers < num_layers:
        rule = f"a whole number in 0..{num_layers - 1}"
        raise wrong_field(name, "num_kv_shared_layers", config.num_kv_shared_layers, rule)
    width = getattr(config, "hidden_size_per_layer_input", 0)
    if not 0 <= width <= MOST_SIZE:
        rule = f"a whole number in 0..{MOST_SIZE}"
        raise wrong_field(name, "hidden_size_per_layer_input", width, rule)
    if width and not config.vocab_size <= (num := config.vocab_size_per_layer_input) <= MOST_SIZE:
        rule = f"a whole number in {config.vocab_size}..{MOST_SIZE}"
        raise wrong_field(name, "vocab_size_per_layer_input", num, rule)
    for of_layer in config.per_layer_config:
        value, num_keys = of_layer.head_dim, of_layer.num_key_value_heads
        if type(value) is not int or not 0 < value <= MOST_SIZE or value % 2:
            raise wrong_field(name, "global_head_dim", value, "an even number above 0")
        if type(num_keys) is not int or num_keys <= 0 or num_heads % num_keys:
            rule = f"a whole number above 0 that divides the {num_heads} num_attention_heads"
            raise wrong_field(name, "num_global_key_value_heads", num_keys, rule)


def _check_granite_4(name: str, config: Any) -> None:
    """Transformers has checked that the heads have the width that mamba_expand gives."""
    if config.mamba_n_heads % config.mamba_n_groups:
        rule = f"a whole number that divides the {config.mamba_n_heads} mamba_n_heads"
        raise wrong_field(name, "mamba_n_groups", config.mamba_n_groups, rule)
    if config.mamba_d_conv > TILE:
        raise wrong_field(name, "mamba_d_conv", config.mamba_d_conv, f"a whole number in 1..{TILE}")
    limit = config.time_step_limit
    if limit is not None and not (len(limit) == 2 and 0 <= limit[0] <= limit[1]):
        raise wrong_field(name, "time_step_limit", limit, "two numbers from 0, the smaller first")


def _check_experts(name: str, config: Any) -> None:
    """Transformers has checked that these are whole numbers."""
    num_experts = 0
    for field in ("num_local_experts", "num_experts"):
        value = getattr(config, field, None) or 0
        if not 0 <= value <= MOST_SIZE:
            raise wrong_field(name, field, value, f"a whole number in 0..{MOST_SIZE}")
        num_experts = max(num_experts, value)
    for field in ("num_experts_per_tok", "top_k_experts"):
        num_chosen = getattr(config, field, None)
        if num_experts and num_chosen is not None and not 0 < num_chosen <= num_experts:
            raise wrong_field(name, field, num_chosen, f"a whole number in 1..{num_experts}")
