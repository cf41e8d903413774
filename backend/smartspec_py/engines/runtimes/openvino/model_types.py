"""Which models OpenVINO's graph can compute, and properties of their layers for it."""

from __future__ import annotations

from typing import Any

import torch

from smartspec_py.engines.checkpoints import experts
from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GPT_OSS,
    GRANITE_4,
    GRANITE_MOE,
    LFM2,
    RECURRENT,
    SERVED_ROTATIONS,
)
from smartspec_py.engines.checkpoints.rope import rope_of

MODEL_TYPES = (
    *("exaone4", "gemma3_text", *GEMMA_4, "granite", GRANITE_4, *LFM2, "llama", "ministral3"),
    *("mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3"),
    *experts.TYPES,
)
"""Supported values of `model_type`. These models have a gated MLP, or a mixture of such experts.
Layers may have biases, norms of queries and keys, RMS norms before or after attention and MLP, one
matrix for several products, rotation of a part of a head or none, queries that grow with the
position, and factors of embeddings, layers and logits. Some layers may be gated delta nets in
place of attention, see `recurrent`; for Gemma 4, see `gemma4`, for Granite with experts or states
`granite`, for LFM2 `lfm2` and for gpt-oss `gpt_oss`."""

GRANITES = ("granite", GRANITE_MOE, GRANITE_4)

LARGE = 100_000_000
"""Parameters from which `auto` means int8. Such weights do not fit in a CPU's caches, so a pass of
one token takes as long as reading them: with int8, 0.43 to 0.75 of the time on all processors that
were tried. The choice is not measured at each start, because texts depend on it."""

WINDOW_IN_CONFIG = ("mistral", "mixtral", "phi3")
"""Models whose layers all have the window of the config."""


def can_write_out(config: Any) -> bool:
    """Whether a model with this Transformers config has this layout, without other parts."""
    if config.model_type not in MODEL_TYPES:
        return False
    if config.model_type in (*RECURRENT, GRANITE_4, *LFM2) and (
        activation(config) != "silu" or "full_attention" not in config.layer_types
    ):
        return False
    ropes = [dict(rope_of(config))]
    if "rope_type" not in ropes[0]:  # one for each type of layer
        ropes = list(ropes[0].values())
    return (
        activation(config) in ("silu", "gelu_pytorch_tanh")
        and all(rope["rope_type"] in SERVED_ROTATIONS for rope in ropes)
        and not getattr(config, "attn_logit_softcapping", None)
        # With "vision", that is so between tokens of an image only.
        and getattr(config, "use_bidirectional_attention", None) in (None, False, "vision")
        and getattr(config, "clip_qkv", None) is None
    )


def auto_weights(num_parameters: int) -> str:
    """What `engine.weights: auto` means for a model of so many parameters."""
    return "int8" if num_parameters >= LARGE else "stored"


def activation(config: Any) -> str:
    """The name of the MLP's activation."""
    if config.model_type in LFM2:
        return "silu"
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def has_attention(layer: Any) -> bool:
    """Whether a layer of Transformers has keys and values, of its own or of a layer before it."""
    return getattr(layer, "self_attn", None) is not None


def layers_with_keys(model: Any) -> list[int]:
    """Numbers of the layers of a model of Transformers that have keys of their own."""
    return [
        index
        for index, layer in enumerate(model.model.layers)
        if has_attention(layer) and not getattr(layer.self_attn, "is_kv_shared_layer", False)
    ]


def unused_weights(model: Any) -> tuple[str, ...]:
    """How the names of weights begin that files may have, and no layer uses: those of keys and
    values in layers that have none of their own."""
    has_own = set(layers_with_keys(model))
    return tuple(
        f"model.layers.{index}.self_attn.{part}"
        for index, layer in enumerate(model.model.layers)
        if has_attention(layer) and index not in has_own
        for part in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )


def attention_window(layer: Any, config: Any, max_len: int) -> int | None:
    """Positions that the layer's queries see; None if they see all."""
    owner = config if config.model_type in WINDOW_IN_CONFIG else layer.self_attn
    if not getattr(owner, "is_sliding", True):  # of EXAONE 4, which has the window everywhere
        return None
    window: int | None = getattr(owner, "sliding_window", None)
    return None if window is None or window >= max_len else window


def is_rotated(attention: Any) -> bool:
    """Whether queries and keys of this attention are. If EXAONE 4 has windows, those of layers
    without one are not."""
    if hasattr(attention, "sliding_window_pattern"):
        return attention.sliding_window is None or attention.is_sliding
    return getattr(attention, "use_rope", True)


def has_output_gate(attention: Any) -> bool:
    """Whether the output of each head is multiplied by a gate, a part of the product with the
    queries' weights."""
    config = getattr(attention, "config", None)
    return getattr(config, "model_type", "") in RECURRENT


def is_stored_less_one(norm: Any) -> bool:
    """Whether the files have the weight of this norm less 1, as for Gemma up to 3 and Qwen3.5."""
    return not hasattr(norm, "variance_epsilon") and not hasattr(norm, "with_scale")


def granite_factor(config: Any, name: str) -> float:
    """Of embeddings, layers or logits. Other models have none, whatever their config.json says."""
    return float(getattr(config, name)) if config.model_type in GRANITES else 1.0


def query_factors(config: Any, max_len: int) -> torch.Tensor | None:
    """What the queries of Ministral 3 are multiplied by, [max_len]; None if that is 1."""
    rope = rope_of(config)
    beta = rope.get("llama_4_scaling_beta") if config.model_type == "ministral3" else None
    if not beta or max_len <= (trained := rope["original_max_position_embeddings"]):
        return None
    factors: torch.Tensor = 1 + beta * torch.log(1 + torch.arange(max_len) // trained)
    return factors


def rotation_table(rotary: Any, max_len: int, layer_type: str | None = None) -> torch.Tensor:
    """Cosines and sines [2, max_len, D / 2]: of the angle of each pair of a head by position. D:
    rotated numbers of a head. layer_type: None if all layers have the same angles."""
    types = [] if layer_type is None else [layer_type]
    cos, sin = rotary(torch.zeros(1), torch.arange(max_len)[None], *types)
    is_half = rotary.config.model_type == GPT_OSS  # the others have each twice
    half = cos.shape[-1] // (1 if is_half else 2)
    return torch.stack([cos[0, :, :half], sin[0, :, :half]])
