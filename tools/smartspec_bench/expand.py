"""Make a Llama-architecture checkpoint cost more without changing what it computes.

The expanded model gives the same logits over the source's vocabulary. So acceptance is that of the
small models, and time and memory are those of the larger size. Weights that have no effect are
random and not zero, so that kernels take no special case:

- parts that *write* to the residual stream (embeddings, o_proj, down_proj) are zero in new
  dimensions
- parts that only *read* new dimensions, heads or neurons are random, because these carry zeros
- new heads, neurons and layers are random up to their output projection, which is zero
- RMSNorm averages squares over more dimensions: with r = d_old / d_new its weight is scaled by
  sqrt(r) and its epsilon by r. If r is a power of 1/4, both are exact in bfloat16. Otherwise the
  norms are stored in float32, and the loader must not round them.

Heads become f times as wide, f = 4, 16, ..:

- rotary pairs of a head of d dimensions are (i, i + d/2), turned by theta^(-2i/d). With
  theta' = theta^f, pair i of the wide head turns as pair i of the narrow one did
- scores are divided by sqrt(f d) instead of sqrt(d), so queries are multiplied by sqrt(f), a power
  of 2, which is exact in every precision
- new dimensions of queries are zero; those of keys and values are random

The source's query heads become the first of each group that shares a key head.

The vocabulary may be padded. Logits beyond the source's `vocab_size` have no meaning and must be
removed before sampling.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INIT_STD = 0.02
HEADS_FILE = "medusa_lm_head.safetensors"
FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
    "chat_template*",
)
"""What is copied from the source."""

Size = Mapping[str, int]
"""Sizes by their names in config.json."""


def _size(hidden: int, layers: int, intermediate: int, heads: int, **more: int) -> Size:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        **more,
    }


# Sizes for the shipped pair, both of hidden size 128, which they multiply by 4 so that the norms
# stay exact in bfloat16. "17m" and "88m" are for the target; the draft as it ships (0.7 M) costs
# 1/24 of the first, and "4m" makes it 1/22 of the second without more layers, as depth is what
# makes a small model slow. The heads stay eight: models of that size have few and wide ones, and
# attention over more heads of 16 would cost more than theirs does. "1b" and "4b" have the layers
# of Llama-3.2-1B and Qwen3-4B (there with half as many heads, twice as wide). Their vocabulary
# stays that of the source: this server computes no logits beyond it, but others would.
PRESETS: dict[str, Size] = {
    "4m": _size(512, 2, 448, 8),
    "17m": _size(512, 5, 1792, 8),
    "88m": _size(512, 19, 2560, 8, vocab_size=8192),
    "40m": _size(2048, 2, 1792, 8, head_dim=64),
    "1b": _size(2048, 16, 8192, 32, num_key_value_heads=8, head_dim=64),
    "4b": _size(2560, 36, 9728, 64, num_key_value_heads=16, head_dim=64),
}


class SizeError(ValueError):
    """A model cannot be expanded to a size that is smaller than its own."""


def expand(source: Path, out: Path, size: Size, *, seed: int = 0) -> int:
    """Write the model of `source` to the new folder `out` at the given sizes.

    size: without a key, that of the source. Returns the number of parameters. Raises ValueError if
    a size is smaller than the source's, if the source is not a plain Llama model (biases), or if
    the heads cannot have this width.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_weights(source)
    old = checked_sizes(config, weights)
    new = old | dict(size)
    for key in old:
        if new[key] < old[key]:
            raise SizeError(f"{key}: cannot shrink from {old[key]} to {new[key]}")
    groups = [size["num_attention_heads"] // size["num_key_value_heads"] for size in (old, new)]
    if groups[1] < groups[0]:
        text = "query heads of each key head: cannot shrink from {} to {}"
        raise SizeError(text.format(*groups))
    if new["hidden_size"] % new["num_attention_heads"]:  # transformers asks it, head_dim or not
        raise ValueError("hidden_size: must be a multiple of num_attention_heads")
    config = _config(config, old, new) | {
        "smartspec_expanded": {"source": source.name, "from": old, "to": new, "seed": seed}
    }
    generator = torch.Generator().manual_seed(seed)
    grown = {
        name: _grown(name, shape, weights, old, new, generator)
        for name, shape in _shapes(new).items()
    }
    for pattern in FILES:
        for path in source.glob(pattern):
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, out / path.name)
    return _write(out, "model.safetensors", grown, config)


def has_medusa(source: Path) -> bool:
    """Whether the folder holds Medusa heads and not a model."""
    return "medusa_num_heads" in json.loads((source / "config.json").read_text(encoding="utf-8"))


