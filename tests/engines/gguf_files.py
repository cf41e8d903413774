"""Writes GGUF files as llama.cpp does (convert_hf_to_gguf.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.gate": "ffn_gate_exps.weight",
    "mlp.experts.up": "ffn_up_exps.weight",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NET_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
NETS = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}

NET_FIELDS = {
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "attention.recurrent_layers": [True, True, True, False],
}
"""Of a model with a net of two heads of keys, 32 wide, in three of four layers."""


def of_net(parameter: str, numbers: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """A tensor of Qwen3.5 as its file has it: heads of values of each head of keys in turns."""
    if parameter.endswith("A_log"):
        numbers = -np.exp(numbers)
    if "conv1d" in parameter:
        numbers = numbers[:, 0]
    if "norm" in parameter and "linear_attn" not in parameter:
        numbers = numbers + 1
    if "linear_attn" not in parameter or "linear_attn.norm" in parameter:
        return numbers
    if parameter.endswith("out_proj.weight"):
        return _in_turns(numbers.T, config).T
    num_kept = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    num_kept = num_kept if "qkv" in parameter or "conv1d" in parameter else 0
    return np.concatenate([numbers[:num_kept], _in_turns(numbers[num_kept:], config)])


def _in_turns(numbers: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    num = config.linear_num_key_heads
    heads = numbers.reshape(num, config.linear_num_value_heads // num, -1, *numbers.shape[1:])
    return heads.swapaxes(0, 1).reshape(numbers.shape)


def file_name(name: str, parts: Mapping[str, str] = PARTS) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers", "blk")


def permuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head, first half and second half in turns."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1)
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def stored(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """In this type. The package quantises to no K type: those get random bytes whose scales are
    finite."""
    try:
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        shape = (*weight.shape[:-1], weight.shape[-1] // block_len * block_bytes)
        return np.random.default_rng(weight.size).integers(0, 256, shape, np.uint8) & 0xBF


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """None leaves out a field."""
    for key, value in fields.items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
            type(None): lambda *_: None,
        }[type(value)]
        add(key, value)


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Mapping[str, Any],
    kind: str = "F32",
    tensors: Mapping[str, Any] | None = None,
    left_out: str = "",
    part_len: int = 0,
    **changed: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write the model; returns what was written by the names of its parameters.

    tokenizer: fields of `tokenizer.ggml`. kind: of the matrices. tensors: additional ones.
    left_out: the end of names of tensors that the file has not. part_len: tensors of each part, of
    which path has the beginning of the name; 0 writes one file. changed: other fields, or the
    architecture; None leaves out a field.
    """
    config = model.config
    others = {"ministral3": "mistral3", "qwen3_moe": "qwen3moe", **NETS}
    name = others.get(config.model_type, config.model_type)
    name = name.removesuffix("_text")
    is_gemma, rope = name in ("gemma2", "gemma3"), config.rope_parameters
    has_nets = config.model_type in NETS
    parts = GEMMA_PARTS if is_gemma else NET_PARTS if has_nets else PARTS
    writer = gguf.GGUFWriter(path, changed.pop("architecture", name), split_max_tensors=part_len)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if getattr(config, "head_dim", None):
        fields["attention.key_length"] = config.head_dim
    fields = {f"{name}.{key}": value for key, value in fields.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()} | changed
    add_fields(writer, fields)
    written = {}
    for parameter, weight in file_parameters(model):
        if left_out and file_name(parameter, parts).endswith(left_out):
            continue
        numbers = weight.detach().float().numpy() + (is_gemma and "norm" in parameter)
        numbers = of_net(parameter, numbers, config) if has_nets else numbers
        written[parameter] = numbers if numbers.ndim < 2 else stored(numbers, kind)
        found = written[parameter]
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        part = parameter.rpartition("_proj.")[0][-1:]
        if name in ("granite", "llama", "mistral3", "smollm3") and part in heads:
            found = permuted(found, heads[part])
        as_kind = gguf.GGMLQuantizationType[kind] if found.dtype == np.uint8 else None
        writer.add_tensor(file_name(parameter, parts), found, raw_dtype=as_kind)
    for extra, numbers in (tensors or {}).items():
        writer.add_tensor(extra, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def file_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """A file has gate and up of experts in two tensors."""
    for name, weight in model.named_parameters():
        if ".experts.gate_up_proj" in name:
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", part), half
        else:
            yield name, weight


def bpe_fields(tokenizer_json: str, pre: str) -> dict[str, Any]:
    """The fields of a byte-level tokenizer."""
    document = json.loads(tokenizer_json)
    special = {token["id"]: token["special"] for token in document["added_tokens"]}
    ids = document["model"]["vocab"] | {t["content"]: t["id"] for t in document["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if special.get(i) else 4 if i in special else 1 for i in range(len(ids))],
        "merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def few_fields(num_tokens: int) -> dict[str, Any]:
    """A tokenizer of so many tokens, which no text needs."""
    tokens = ["a", "b", "ab", *(f"t{i}" for i in range(3, num_tokens))]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"]} | {
        "token_type": [1] * num_tokens,
        "eos_token_id": 0,
    }
