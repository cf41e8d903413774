"""The configuration and the tensors of gpt-oss in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields

GPT_OSS = "gpt_oss"
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
PRODUCTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}
"""Names in a Transformers model, by those in the file. Products have biases, norms have none."""

OF_EXPERTS = ("gate", "up", "down")
"""Matrices of each expert, which have biases too."""


def gpt_oss_config(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """config: what other models have, too. Raises ConfigError."""
    of.only("rope.dimension_count", of.integer("attention.key_length"))
    of.only("attention.value_length", of.integer("attention.key_length"))
    of.ignore("feed_forward_length")  # that of the experts
    num_experts, num_layers = of.integer("expert_count"), config["num_hidden_layers"]
    every = of.integer("attention.sliding_window_pattern", 2)
    return {
        "intermediate_size": of.integer("expert_feed_forward_length"),
        "rope_theta": of.number("rope.freq_base", 10_000.0, 10.0, 1e15),
        "num_local_experts": num_experts,
        "num_experts_per_tok": of.integer("expert_used_count", most=num_experts),
        "sliding_window": of.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if number % every else "full_attention"
            for number in range(1, num_layers + 1)
        ],
    }


def gpt_oss_tensors(
    config: Mapping[str, Any], num_tokens: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors: name in the file, name of the parameter and shape."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    num, num_heads = config["num_local_experts"], config["num_attention_heads"]
    queries = num_heads * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_gate_inp": (num, width),
        "gate": (num, inner, width),
        "up": (num, inner, width),
        "down": (num, width, inner),
    }
    yield "token_embd.weight", "model.embed_tokens.weight", (num_tokens, width)
    yield "output_norm.weight", "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (num_tokens, width)
    for layer in range(config["num_hidden_layers"]):
        name, parameter = f"blk.{layer}", f"model.layers.{layer}"
        for norm, ours in NORMS.items():
            yield f"{name}.{norm}.weight", f"{parameter}.{ours}.weight", (width,)
        yield f"{name}.attn_sinks.weight", f"{parameter}.self_attn.sinks", (num_heads,)
        for product, ours in PRODUCTS.items():
            yield f"{name}.{product}.weight", f"{parameter}.{ours}.weight", shapes[product]
            yield f"{name}.{product}.bias", f"{parameter}.{ours}.bias", shapes[product][:1]
        for part in OF_EXPERTS:
            experts, shape = f"{parameter}.mlp.experts", shapes[part]
            weight, bias = f"{experts}.{{}}.{part}_proj.weight", f"{experts}.{part}_proj.bias"
            yield f"{name}.ffn_{part}_exps.weight", weight, shape
            yield f"{name}.ffn_{part}_exps.bias", bias, shape[:2]
