"""The places of the tensors of a GGUF file, as Transformers names them.

Every tensor is used, or the file is refused, as in `config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from smartspec_py.engines.checkpoints.gguf.config import (
    BIASES,
    FACTORS,
    GEMMA_2,
    GEMMA_3,
    GEMMAS,
    GRANITE,
    LONG_FACTORS,
    MINISTRAL,
    PHI,
    QKV,
    QWEN_MOE,
    QWEN_NETS_MOE,
    WITH_EXPERTS,
    WITH_NETS,
    Tensors,
)
from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.gemma4 import GEMMA_4, gemma_4_tensors, unused_names
from smartspec_py.engines.checkpoints.gguf.gpt_oss import GPT_OSS, gpt_oss_tensors
from smartspec_py.engines.checkpoints.gguf.granite import GRANITE_4, GRANITE_MOE, granite_tensors
from smartspec_py.engines.checkpoints.gguf.header import TensorPlace
from smartspec_py.engines.checkpoints.gguf.lfm2 import LFM2, LFM2_MOE, lfm2_tensors
from smartspec_py.engines.checkpoints.recurrent import LINEAR_ATTENTION
from smartspec_py.faults import ConfigError

PERMUTED = ("llama", GRANITE, GRANITE_MOE, GRANITE_4, MINISTRAL, "smollm3")
"""Types whose rows of queries and keys are in another order in a file, see `GgufMatrix`."""

PLAIN = ("F32", "F16", "BF16")
TYPES = (
    *PLAIN,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("MXFP4", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"),
    *("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
ZEROS = "zeros"
"""The type of a tensor that the file does not have."""

PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in a Transformers model, by those in the file."""

OUTER_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OF_EXPERTS = {
    f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
}
"""With the number of the expert. The file has the matrices of all experts in one tensor."""

GATE_UP = "ffn_gate_up_exps"
"""Of Gemma 4."""

ROUTED = {"ffn_gate_inp": "mlp.gate", **OF_EXPERTS}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
NETS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Of Qwen3.5."""

DRAFTING = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}
"""Of the layer of Qwen3.5 that drafts, see `checkpoints.mtp`."""

OTHER_PARTS = {
    **dict.fromkeys(GEMMAS, OUTER_NORMS),
    QWEN_MOE: ROUTED,
    **dict.fromkeys(WITH_NETS, NETS),
    QWEN_NETS_MOE: {
        **NETS,
        **ROUTED,
        **SHARED,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
    PHI: {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Those that differ, by type."""


