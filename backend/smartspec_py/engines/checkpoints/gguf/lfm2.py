"""The configuration and the tensors of LFM2 in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.recurrent import CONV
from smartspec_py.faults import ConfigError

LFM2, LFM2_MOE = "lfm2", "lfm2_moe"
OF_CONV = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
OF_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
OF_LAYER = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}
OF_MLP = {
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
OF_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{}.up_proj",
    "ffn_down_exps": "feed_forward.experts.{}.down_proj",
}
"""Names in a Transformers model, by those in the file."""


def lfm2_config(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """config: what other models have, too. Raises ConfigError."""
    num_layers, num_heads = config["num_hidden_layers"], of.integer("attention.head_count")
    key = "attention.head_count_kv"
    by_layer = of.numbers(key, num_layers, 0, num_heads)
    nums = {int(num) for num in by_layer if num}
    if len(nums) != 1 or config["hidden_size"] % num_heads or num_heads % max(nums):
        raise ConfigError(
            f"{of.file} has {num_heads} heads and {key} {sorted(nums)} beside 0, which must be one "
            "number that divides them: convert the model again"
        )
    of.only("rope.dimension_count", config["hidden_size"] // num_heads)
    of_mlp: dict[str, Any] = {
        "intermediate_size": of.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }
    if config["model_type"] == LFM2_MOE:
        of_mlp = _experts(of, num_layers)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(nums),
        "layer_types": ["full_attention" if num else CONV for num in by_layer],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": of.integer("shortconv.l_cache"),
        "rope_theta": of.number("rope.freq_base", 10_000.0, 10.0, 1e15),
        **of_mlp,
    }


def _experts(of: Fields, num_layers: int) -> dict[str, Any]:
    """Of all layers but the first ones."""
    of.only("expert_gating_func", 2)  # sigmoid
    of.only("expert_weights_scale", 1.0, 0.0)  # 0 means 1
    of.only("expert_weights_norm", True)
    of.only("expert_group_count", 1)
    of.only("expert_group_used_count", 1)
    num = of.integer("expert_count")
    return {
        "intermediate_size": of.integer("feed_forward_length"),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        "num_dense_layers": of.integer("leading_dense_block_count", 0, 0, num_layers),
        "num_experts": num,
        "num_experts_per_tok": of.integer("expert_used_count", most=num),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def lfm2_tensors(
    config: Mapping[str, Any], num_tokens: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors: name in the file, name of the parameter and shape."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = width // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "shortconv.conv": (width, config["conv_L_cache"]),
        "shortconv.in_proj": (3 * width, width),
        "shortconv.out_proj": (width, width),
        "attn_q": (width, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, width),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "attn_norm": (width,),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    if num := config.get("num_experts", 0):
        inner = config["moe_intermediate_size"]
        shapes |= {
            "ffn_gate_inp": (num, width),
            "ffn_gate_exps": (num, inner, width),
            "ffn_up_exps": (num, inner, width),
            "ffn_down_exps": (num, width, inner),
        }
    yield "token_embd.weight", "model.embed_tokens.weight", (num_tokens, width)
    yield "token_embd_norm.weight", "model.embedding_norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (num_tokens, width)
    for layer, kind in enumerate(config["layer_types"]):
        has_experts = num and layer >= config["num_dense_layers"]
        names = OF_LAYER | (OF_CONV if kind == CONV else OF_ATTENTION)
        names |= OF_EXPERTS if has_experts else OF_MLP
        for part, parameter in names.items():
            name = f"model.layers.{layer}.{parameter}.weight"
            yield f"blk.{layer}.{part}.weight", name, shapes[part]
        if has_experts:
            name = f"model.layers.{layer}.feed_forward.expert_bias"
            yield f"blk.{layer}.exp_probs_b.bias", name, (num,)
