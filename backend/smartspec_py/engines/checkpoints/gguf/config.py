"""The configuration and the places of the tensors of a GGUF file, as Transformers names them.

Every key of the architecture and every tensor is used, or the file is refused: what is left out
would change texts without a message. Keys that the file does not have get the defaults of
llama.cpp (src/llama-model.cpp).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.header import TensorPlace
from smartspec_py.faults import ConfigError, cut

GEMMA_2, GEMMA_3 = "gemma2", "gemma3_text"
GRANITE, MINISTRAL, PHI = "granite", "ministral3", "phi3"
GEMMAS = (GEMMA_2, GEMMA_3)
MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": (GEMMA_2, "Gemma2ForCausalLM"),
    "gemma3": (GEMMA_3, "Gemma3ForCausalLM"),
    "granite": (GRANITE, "GraniteForCausalLM"),
    "mistral3": (MINISTRAL, "Ministral3ForCausalLM"),
    "phi3": (PHI, "Phi3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
}
"""The `model_type` and the class by `general.architecture`."""

PERMUTED = ("llama", GRANITE, MINISTRAL, "smollm3")
"""Types whose rows of queries and keys are in another order in a file, see `GgufMatrix`."""

PLAIN = ("F32", "F16", "BF16")
TYPES = (
    *PLAIN,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
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
OTHER_PARTS = {
    **dict.fromkeys(GEMMAS, OUTER_NORMS),
    PHI: {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Those that differ, by type."""