def read_places(
    fields: Fields, config: Mapping[str, Any], num_tokens: int, tensors: Tensors
) -> dict[str, Any]:
    """Where each parameter is. num_heads: of a tensor whose rows are permuted within each head.
    added: what the file's numbers have more than the parameter's. is_rate: the file's numbers are
    the exponentials of the parameter's, negative. If no layer has a bias of a part,
    it has none: the bias is 0.

    Raises ConfigError for tensors that are missing, left over, or of another type or shape.
    """
    model_type = config["model_type"]
    num_heads = {}
    if model_type in PERMUTED:
        num_heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
    parts_with_bias = {name.split(".")[-2] for name in tensors if name.endswith(".bias")}
    left, places = dict(tensors), dict[str, Any]()
    if model_type == GEMMA_4:
        wanted = [*gemma_4_tensors(config, num_tokens)]
    elif model_type in (LFM2, LFM2_MOE):
        wanted = [*lfm2_tensors(config, num_tokens)]
    elif model_type in (GRANITE_MOE, GRANITE_4):
        wanted = [*granite_tensors(config, num_tokens)]
    elif model_type == GPT_OSS:
        wanted = [*gpt_oss_tensors(config, num_tokens)]
    else:
        wanted = [*_wanted(config, num_tokens), *_wanted_of_nets(config)]
    for name, parameter, shape in wanted:
        *_, part, kind = name.split(".")
        tensor = left.pop(name, None)
        if tensor is not None:
            # Some converters write this matrix of one row as a vector.
            is_vector = part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1
            _check_tensor(fields, name, tensor, shape[1:] if is_vector else shape)
            if part in (*OF_EXPERTS, GATE_UP) and kind == "weight":
                places |= _by_expert(parameter, tensor, 1 + (part == GATE_UP))
                continue
            places[parameter] = asdict(tensor)
            if part in num_heads:
                places[parameter]["num_heads"] = num_heads[part]
            if model_type in (*GEMMAS, *WITH_NETS) and part.endswith("norm") and part != "ssm_norm":
                places[parameter]["added"] = 1.0
            if kind == "ssm_a":
                places[parameter]["is_rate"] = True
            places[parameter]["shape"] = shape
            if part in ("ssm_conv1d", "conv") and kind == "weight":
                places[parameter]["shape"] = [shape[0], 1, shape[1]]
            if "ssm_norm" in name or kind in ("ssm_a", "ssm_d"):  # Mamba 2 has a second dimension
                places[parameter]["shape"] = [math.prod(shape)]
        elif kind == "bias" and part not in parts_with_bias:
            places[parameter] = {"type": ZEROS, "shape": shape}
        else:
            raise ConfigError(
                f"{fields.file} has no tensor {name}: convert or copy the model again"
            )
    known = {"llama": (FACTORS,), PHI: LONG_FACTORS.values(), GEMMA_4: (FACTORS,)}
    for used in known.get(model_type, ()):
        left.pop(used, None)
    if model_type == GEMMA_4:
        for used in unused_names(config):
            left.pop(used, None)
    if model_type in WITH_NETS:
        left = {name: left[name] for name in left if not _is_behind(name, config)}
    if left:
        raise ConfigError(
            f"{fields.file} has the tensor {min(left)}, which a {model_type} model with "
            f"{config['num_hidden_layers']} layers has not: use another model"
        )
    return places


