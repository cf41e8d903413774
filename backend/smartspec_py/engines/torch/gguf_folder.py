"""Makes a Hugging Face folder of a GGUF file, once, in the user's cache directory.

The folder has the configuration and the tokenizer in the usual files, and INDEX instead of weights:
where the GGUF file is, and where in it each parameter of the model is. So only `gguf_weights` knows
that the weights are in a GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smartspec_py.defaults import ConfigError, cache_dir
from smartspec_py.engines.torch.gguf_header import TensorPlace, read_header
from smartspec_py.engines.torch.gguf_tokenizer import end_token_ids, make_tokenizer, token_settings

INDEX = "gguf.json"

VERSION = 1
"""Of this conversion. Folders that another version made are not used."""

MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Classes by `general.architecture`, which is also the `model_type`."""

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K"),
)

PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
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

FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later have."""

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary settings of these models. A file has only the divisors that follow from them."""


def model_folder(path: Path) -> Path:
    """The model directory of this path: the path itself, or the folder that is made of it if it is
    a GGUF file, or a directory with one GGUF file and no other weights. Raises ConfigError."""
    file = _gguf_file(path)
    if file is None:
        return path
    about = file.stat()
    key = f"{VERSION}:{file.resolve()}:{about.st_size}:{about.st_mtime_ns}"
    parent = cache_dir() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = parent / file.stem
    if not (folder / INDEX).is_file():
        documents = _documents(file)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=parent))
            for name, text in documents.items():
                (made / name).write_text(text, encoding="utf-8")
            os.replace(made, folder)
        except OSError as error:
            if not (folder / INDEX).is_file():  # no other process made it meanwhile
                raise ConfigError(
                    f"{parent} cannot be written ({error.strerror}), and {file} needs files there: "
                    "set XDG_CACHE_HOME to a writable directory"
                ) from error
    return folder


def _gguf_file(path: Path) -> Path | None:
    if path.is_dir() and not any(
        file.name == INDEX or file.suffix in (".safetensors", ".bin") for file in path.iterdir()
    ):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ConfigError(f"{path} has {len(files)} GGUF files: give the path of one of them")
        return files[0] if files else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" else None


def _documents(file: Path) -> dict[str, str]:
    """Contents of the folder's files by their names. Raises ConfigError."""
    fields, tensors = read_header(file)
    try:
        architecture = fields["general.architecture"]
        if architecture not in MODELS:
            raise ConfigError(
                f"{file} has the architecture {architecture}, which cannot be read: use one of "
                f"{', '.join(MODELS)}"
            )
        if fields.get("split.count", 1) > 1:
            raise ConfigError(
                f"{file} is one of {fields['split.count']} parts: join them with llama-gguf-split"
            )
        index = _index(file, architecture, fields, tensors)
        config = _config(file, architecture, fields, tensors)
        tokenizer = make_tokenizer(file, fields)
    except KeyError as error:
        raise ConfigError(f"{file} has no {error.args[0]}: convert the model again") from error
    ends = {"eos_token_id": end_token_ids(fields)}
    return {
        "config.json": json.dumps(config | ends, indent=2),
        "generation_config.json": json.dumps(ends),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(token_settings(fields)),
        INDEX: json.dumps(index),
    }


def _index(
    file: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """Where each parameter is. num_heads: of a matrix whose rows are permuted within each head."""
    num_heads = {
        "attn_q": fields[f"{architecture}.attention.head_count"],
        "attn_k": _num_kv_heads(architecture, fields),
    }
    places = {}
    for name, tensor in tensors.items():
        if name == FACTORS:
            continue
        if tensor.type not in TYPES:
            raise ConfigError(
                f"{file} has tensors of the type {tensor.type}, which cannot be read: use one of "
                f"{', '.join(TYPES)}"
            )
        parameter = _parameter(name)
        if parameter is None:
            raise ConfigError(
                f"{file} has a tensor {name}, which a {architecture} model of Transformers has not"
            )
        place = asdict(tensor)
        part = name.split(".")[-2]
        if architecture == "llama" and part in num_heads:
            place["num_heads"] = num_heads[part]
        places[parameter] = place
    return {"file": str(file.absolute()), "size": file.stat().st_size, "tensors": places}


def _parameter(name: str) -> str | None:
    """The name of the parameter in a Transformers model; None if it has none."""
    part, _, kind = name.rpartition(".")
    if part == "output":
        return f"lm_head.{kind}"
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", part)
    if found is None or kind not in ("weight", "bias") or found[2] not in PARTS:
        return None
    layer = "" if found[1] is None else f"layers.{found[1]}."
    return f"model.{layer}{PARTS[found[2]]}.{kind}"


def _num_kv_heads(architecture: str, fields: Mapping[str, Any]) -> int:
    num_heads = fields[f"{architecture}.attention.head_count"]
    return int(fields.get(f"{architecture}.attention.head_count_kv", num_heads))


def _config(
    file: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """The content of config.json, without end tokens."""

    def of(name: str, default: Any = None) -> Any:
        key = f"{architecture}.{name}"
        return fields[key] if default is None else fields.get(key, default)

    num_heads = of("attention.head_count")
    head_dim = of("attention.key_length", of("embedding_length") // num_heads)
    if of("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{file} rotates a part of each head only, which cannot be read")
    kinds = {tensor.type for tensor in tensors.values() if len(tensor.shape) > 1}
    found = {
        "architectures": [MODELS[architecture]],
        "model_type": architecture,
        "dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(kinds), "float32"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": of("context_length"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(architecture, fields),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    scaling = of("rope.scaling.type", "none")
    if FACTORS in tensors:
        found["rope_scaling"] = _llama3(file, tensors[FACTORS], head_dim, found["rope_theta"])
    elif scaling in ("linear", "yarn"):
        original = of("rope.scaling.original_context_length", of("context_length"))
        found["rope_scaling"] = {
            "rope_type": scaling,
            "factor": of("rope.scaling.factor"),
            "original_max_position_embeddings": original,
        }
    elif scaling != "none":
        raise ConfigError(
            f"{file} has rotary embeddings of the type {scaling}, which cannot be read"
        )
    return found


def _llama3(file: Path, place: TensorPlace, head_dim: int, theta: float) -> dict[str, Any]:
    """The rotary settings that give these divisors. Raises ConfigError if no known ones do."""
    with file.open("rb") as opened:
        opened.seek(place.offset)
        divisors = struct.unpack(f"<{place.num_bytes // 4}f", opened.read(place.num_bytes))
    factor = max(divisors)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    for index, divisor in enumerate(divisors):
        wave_len = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = LLAMA3["original_max_position_embeddings"] / wave_len
        smooth = min(max((turns - low) / (high - low), 0), 1)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise ConfigError(f"{file} has a {FACTORS} that is not that of Llama 3: cannot be read")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
