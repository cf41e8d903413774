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

The vocabulary may be padded. Logits beyond the source's `vocab_size` have no meaning and must be
removed before sampling.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from safetensors.torch import load_file, save_file

INIT_STD = 0.02
HEADS_FILE = "medusa_lm_head.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")
_OTHER_FILES = ("generation_config.json", "chat_template*")


class _RequiredSize(TypedDict):
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int


class Size(_RequiredSize, total=False):
    """The size to expand to. Without `vocab_size`, the vocabulary stays the same."""

    vocab_size: int


# Sizes for the shipped pair, both of hidden size 128, which they multiply by 4 so that the norms
# stay exact in bfloat16. "17m" and "88m" are for the target; the draft as it ships (0.7 M) costs
# 1/24 of the first, and "4m" makes it 1/22 of the second without more layers, as depth is what
# makes a small model slow. The heads stay eight: models of that size have few and wide ones, and
# attention over more heads of 16 would cost more than theirs does.
PRESETS: dict[str, Size] = {
    "4m": Size(hidden_size=512, num_layers=2, intermediate_size=448, num_heads=8),
    "17m": Size(hidden_size=512, num_layers=5, intermediate_size=1792, num_heads=8),
    "88m": Size(
        hidden_size=512, num_layers=19, intermediate_size=2560, num_heads=8, vocab_size=8192
    ),
    "40m": Size(hidden_size=2048, num_layers=2, intermediate_size=1792, num_heads=32),
    "1b": Size(
        hidden_size=2048, num_layers=16, intermediate_size=8192, num_heads=128, vocab_size=32000
    ),
}


class SizeError(ValueError):
    """A model cannot be expanded to a size that is smaller than its own."""


def expand(
    source: Path,
    out: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **size: Unpack[Size],
) -> int:
    """Write the model of `source` to the new folder `out` at the given sizes.

    dtype: of the weights; None keeps the source's. Returns the number of parameters. Raises
    ValueError as `expanded` does.
    """
    config, weights = expanded(source, size, torch.Generator().manual_seed(seed))
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        config["dtype"] = str(dtype).removeprefix("torch.")
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_tokenizer(source, out)
    return sum(tensor.numel() for tensor in weights.values())


def expanded(
    source: Path, size: Size, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of the model of `source` at this size.

    The tensors are made on the generator's device, so that a model of gigabytes need not pass
    through the host. The random numbers depend on the device. Raises ValueError if a size is
    smaller than the source's, if the source is not a plain Llama model (biases, grouped-query
    attention), or if `hidden_size` is not a multiple of `num_heads`.
    """
    config = json.loads((source / "config.json").read_text())
    weights = load_weights(source)
    old = checked_sizes(config, weights)
    new = _grown(old, size)
    _check_sizes(old, new)
    note = {"source": source.name, "from": old, "to": new, "seed": generator.initial_seed()}
    return _config(config, new, note), _expand_weights(weights, old, new, generator)


def has_medusa(source: Path) -> bool:
    """Whether the folder holds Medusa heads and not a model."""
    return "medusa_num_heads" in json.loads((source / "config.json").read_text(encoding="utf-8"))


def expand_medusa(source: Path, out: Path, hidden_size: int, *, seed: int = 0) -> int:
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
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(source / HEADS_FILE).items():
        grown = torch.zeros((hidden_size,) * tensor.dim(), dtype=tensor.dtype)
        if tensor.dim() == 2:
            grown[:, old:] = torch.empty(hidden_size, hidden_size - old).normal_(
                std=INIT_STD, generator=generator
            )
        grown[tuple(slice(size) for size in tensor.shape)] = tensor
        tensors[name] = grown
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / HEADS_FILE, metadata={"format": "pt"})
    (out / HEADS_FILE).chmod(0o644)
    config["hidden_size"] = hidden_size
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def presets_for(source: Path) -> list[str]:
    """Names of the presets that are no smaller than the model of `source`. Raises ValueError as
    `expanded` does."""
    old = checked_sizes(json.loads((source / "config.json").read_text(encoding="utf-8")), {})
    return [name for name, size in PRESETS.items() if not _shrinking(old, _grown(old, size))]


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
    if config.get("num_key_value_heads", num_heads) != num_heads:
        raise ValueError("num_key_value_heads: grouped-query attention is not supported")
    unknown = [name for name in weights if not name.endswith(".weight")]
    if unknown:
        raise ValueError(f"unsupported tensors: {unknown}")
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "vocab_size": config["vocab_size"],
    }


def _grown(old: dict[str, int], size: Size) -> dict[str, int]:
    return old | {
        "hidden_size": size["hidden_size"],
        "num_hidden_layers": size["num_layers"],
        "intermediate_size": size["intermediate_size"],
        "num_attention_heads": size["num_heads"],
        "vocab_size": size.get("vocab_size", old["vocab_size"]),
    }


def _shrinking(old: dict[str, int], new: dict[str, int]) -> list[str]:
    return [key for key, value in old.items() if new[key] < value]


def _check_sizes(old: dict[str, int], new: dict[str, int]) -> None:
    for key in _shrinking(old, new):
        raise SizeError(f"{key}: cannot shrink from {old[key]} to {new[key]}")
    if new["hidden_size"] % new["num_attention_heads"]:  # transformers asks it, head_dim or not
        raise ValueError("hidden_size: must be a multiple of num_heads")


def _expand_weights(
    weights: dict[str, torch.Tensor],
    old: dict[str, int],
    new: dict[str, int],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shape in _shapes(new).items():
        tensor = weights.get(name)
        if len(shape) == 1:
            norm = _norm(tensor, old["hidden_size"], new["hidden_size"], weights)
            tensors[name] = norm.to(generator.device)
            continue
        dtype = weights["lm_head.weight"].dtype
        grown = torch.empty(shape, device=generator.device)
        grown = grown.normal_(std=INIT_STD, generator=generator).to(dtype)
        _silence(name, grown, tensor, old["hidden_size"])
        if tensor is not None:
            grown[: tensor.shape[0], : tensor.shape[1]] = tensor
        tensors[name] = grown
    return tensors


def _silence(name: str, grown: torch.Tensor, source: torch.Tensor | None, old_hidden: int) -> None:
    """Zero the weights that would write into the residual stream where the source writes
    nothing."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        grown.zero_()
    elif name.endswith("embed_tokens.weight") and source is not None:
        grown[:, old_hidden:] = 0


def _norm(
    source: torch.Tensor | None, old_hidden: int, new_hidden: int, weights: dict[str, torch.Tensor]
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


def _shapes(size: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama model of `size`, by its Hugging Face name."""
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    heads, vocab = size["num_attention_heads"] * size["head_dim"], size["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (heads, hidden)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, heads)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _config(config: dict[str, Any], new: dict[str, int], note: dict[str, Any]) -> dict[str, Any]:
    ratio = note["from"]["hidden_size"] / new["hidden_size"]
    return (
        config
        | new
        | {
            "num_key_value_heads": new["num_attention_heads"],
            "rms_norm_eps": config["rms_norm_eps"] * ratio,
            "tie_word_embeddings": False,
            "smartspec_expanded": note,
        }
    )


def copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in (*_TOKENIZER_FILES, *_OTHER_FILES):
        for path in source.glob(pattern):
            shutil.copy(path, out / path.name)
