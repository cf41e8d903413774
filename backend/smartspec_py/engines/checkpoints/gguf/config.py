"""The configuration of a GGUF file, as Transformers names it.

Every key of the architecture is used, or the file is refused: what is left out would change texts
without a message. Keys that the file does not have get the defaults of llama.cpp
(src/llama-model.cpp).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.gemma4 import GEMMA_4, gemma_4_config
from smartspec_py.engines.checkpoints.gguf.gpt_oss import GPT_OSS, gpt_oss_config
from smartspec_py.engines.checkpoints.gguf.granite import (
    GRANITE_4,
    GRANITE_MOE,
    SSM,
    factors,
    granite_config,
)
from smartspec_py.engines.checkpoints.gguf.header import TensorPlace
from smartspec_py.engines.checkpoints.gguf.lfm2 import LFM2, LFM2_MOE, lfm2_config
from smartspec_py.engines.checkpoints.recurrent import LINEAR_ATTENTION
from smartspec_py.faults import ConfigError, cut

GEMMA_2, GEMMA_3 = "gemma2", "gemma3_text"
GRANITE, MINISTRAL, PHI = "granite", "ministral3", "phi3"
QWEN_MOE = "qwen3_moe"
QWEN_NETS, QWEN_NETS_MOE = "qwen3_5_text", "qwen3_5_moe_text"
WITH_NETS = (QWEN_NETS, QWEN_NETS_MOE)
WITH_EXPERTS = (QWEN_MOE, QWEN_NETS_MOE)
GEMMAS = (GEMMA_2, GEMMA_3)
MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": (QWEN_MOE, "Qwen3MoeForCausalLM"),
    "qwen35": (QWEN_NETS, "Qwen3_5ForCausalLM"),
    "qwen35moe": (QWEN_NETS_MOE, "Qwen3_5MoeForCausalLM"),
    "gemma2": (GEMMA_2, "Gemma2ForCausalLM"),
    "gemma3": (GEMMA_3, "Gemma3ForCausalLM"),
    "gemma4": (GEMMA_4, "Gemma4ForCausalLM"),
    "gpt-oss": (GPT_OSS, "GptOssForCausalLM"),
    "granite": (GRANITE, "GraniteForCausalLM"),
    "granitehybrid": (GRANITE_4, "GraniteMoeHybridForCausalLM"),
    "granitemoe": (GRANITE_MOE, "GraniteMoeForCausalLM"),
    "lfm2": (LFM2, "Lfm2ForCausalLM"),
    "lfm2moe": (LFM2_MOE, "Lfm2MoeForCausalLM"),
    "mistral3": (MINISTRAL, "Ministral3ForCausalLM"),
    "phi3": (PHI, "Phi3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
}
"""The `model_type` and the class by `general.architecture`."""

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

GEMMA_LARGEST = {GEMMA_2: 46, GEMMA_3: 62}
"""Layers of the largest of each, whose attention is scaled in another way."""

NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
"""Tensors of a layer that drafts, beside those of other layers."""

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
        "num_hidden_layers": _num_layers(of, len(tensors)),
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    own = {LFM2: lfm2_config, LFM2_MOE: lfm2_config, GPT_OSS: _gpt_oss}
    with_tensors = {
        GEMMA_4: _gemma_4,
        **dict.fromkeys((GRANITE_MOE, GRANITE_4), _granite_moe),
    }
    if model_type in with_tensors or model_type in own:
        if model_type in own:
            config |= own[model_type](of, config)
        else:
            config |= with_tensors[model_type](of, config, tensors)
        _check_unused(of)
        return config
    config |= _heads(of) | {
        "hidden_act": "silu",
        "rope_theta": of.number("rope.freq_base", 10_000.0, 10.0, 1e15),
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
    if model_type in WITH_EXPERTS:
        config |= _experts(of, model_type)
    else:
        config["intermediate_size"] = of.integer("feed_forward_length")
    if model_type == GRANITE:
        config |= _granite(of, config)
    if model_type in WITH_NETS:
        config |= _nets(of, config) | _mtp(config, tensors)
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


def _granite(of: Fields, config: Mapping[str, Any]) -> dict[str, float]:
    of.only("rope.scaling.finetuned", True)
    of.only("expert_shared_feed_forward_length", config["intermediate_size"])
    of.ignore(*(f"ssm.{key}" for key in SSM))
    return factors(of, config)


def _granite_moe(of: Fields, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = granite_config(of, config, tensors)
    return found | {"rope_scaling": _rope_scaling(of, config)}


def _num_layers(of: Fields, num_tensors: int) -> int:
    """Without the last ones of Qwen3.5, which draft."""
    num_drafting = of.integer("nextn_predict_layers", 0, 0, num_tensors)
    return of.integer("block_count", least=num_drafting + 1, most=num_tensors) - num_drafting


def _nets(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of gated delta nets. If keys have fewer heads than values, a file has the heads
    of values in another order: those of the first of each key come first."""
    num_layers, width = config["num_hidden_layers"], of.integer("ssm.state_size")
    num_keys, num_values = of.integer("ssm.group_count"), of.integer("ssm.time_step_rank")
    of.only("ssm.inner_size", num_values * width)
    every = of.integer("full_attention_interval", 4)
    default = [bool(number % every) for number in range(1, num_layers + 1)]
    are_nets = of.get("attention.recurrent_layers", default)
    if not isinstance(are_nets, list) or len(are_nets) < num_layers:
        raise ConfigError(
            f"{of.file} has no attention.recurrent_layers with {num_layers} flags: convert the "
            "model again"
        )
    of.ignore("rope.dimension_sections")  # for images
    num_rotated = of.integer("rope.dimension_count", most=config["head_dim"])
    return {
        "layer_types": [
            LINEAR_ATTENTION if is_net else "full_attention" for is_net in are_nets[:num_layers]
        ],
        "linear_conv_kernel_dim": of.integer("ssm.conv_kernel"),
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_heads_are_tiled": num_keys < num_values,
        "partial_rotary_factor": num_rotated / config["head_dim"],
    }


