"""The configuration and the tensors of Granite with experts or states in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.recurrent import LINEAR_ATTENTION
from smartspec_py.faults import ConfigError

GRANITE_MOE, GRANITE_4 = "granitemoe", "granitemoehybrid"
GRANITES = ("granite", GRANITE_MOE, GRANITE_4)
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
OF_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
OF_MAMBA = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
OF_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
"""Names in a Transformers model, by those in the file. Those of the MLP of all tokens are the names
that `experts.ByExpert` gives them."""


def factors(of: Fields, config: Mapping[str, Any]) -> dict[str, float]:
    """Of embeddings, layers, attention and logits."""
    keys = {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: of.number(key, default, 1e-6, 1e6) for name, (key, default) in keys.items()}


def granite_config(of: Fields, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """config: what other models have, too. Raises ConfigError."""
    num_layers, num_heads = config["num_hidden_layers"], of.integer("attention.head_count")
    key = "attention.head_count_kv"
    if isinstance(of.get(key, num_heads), list):
        by_layer = of.numbers(key, num_layers, 0, num_heads)
    else:
        by_layer = [of.integer(key, num_heads)] * num_layers
    nums = {int(num) for num in by_layer if num}
    if len(nums) != 1 or config["hidden_size"] % num_heads or num_heads % max(nums):
        raise ConfigError(
            f"{of.file} has {num_heads} heads and {key} {sorted(nums)} beside 0, which must be one "
            "number that divides them: convert the model again"
        )
    num_experts, inner = of.integer("expert_count", 0, 0), of.integer("feed_forward_length")
    shared = of.integer("expert_shared_feed_forward_length", 0 if num_experts else inner, 0)
    if not num_experts:
        of.only("expert_shared_feed_forward_length", inner)
        of.only("expert_used_count", 0)
    width = config["hidden_size"] // num_heads
    of.only("rope.dimension_count", width)
    own = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(nums),
        "head_dim": width,
        "hidden_act": "silu",
        "intermediate_size": inner,
        "rope_theta": of.number("rope.freq_base", 10_000.0, 10.0, 1e15),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "num_local_experts": num_experts,
        **factors(of, {"head_dim": width}),
    }
    if num_experts:
        own["num_experts_per_tok"] = of.integer("expert_used_count", most=num_experts)
    if config["model_type"] == GRANITE_MOE and not shared:
        return own
    kinds = ["full_attention" if num else LINEAR_ATTENTION for num in by_layer]
    own |= {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": GRANITE_4,
        "layer_types": kinds,
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if of.flag("rope.scaling.finetuned", True) else "nope",
    }
    if LINEAR_ATTENTION in kinds:
        own |= _mamba(of, config["hidden_size"], tensors)
    else:
        of.ignore(*(f"ssm.{key}" for key in SSM))
    return own


SSM = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
"""Fields of layers with a state, which Granite 4 has also without such layers."""


def _mamba(of: Fields, hidden_size: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    inner, num_heads = of.integer("ssm.inner_size"), of.integer("ssm.time_step_rank")
    if inner % num_heads or inner % hidden_size:
        raise ConfigError(
            f"{of.file} has {num_heads} heads and an inner size of {inner} of states, which does "
            f"not divide by them and by {hidden_size}: convert the model again"
        )
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_d_state": of.integer("ssm.state_size"),
        "mamba_n_groups": of.integer("ssm.group_count"),
        "mamba_d_conv": of.integer("ssm.conv_kernel"),
        "mamba_expand": inner // hidden_size,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": False,
    }


def granite_tensors(
    config: Mapping[str, Any], num_tokens: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors: name in the file, name of the parameter and shape in the file."""
    width, kinds = config["hidden_size"], config.get("layer_types")
    yield "token_embd.weight", "model.embed_tokens.weight", (num_tokens, width)
    yield "output_norm.weight", "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (num_tokens, width)
    for layer in range(config["num_hidden_layers"]):
        is_mamba = kinds is not None and kinds[layer] == LINEAR_ATTENTION
        own = _of_mamba(config) if is_mamba else _of_attention(config)
        for part, parameter, shape in [*own, *_of_mlp(config)]:
            yield f"blk.{layer}.{part}", f"model.layers.{layer}.{parameter}", shape


Parts = Iterator[tuple[str, str, tuple[int, ...]]]


def _of_attention(config: Mapping[str, Any]) -> Parts:
    width = config["hidden_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    for part, parameter in OF_ATTENTION.items():
        num_rows = keys if part in ("attn_k", "attn_v") else width
        yield f"{part}.weight", f"{parameter}.weight", (num_rows, width)
        if config["attention_bias"]:
            yield f"{part}.bias", f"{parameter}.bias", (num_rows,)


def _of_mamba(config: Mapping[str, Any]) -> Parts:
    width, num_heads = config["hidden_size"], config["mamba_n_heads"]
    inner, num_groups = num_heads * config["mamba_d_head"], config["mamba_n_groups"]
    convolved = inner + 2 * num_groups * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "ssm_in.weight": (inner + convolved + num_heads, width),
        "ssm_conv1d.weight": (convolved, config["mamba_d_conv"]),
        "ssm_conv1d.bias": (convolved,),
        "ssm_dt.bias": (num_heads,),
        "ssm_a": (num_heads, 1),
        "ssm_d": (num_heads, 1),
        "ssm_norm.weight": (num_groups, inner // num_groups),
        "ssm_out.weight": (width, inner),
    }
    for part, parameter in OF_MAMBA.items():
        if part != "ssm_conv1d.bias" or config["mamba_conv_bias"]:
            yield part, f"mamba.{parameter}", shapes[part]


def _of_mlp(config: Mapping[str, Any]) -> Parts:
    width, inner, num = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    for part, parameter in NORMS.items():
        yield f"{part}.weight", f"{parameter}.weight", (width,)
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    for part, parameter in OF_EXPERTS.items() if num else ():
        of_expert = shapes.get(part.split("_")[1]) if part.endswith("_exps") else (width,)
        assert of_expert is not None
        yield f"{part}.weight", f"{parameter}.weight", (num, *of_expert)
    if shared := config.get("shared_intermediate_size"):
        shapes = {"gate": (shared, width), "up": (shared, width), "down": (width, shared)}
        for part, shape in shapes.items():
            name = f"ffn_{part}{'_shexp' if num else ''}.weight"
            yield name, f"shared_mlp.{part}_proj.weight", shape