def _is_behind(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the tensor is of a layer behind the model's, which drafts and is not read."""
    parts = name.split(".")
    return (
        parts[0] == "blk" and parts[1].isdecimal() and int(parts[1]) >= config["num_hidden_layers"]
    )


def _by_expert(parameter: str, tensor: TensorPlace, num_each: int) -> dict[str, Any]:
    """The places of the experts' matrices. num_each: of each expert in this tensor, one, or the
    gate and up behind it."""
    num, num_rows, width = tensor.shape
    num_bytes = tensor.num_bytes // (num * num_each)
    names = [parameter, parameter.replace(".gate_proj.", ".up_proj.")][:num_each]
    shape = num_rows // num_each, width
    return {
        name.format(expert): asdict(tensor)
        | {
            "shape": shape,
            "offset": tensor.offset + (expert * num_each + i) * num_bytes,
            "num_bytes": num_bytes,
        }
        for expert in range(num)
        for i, name in enumerate(names)
    }


def _wanted(
    config: Mapping[str, Any], num_tokens: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors of a Transformers model: name in the file, name of the parameter and shape."""
    biases = {part for setting, parts in BIASES.items() if config.get(setting) for part in parts}
    if config["model_type"] == "qwen2":
        biases |= set(QKV)
    for part, parameter in PARTS.items():
        if part != "output" or not config["tie_word_embeddings"]:
            num_rows = () if part == "output_norm" else (num_tokens,)
            yield f"{part}.weight", f"{parameter}.weight", (*num_rows, config["hidden_size"])
    names = LAYER_PARTS | OTHER_PARTS.get(config["model_type"], {})
    for layer in range(config["num_hidden_layers"]):
        for part, shape in _shapes(config, layer).items():
            name, parameter = f"blk.{layer}.{part}", f"model.layers.{layer}.{names[part]}"
            yield f"{name}.weight", f"{parameter}.weight", shape
            if part in biases:
                yield f"{name}.bias", f"{parameter}.bias", shape[:1]
    if config.get("mtp_num_hidden_layers"):
        width, last = config["hidden_size"], f"blk.{config['num_hidden_layers']}"
        for part, shape in _shapes(config, None).items():
            yield f"{last}.{part}.weight", f"mtp.layers.0.{names[part]}.weight", shape
        for part, parameter in DRAFTING.items():
            shape = (width, 2 * width) if part == "eh_proj" else (width,)
            yield f"{last}.nextn.{part}.weight", f"mtp.{parameter}.weight", shape


def _wanted_of_nets(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The same of the vectors of gated delta nets."""
    for layer, kind in enumerate(config.get("layer_types") or ()):
        if kind == LINEAR_ATTENTION:
            parameter, shape = f"model.layers.{layer}.linear_attn", (_heads_of_values(config),)
            yield f"blk.{layer}.ssm_a", f"{parameter}.A_log", shape
            yield f"blk.{layer}.ssm_dt.bias", f"{parameter}.dt_bias", shape


def _heads_of_values(config: Mapping[str, Any]) -> int:
    return int(config["linear_num_value_heads"])


def _shapes(config: Mapping[str, Any], layer: int | None) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer, by their names in the file. None: the layer that drafts."""
    width, inner = config["hidden_size"], config.get("intermediate_size", 0)
    head_dim = config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    head_norms = {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    outer_norms = {"post_attention_norm": (width,), "post_ffw_norm": (width,)}
    norms = {
        **dict.fromkeys(("qwen3", QWEN_MOE), head_norms),
        GEMMA_2: outer_norms,
        GEMMA_3: head_norms | outer_norms,
    }
    projections = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
    }
    mlp: dict[str, tuple[int, ...]] = {
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    if config["model_type"] == PHI:
        projections = {"attn_qkv": (queries + 2 * keys, width)}
        mlp = {"ffn_up": (2 * inner, width), "ffn_down": (width, inner)}
    if config["model_type"] in WITH_EXPERTS:
        num, inner = config["num_experts"], config["moe_intermediate_size"]
        mlp = {
            "ffn_gate_inp": (num, width),
            "ffn_gate_exps": (num, inner, width),
            "ffn_up_exps": (num, inner, width),
            "ffn_down_exps": (num, width, inner),
        }
    if config["model_type"] == QWEN_NETS_MOE:
        shared = config["shared_expert_intermediate_size"]
        mlp |= {
            "ffn_gate_inp_shexp": (1, width),
            "ffn_gate_shexp": (shared, width),
            "ffn_up_shexp": (shared, width),
            "ffn_down_shexp": (width, shared),
        }
    if config["model_type"] in WITH_NETS:
        outer = {"attn_norm": (width,), "post_attention_norm": (width,), **mlp}
        if layer is not None and config["layer_types"][layer] == LINEAR_ATTENTION:
            return outer | _shapes_of_net(config)
        projections["attn_q"] = (2 * queries, width)
        return outer | projections | {"attn_output": (width, queries), **head_norms}
    return {
        "attn_norm": (width,),
        **projections,
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        **mlp,
        **norms.get(config["model_type"], {}),
    }


def _shapes_of_net(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, num_values = config["hidden_size"], _heads_of_values(config)
    values = num_values * config["linear_value_head_dim"]
    convolved = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "attn_qkv": (convolved, width),
        "attn_gate": (values, width),
        "ssm_alpha": (num_values, width),
        "ssm_beta": (num_values, width),
        "ssm_conv1d": (convolved, config["linear_conv_kernel_dim"]),
        "ssm_norm": (config["linear_value_head_dim"],),
        "ssm_out": (width, values),
    }


def _check_tensor(fields: Fields, name: str, tensor: TensorPlace, shape: tuple[int, ...]) -> None:
    types = TYPES if len(shape) > 1 else PLAIN
    if tensor.type not in types:
        raise ConfigError(
            f"{fields.file} has tensors of the type {tensor.type}, such as {name}, which cannot be "
            f"read: use one of {', '.join(types)}"
        )
    if tensor.shape != shape:
        raise ConfigError(
            f"{fields.file} has the tensor {name} of the shape {tensor.shape}, but its fields say "
            f"{shape}: convert or copy the model again"
        )