def expand_medusa(source: Path, out: Path, hidden_size: int) -> int:
    """Write the Medusa heads of `source` for a target that was expanded to this hidden size.

    In new dimensions, the target's states are zero. New rows read nothing else and have no bias, so
    what a block adds there is zero. Returns the number of parameters. Raises ValueError if the
    heads have LM heads of their own, which would have to fit the expanded target, or are larger.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not config.get("shares_lm_head"):
        raise ValueError(
            "shares_lm_head: only heads that share the target's LM head can be expanded"
        )
    old = config["hidden_size"]
    if hidden_size < old:
        raise SizeError(f"hidden_size: cannot shrink from {old} to {hidden_size}")
    generator = torch.Generator().manual_seed(0)
    grown = {}
    for name, tensor in load_file(source / HEADS_FILE).items():
        grown[name] = _random((hidden_size,) * tensor.dim(), tensor.dtype, generator)
        grown[name][..., :old] = 0
        if tensor.dim() == 1:
            grown[name].zero_()
        grown[name][tuple(slice(size) for size in tensor.shape)] = tensor
    return _write(out, HEADS_FILE, grown, config | {"hidden_size": hidden_size})


def _write(out: Path, file: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> int:
    """Write a checkpoint, and return its number of parameters."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / file, metadata={"format": "pt"})
    (out / file).chmod(0o644)  # the library writes it for its owner alone
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def load_weights(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whether in one file or in shards."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        weights |= load_file(path)
    if not weights:
        raise ValueError(f"no *.safetensors in {source}")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    return weights


def checked_sizes(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of a source that this module can expand."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type: expected 'llama', got {config.get('model_type')!r}")
    num_heads = config["num_attention_heads"]
    unknown = [name for name in weights if not name.endswith(".weight")]
    if unknown:
        raise ValueError(f"unsupported tensors: {unknown}")
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    return {
        **{name: config[name] for name in names},
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
    }


def _config(config: dict[str, Any], old: Size, new: Size) -> dict[str, Any]:
    """Raises ValueError if the heads cannot have this width."""
    factor = new["head_dim"] // old["head_dim"]
    root = math.isqrt(factor)
    if factor * old["head_dim"] != new["head_dim"] or root**2 != factor or root.bit_count() != 1:
        allowed = ", ".join(str(old["head_dim"] * 4**n) for n in range(4))
        raise ValueError(f"head_dim: got {new['head_dim']}, must be one of {allowed}, ..")
    rope = config.get("rope_parameters") or {"rope_type": "default"}
    theta = float(rope.get("rope_theta") or config["rope_theta"])
    if factor * math.log(theta) > math.log(torch.finfo(torch.float32).max):
        raise ValueError(f"head_dim: {theta:g} ** {factor} is no rope_theta, beyond float32")
    ratio = old["hidden_size"] / new["hidden_size"]
    return {
        **config,
        **new,
        "rope_parameters": rope | {"rope_theta": theta**factor},
        "rms_norm_eps": config["rms_norm_eps"] * ratio,
        "tie_word_embeddings": False,
    }


def _grown(
    name: str,
    shape: tuple[int, ...],
    weights: Mapping[str, torch.Tensor],
    old: Size,
    new: Size,
    generator: torch.Generator,
) -> torch.Tensor:
    """One tensor of the expanded model."""
    source = weights.get(name)
    if len(shape) == 1:
        return _norm(source, old["hidden_size"], new["hidden_size"], weights)
    grown = _random(shape, weights["lm_head.weight"].dtype, generator)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        grown.zero_()
    elif name.endswith("embed_tokens.weight"):
        grown[:, old["hidden_size"] :] = 0
    if source is None:
        return grown
    blocks, own = _blocks(name, grown, new), _blocks(name, source, old)
    if name.endswith("q_proj.weight"):
        blocks[: len(own), : own.shape[1], :, own.shape[3] :] = 0
        own = own * math.sqrt(new["head_dim"] // old["head_dim"])
    blocks[tuple(slice(length) for length in own.shape)] = own
    return grown


def _blocks(name: str, tensor: torch.Tensor, size: Size) -> torch.Tensor:
    """A view whose dimensions grow independently.

    Queries: [key heads, query heads of each, 2 halves of the rotary pairs, d / 2, hidden]; keys
    [key heads, 2, d / 2, hidden]; values [key heads, d, hidden]; o_proj [hidden, key heads, query
    heads of each, d]; all others as they are.
    """
    dim, num_kv = size["head_dim"], size["num_key_value_heads"]
    if name.endswith("q_proj.weight"):
        return tensor.view(num_kv, -1, 2, dim // 2, tensor.shape[1])
    if name.endswith("k_proj.weight"):
        return tensor.view(num_kv, 2, dim // 2, tensor.shape[1])
    if name.endswith("v_proj.weight"):
        return tensor.view(-1, dim, tensor.shape[1])
    if name.endswith("o_proj.weight"):
        return tensor.view(tensor.shape[0], num_kv, -1, dim)
    return tensor


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).normal_(std=INIT_STD, generator=generator).to(dtype)


def _norm(
    source: torch.Tensor | None,
    old_hidden: int,
    new_hidden: int,
    weights: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """A norm's weight (new_hidden,); ones if the input is that of a new layer or a new
    dimension."""
    ratio = math.sqrt(old_hidden / new_hidden)
    is_exact = math.frexp(ratio)[0] == 0.5
    dtype = weights["model.norm.weight"].dtype if is_exact else torch.float32
    grown = torch.ones(new_hidden, dtype=dtype)
    if source is not None:
        grown[:old_hidden] = (source.double() * ratio).to(dtype)
    return grown


def _shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama model of `size`, by its Hugging Face name."""
    hidden, inner, vocab = size["hidden_size"], size["intermediate_size"], size["vocab_size"]
    heads = size["num_attention_heads"] * size["head_dim"]
    kv_heads = size["num_key_value_heads"] * size["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