def _mtp(config: Mapping[str, Any], tensors: Tensors) -> dict[str, int]:
    """How many layers that draft are read: one, if it has all that `checkpoints.mtp` knows, and
    nothing else."""
    begin = f"blk.{config['num_hidden_layers']}.nextn."
    known = {f"{begin}{part}.weight" for part in NEXTN}
    found = {name for name in tensors if ".nextn." in name}
    return {"mtp_num_hidden_layers": int(found == known)}


def _experts(of: Fields, model_type: str) -> dict[str, Any]:
    """The settings of experts, which are the same in all layers. Their shares are normalised
    without a field that says so."""
    of.only("expert_weights_scale", 1.0, 0.0)  # 0 means 1
    if model_type == QWEN_MOE:
        of.only("expert_shared_feed_forward_length", 0)
        own = {"intermediate_size": of.integer("feed_forward_length")}
    else:
        of.ignore("feed_forward_length")  # no layer has it
        shared = of.integer("expert_shared_feed_forward_length")
        own = {"shared_expert_intermediate_size": shared}
    of.only("expert_gating_func", 1)  # softmax
    of.only("expert_weights_norm", True)
    of.only("expert_group_count", 1)
    of.only("expert_group_used_count", 1)
    num_experts = of.integer("expert_count")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": of.integer("expert_used_count", most=num_experts),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        **own,
    }


def _gemma_4(of: Fields, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    if FACTORS not in tensors:
        raise ConfigError(f"{of.file} has no tensor {FACTORS}: convert the model again")
    if _rope_scaling(of, config):
        raise ConfigError(f"{of.file} has rotary scaling, which cannot be read for Gemma 4")
    place = tensors[FACTORS]
    return gemma_4_config(
        of, config["num_hidden_layers"], tensors, lambda num: _numbers(of, FACTORS, place, num)
    )


def _gpt_oss(of: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope_scaling(of, config) or {"rope_type": "default"}
    rope |= {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return _heads(of) | gpt_oss_config(of, config) | {"rope_scaling": rope}


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
    if config["model_type"] not in (PHI, *WITH_NETS):
        of.only("rope.dimension_count", head_dim)
    if config["model_type"] != PHI:
        of.only("rope.scaling.attn_factor", 1.0)
    if config["model_type"] not in (*GEMMAS, PHI):
        of.only("attention.sliding_window", 0)
    of.only("attention.value_length", head_dim)
    of.only("attention.causal", True)
    if config["model_type"] not in WITH_EXPERTS:
        of.only("expert_count", 0)
        of.only("expert_used_count", 0)
    of.only("pooling_type", 0)
    of.only("rope.scaling.yarn_ext_factor", 1.0)
    _check_unused(of)


def _check_unused(of: Fields) -> None:
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