QKV = ("attn_q", "attn_k", "attn_v")
BIASES = {
    "attention_bias": (*QKV, "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Parts that may have biases, by the setting that gives a Transformers model all of them."""

BIAS_SETTINGS = {
    "llama": tuple(BIASES),
    GRANITE: tuple(BIASES),
    "smollm3": tuple(BIASES),
    "qwen3": ("attention_bias",),
}
"""Those of each type. qwen2 always has biases of QKV."""

FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later have."""

LONG_FACTORS = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
"""Those of Phi 3 for long and short contexts."""

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary settings of these models. A file has only the divisors that follow from them."""

SSM = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
"""Fields of layers with a state, which Granite 4 has also without such layers."""

GEMMA_LARGEST = {GEMMA_2: 46, GEMMA_3: 62}
"""Layers of the largest of each, whose attention is scaled in another way."""

Tensors = Mapping[str, TensorPlace]


def read_config(fields: Fields, architecture: str, tensors: Tensors) -> dict[str, Any]:
    """The content of config.json, without tokens. Raises ConfigError."""
    of = Fields(fields.file, fields.values, f"{architecture}.")
    kinds = {tensor.type for tensor in tensors.values() if len(tensor.shape) > 1}
    model_type, model_class = MODELS[architecture]
    config = {
        "architectures": [model_class],
        "model_type": model_type,
        "dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(kinds), "float32"),
        "max_position_embeddings": of.integer("context_length"),
        "hidden_size": of.integer("embedding_length"),
        "intermediate_size": of.integer("feed_forward_length"),
        "num_hidden_layers": of.integer("block_count", most=len(tensors)),
        **_heads(of),
        "hidden_act": "silu",
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0),
        "rope_theta": of.number("rope.freq_base", 10_000.0, 10.0, 1e15),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for setting in BIAS_SETTINGS.get(model_type, ()):
        ends = tuple(f".{part}.bias" for part in BIASES[setting])
        config[setting] = any(name.endswith(ends) for name in tensors)
    if model_type == PHI:
        config |= _phi(of, config, tensors)
    else:
        config["rope_scaling"] = _rope_scaling(of, config)
    if model_type == MINISTRAL:
        config["rope_scaling"] = _ministral(of, config)
    if FACTORS in tensors and model_type == "llama":
        if config["rope_scaling"]:
            raise ConfigError(f"{of.file} has {FACTORS} and rotary scaling, which cannot be read")
        config["rope_scaling"] = _llama3(of, tensors[FACTORS], config)
    if model_type in GEMMAS:
        config |= _gemma(of, config)
    if model_type == GEMMA_2:
        config |= _gemma_2(of)
    if model_type == GEMMA_3:
        config |= _gemma_3(of)
    if model_type == GRANITE:
        config |= _granite(of, config)
    _check_keys(of, config)
    return config


def _heads(of: Fields) -> dict[str, int]:
    num_heads = of.integer("attention.head_count")
    num_kv_heads = _num_kv_heads(of, num_heads)
    hidden_size = of.integer("embedding_length")
    head_dim = of.integer("attention.key_length", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"{of.file} has {num_heads} heads of {head_dim} and {num_kv_heads} of keys, which does "
            "not divide: convert or copy the model again"
        )
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _num_kv_heads(of: Fields, num_heads: int) -> int:
    """Granite 4 has the number of each layer. All must be the same."""
    key = "attention.head_count_kv"
    by_layer = of.get(key, num_heads)
    if not isinstance(by_layer, list) or not by_layer:
        return of.integer(key, num_heads)
    if len(set(map(str, by_layer))) > 1:
        raise ConfigError(
            f"{of.file} has other numbers of key heads in some layers, which cannot be read: use "
            "another model"
        )
    return int(of.numbers(key, len(by_layer), 1, num_heads)[0])


def _granite(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of Granite."""
    of.only("rope.scaling.finetuned", True)
    of.only("expert_shared_feed_forward_length", config["intermediate_size"])
    of.ignore(*(f"ssm.{key}" for key in SSM))
    factors = {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: of.number(key, default, 1e-6, 1e6) for name, (key, default) in factors.items()}


def _gemma(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have. Without a window, all layers see all tokens."""
    is_2, num_layers = config["model_type"] == GEMMA_2, config["num_hidden_layers"]
    window = of.integer("attention.sliding_window", 4096 if is_2 else 0, 0)
    every = of.integer("attention.sliding_window_pattern", 2 if is_2 else 6) if window else 1
    head_dim = config["head_dim"]
    if num_layers == GEMMA_LARGEST[config["model_type"]]:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if number % every else "full_attention"
            for number in range(1, num_layers + 1)
        ],
    }


def _gemma_2(of: Fields) -> dict[str, Any]:
    """The limits of scores and logits."""
    limits = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {name: of.number(name, default, 1e-3, 1e6) for name, default in limits.items()}


def _gemma_3(of: Fields) -> dict[str, Any]:
    """The rotation of the layers with a window."""
    of.only("final_logit_softcapping", 0.0)
    return {"rope_local_base_freq": of.number("rope.freq_base_swa", 10_000.0, 10.0, 1e15)}


def _ministral(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of Ministral 3, by which its queries grow with the position."""
    rope = config["rope_scaling"] or {"rope_type": "default"}
    if rope["rope_type"] == "yarn":
        of.number("rope.scaling.yarn_log_multiplier", None, 1.0, 1.0)  # else it would not be 1
        rope["attention_factor"] = 1.0
    return {
        "original_max_position_embeddings": config["max_position_embeddings"],
        "llama_4_scaling_beta": of.number("attention.temperature_scale", 0.0, 0.0, 100.0),
        **rope,
    }


def _phi(of: Fields, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """What only Phi 3 and Phi 4 have: rotation of a part of a head, and its divisors."""
    head_dim, most_len = config["head_dim"], config["max_position_embeddings"]
    num_rotated = of.integer("rope.dimension_count", head_dim, 2, head_dim)
    key = "rope.scaling.original_context_length"
    settings = {
        "original_max_position_embeddings": of.integer(key, most_len),
        "partial_rotary_factor": num_rotated / head_dim,
        "sliding_window": of.integer("attention.sliding_window", 0, 0) or None,
    }
    of.only("rope.scaling.type", "none", "longrope")
    attention_factor = of.number("rope.scaling.attn_factor", 1.0, 0.01, 100.0)
    if set(LONG_FACTORS.values()) <= tensors.keys():
        settings["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": attention_factor,
            **{
                factor: _numbers(of, name, tensors[name], num_rotated // 2)
                for factor, name in LONG_FACTORS.items()
            },
        }
    return settings


def _check_keys(of: Fields, config: Mapping[str, Any]) -> None:
    """Refuse keys that are not used, and values that change what a layer computes."""
    head_dim = config["head_dim"]
    if config["model_type"] != PHI:
        of.only("rope.dimension_count", head_dim)
        of.only("rope.scaling.attn_factor", 1.0)
    if config["model_type"] not in (*GEMMAS, PHI):
        of.only("attention.sliding_window", 0)
    of.only("attention.value_length", head_dim)
    of.only("attention.causal", True)
    of.only("expert_count", 0)
    of.only("expert_used_count", 0)
    of.only("pooling_type", 0)
    of.only("rope.scaling.yarn_ext_factor", 1.0)
    # The number of tokens is that of the tokenizer; the others describe how the file was made.
    of.ignore("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
    if unused := of.unused():
        raise ConfigError(
            f"{of.file} has the field {unused[0]}, which cannot be read: use another model, or "
            "remove it if it has no effect"
        )


def _rope_scaling(of: Fields, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Without a type, a factor is linear. scale_linear is an old name of it, and 0 means 1."""
    kind = of.text("rope.scaling.type", "linear")
    old = of.number("rope.scale_linear", 0.0, 0.0, 1e6)
    factor = of.number("rope.scaling.factor", old, 0.0, 1e6)
    yarn = {
        "original_max_position_embeddings": of.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "beta_fast": of.number("rope.scaling.yarn_beta_fast", 32.0, 0.01, 1000.0),
        "beta_slow": of.number("rope.scaling.yarn_beta_slow", 1.0, 0.01, 1000.0),
    }
    if kind not in ("none", "linear", "yarn") or 0 < factor < 1:
        raise ConfigError(
            f"{of.file} has rotary embeddings of the type {cut(kind)} and the factor {factor}, "
            "which cannot be read: use a model with linear or yarn and a factor of at least 1"
        )
    if kind == "none" or factor in (0.0, 1.0):
        return None
    return {"rope_type": kind, "factor": factor, **(yarn if kind == "yarn" else {})}


def _llama3(of: Fields, place: TensorPlace, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings that give these divisors. Raises ConfigError if no known ones do."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    divisors = _numbers(of, FACTORS, place, head_dim // 2)
    factor = max(divisors)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    for index, divisor in enumerate(divisors):
        wave_len = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = LLAMA3["original_max_position_embeddings"] / wave_len
        smooth = min(max((turns - low) / (high - low), 0), 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if factor < 1 or not math.isclose(divisor, wanted, rel_tol=1e-4):
            raise ConfigError(
                f"{of.file} has a {FACTORS} that is not that of Llama 3: divisor {index} is "
                f"{divisor:g}, and a factor of {factor:g} gives {wanted:g}: get another file"
            )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _numbers(of: Fields, name: str, place: TensorPlace, num: int) -> list[float]:
    """The numbers of a short tensor. Raises ConfigError for another type or length."""
    if place.type != "F32" or place.shape != (num,):
        raise ConfigError(
            f"{of.file} has a {name} of the type {place.type} and the shape {place.shape}, which "
            f"must be F32 and ({num},): get another file of this model"
        )
    with Path(place.file).open("rb") as opened:
        opened.seek(place.offset)
        return list(struct.unpack(f"<{num}f", opened.read(place.num_bytes)))


def read_places(
    fields: Fields, config: Mapping[str, Any], num_tokens: int, tensors: Tensors
) -> dict[str, Any]:
    """Where each parameter is. num_heads: of a tensor whose rows are permuted within each head.
    added: what the file's numbers have more than the parameter's. If no layer has a bias of a part,
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
    for name, parameter, shape in _wanted(config, num_tokens):
        *_, part, kind = name.split(".")
        tensor = left.pop(name, None)
        if tensor is not None:
            _check_tensor(fields, name, tensor, shape)
            places[parameter] = asdict(tensor)
            if part in num_heads:
                places[parameter]["num_heads"] = num_heads[part]
            if model_type in GEMMAS and part.endswith("norm"):
                places[parameter]["added"] = 1.0
        elif kind == "bias" and part not in parts_with_bias:
            places[parameter] = {"type": ZEROS, "shape": shape}
        else:
            raise ConfigError(
                f"{fields.file} has no tensor {name}: convert or copy the model again"
            )
    for used in {"llama": (FACTORS,), PHI: LONG_FACTORS.values()}.get(model_type, ()):
        left.pop(used, None)
    if left:
        raise ConfigError(
            f"{fields.file} has the tensor {min(left)}, which a {model_type} model with "
            f"{config['num_hidden_layers']} layers has not: use another model"
        )
    return places


def _wanted(
    config: Mapping[str, Any], num_tokens: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors of a Transformers model: name in the file, name of the parameter and shape."""
    shapes = _shapes(config)
    biases = {part for setting, parts in BIASES.items() if config.get(setting) for part in parts}
    if config["model_type"] == "qwen2":
        biases |= set(QKV)
    for part, parameter in PARTS.items():
        if part != "output" or not config["tie_word_embeddings"]:
            num_rows = () if part == "output_norm" else (num_tokens,)
            yield f"{part}.weight", f"{parameter}.weight", (*num_rows, config["hidden_size"])
    names = LAYER_PARTS | OTHER_PARTS.get(config["model_type"], {})
    for layer in range(config["num_hidden_layers"]):
        for part, shape in shapes.items():
            name, parameter = f"blk.{layer}.{part}", f"model.layers.{layer}.{names[part]}"
            yield f"{name}.weight", f"{parameter}.weight", shape
            if part in biases:
                yield f"{name}.bias", f"{parameter}.bias", shape[:1]


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer, by their names in the file."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    head_norms = {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    outer_norms = {"post_attention_norm": (width,), "post_ffw_norm": (width,)}
    norms = {"qwen3": head_norms, GEMMA_2: outer_norms, GEMMA_3: head_norms | outer_norms}
    projections = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
    }
    if config["model_type"] == PHI:
        projections = {"attn_qkv": (queries + 2 * keys, width), "ffn_up": (2 * inner, width)}
    return {
        "attn_norm": (width,),
        **projections,
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_down": (width, inner),
        **norms.get(config["model_type"], {}),
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
