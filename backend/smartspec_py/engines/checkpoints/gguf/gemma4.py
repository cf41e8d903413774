"""The configuration and the tensors of Gemma 4 in a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.header import TensorPlace
from smartspec_py.faults import ConfigError

GEMMA_4 = "gemma4_text"
SLIDING, FULL = "sliding_attention", "full_attention"
NOT_ROTATED = 1e30
"""Divisor of a rotary frequency that stands for none."""

WHOLE = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_up_exps.weight": "experts.{}.gate_proj.weight",
    "ffn_down_exps.weight": "experts.{}.down_proj.weight",
}
"""Names in a Transformers model, by those in the file. Those of experts have a place for their
number, and gate and up are one tensor in the file."""

OF_KEYS = ("attn_k", "attn_v", "attn_k_norm")
"""Layers that use the keys of others may have these, too."""

Wanted = Iterator[tuple[str, str, tuple[int, ...]]]


def gemma_4_config(
    of: Fields,
    num_layers: int,
    tensors: Mapping[str, TensorPlace],
    divisors: Callable[[int], list[float]],
) -> dict[str, Any]:
    """divisors: reads so many divisors of the rotary frequencies. Raises ConfigError."""
    is_sliding = of.get("attention.sliding_window_pattern")
    if not isinstance(is_sliding, list) or len(is_sliding) != num_layers or is_sliding[-1]:
        raise ConfigError(
            f"{of.file} has no attention.sliding_window_pattern with {num_layers} flags, of which "
            "the last is false: convert the model again"
        )
    num_shared = of.integer("attention.shared_kv_layers", 0, 0, num_layers - 1)
    head_dim = of.integer("attention.key_length_swa")
    wide = of.integer("attention.key_length")
    for suffix, width in (("", wide), ("_swa", head_dim)):
        of.only(f"attention.value_length{suffix}", width)
        of.only(f"rope.dimension_count{suffix}", width)
    keys, wide_keys = _num_keys(of, is_sliding)
    width = of.integer("embedding_length_per_layer_input", 0, 0)
    inner, inner_of_last = _inner(of, num_layers, num_shared)
    num_rotated = sum(one < NOT_ROTATED for one in divisors(wide // 2))
    last_full = max(i for i in range(num_layers - num_shared) if not is_sliding[i])
    return {
        "num_attention_heads": of.integer("attention.head_count"),
        "num_key_value_heads": keys,
        "num_global_key_value_heads": wide_keys,
        "head_dim": head_dim,
        "global_head_dim": wide,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if flag else FULL for flag in is_sliding],
        "sliding_window": of.integer("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": f"blk.{last_full}.attn_v.weight" not in tensors,
        "intermediate_size": inner,
        "use_double_wide_mlp": inner_of_last != inner,
        "hidden_size_per_layer_input": width,
        "final_logit_softcapping": of.number("final_logit_softcapping", 0.0, 0.0, 1e6) or None,
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": of.number("rope.freq_base_swa", 10_000.0, 10.0, 1e15),
            },
            FULL: {
                "rope_type": "proportional",
                "rope_theta": of.number("rope.freq_base", 1e6, 10.0, 1e15),
                "partial_rotary_factor": 2 * num_rotated / wide,
            },
        },
        **_experts(of),
    }


def _num_keys(of: Fields, is_sliding: list[bool]) -> tuple[int, int]:
    """Heads of keys of layers with a window, and of those without one."""
    key = "attention.head_count_kv"
    if not isinstance(of.get(key), list):
        return (of.integer(key),) * 2
    by_layer = of.numbers(key, len(is_sliding), 1)
    nums = [
        {num for num, flag in zip(by_layer, is_sliding, strict=True) if flag == kind}
        for kind in (True, False)
    ]
    if any(len(found) > 1 for found in nums):
        raise ConfigError(
            f"{of.file} has {key} with other numbers in layers of one kind, which cannot be read: "
            "use another model"
        )
    wide = min(nums[1])
    return min(nums[0], default=wide), wide


def _inner(of: Fields, num_layers: int, num_shared: int) -> tuple[int, int]:
    """Width of the MLP in the first layer and in the last one."""
    key = "feed_forward_length"
    if not isinstance(of.get(key), list):
        return (of.integer(key),) * 2
    widths = of.numbers(key, num_layers, 1)
    first, last = int(widths[0]), int(widths[-1])
    if widths != [first] * (num_layers - num_shared) + [last] * num_shared or last not in (
        first,
        2 * first,
    ):
        raise ConfigError(
            f"{of.file} has {key} with other widths than twice the first in its {num_shared} "
            "layers without own keys, which cannot be read: use another model"
        )
    return first, last


def _experts(of: Fields) -> dict[str, Any]:
    num = of.integer("expert_count", 0, 0)
    if not num:
        of.only("expert_used_count", 0)
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": num,
        "top_k_experts": of.integer("expert_used_count", most=num),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
    }


def gemma_4_tensors(config: Mapping[str, Any], num_tokens: int) -> Wanted:
    """The tensors: name in the file, name of the parameter and shape."""
    width, by_layer = config["hidden_size"], config["hidden_size_per_layer_input"]
    of_layers = config["num_hidden_layers"] * by_layer
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (num_tokens, width),
        "output_norm": (width,),
    }
    if by_layer:
        shapes |= {
            "per_layer_token_embd": (num_tokens, of_layers),
            "per_layer_model_proj": (of_layers, width),
            "per_layer_proj_norm": (by_layer,),
        }
    for part, shape in shapes.items():
        yield f"{part}.weight", f"model.{WHOLE[part]}.weight", shape
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (num_tokens, width)
    for layer in range(config["num_hidden_layers"]):
        for part, shape in _shapes(config, layer).items():
            name = part if "." in part else f"{part}.weight"
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{OF_LAYER[name]}", shape


def unused_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Of tensors in the file that no layer uses."""
    num = config["num_hidden_layers"]
    for layer in range(num - config["num_kv_shared_layers"], num):
        yield from (f"blk.{layer}.{part}.weight" for part in OF_KEYS)


def _shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer, by their names in the file."""
    width, is_full = config["hidden_size"], config["layer_types"][layer] == FULL
    is_shared = layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    head_dim = config["global_head_dim" if is_full else "head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_global_key_value_heads" if is_full else "num_key_value_heads"] * head_dim
    inner = config["intermediate_size"]
    if is_shared and config["use_double_wide_mlp"]:
        inner *= 2
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, width),
        "attn_q_norm": (head_dim,),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
        "layer_output_scale": (1,),
    }
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    if not is_shared:
        shapes |= {"attn_k": (keys, width), "attn_k_norm": (head_dim,)}
        if not (is_full and config["attention_k_eq_v"]):
            shapes["attn_v"] = (keys, width)
    if by_layer := config["hidden_size_per_layer_input"]:
        shapes |= {"inp_gate": (by_layer, width), "proj": (width, by_layer)}
        norms.append("post_norm")
    if num := config.get("num_experts"):
        inner = config["moe_intermediate_size"]
        norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"]
        shapes |= {
            "ffn_gate_inp": (num, width),
            "ffn_gate_inp.scale": (width,),
            "ffn_down_exps.scale": (num,),
            "ffn_gate_up_exps": (num, 2 * inner, width),
            "ffn_down_exps": (num, width, inner),
        }
    return shapes | dict.fromkeys(norms, (width,))
