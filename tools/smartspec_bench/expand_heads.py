"""Make the heads of a Llama-architecture checkpoint wider without changing what it computes.

`smartspec_bench.expand` adds heads but leaves their width, and engines have kernels for some widths
only (vLLM's on a CPU begin at 32). With a head of d dimensions made f d wide, f = 4, 16, ..:

- rotary pairs are (i, i + d/2), turned by theta^(-2i/d). With theta' = theta^f pair i of the wide
  head turns as pair i of the narrow one did: theta'^(-2i/(f d)) = theta^(-2i/d);
- scores are divided by sqrt(f d) instead of sqrt(d), so queries are multiplied by sqrt(f), a power
  of 2, which is exact in every precision;
- the new dimensions of queries are zero, and so are the columns of o_proj that read those of
  values; keys and values are random there, so that no kernel meets a special case.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from smartspec_bench.expand import INIT_STD, checked_sizes, copy_tokenizer, load_weights


def widen_heads(source: Path, out: Path, head_dim: int, *, seed: int = 0) -> None:
    """Write the model of `source` to the new folder `out` with heads of this width.

    Raises ValueError where head_dim is not the source's width times a power of 4, or so large that
    theta leaves float32, or the source is not a plain Llama model.
    """
    config = json.loads((source / "config.json").read_text())
    weights = load_weights(source)
    sizes = checked_sizes(config, weights)
    factor = head_dim // sizes["head_dim"]
    root = math.isqrt(max(factor, 0))
    if factor * sizes["head_dim"] != head_dim or root**2 != factor or root.bit_count() != 1:
        allowed = ", ".join(str(sizes["head_dim"] * 4**n) for n in range(4))
        raise ValueError(f"head_dim: got {head_dim}, must be one of {allowed}, ..")
    wide_config = _config(config, head_dim, factor)
    generator = torch.Generator().manual_seed(seed)
    widened = {
        name: _widened(name, tensor, sizes["num_attention_heads"], factor, generator)
        for name, tensor in weights.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(widened, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    (out / "config.json").write_text(json.dumps(wide_config, indent=2) + "\n")
    copy_tokenizer(source, out)


def _widened(
    name: str, tensor: torch.Tensor, num_heads: int, factor: int, generator: torch.Generator
) -> torch.Tensor:
    if name.endswith("o_proj.weight"):
        narrow = tensor.view(len(tensor), num_heads, -1)  # [hidden, heads, d]
        wide = narrow.new_zeros(*narrow.shape[:2], narrow.shape[2] * factor)
        wide[..., : narrow.shape[2]] = narrow
        return wide.flatten(1)
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = tensor.view(num_heads, 2, -1, tensor.shape[1])  # [heads, 2, d / 2, hidden]
        is_query = name.endswith("q_proj.weight")
        wide = _room(halves, 2, factor, 0.0 if is_query else INIT_STD, generator)
        wide[:, :, : halves.shape[2]] = halves * math.sqrt(factor) if is_query else halves
        return wide.flatten(0, 2)
    if name.endswith("v_proj.weight"):
        heads = tensor.view(num_heads, -1, tensor.shape[1])  # [heads, d, hidden]
        wide = _room(heads, 1, factor, INIT_STD, generator)
        wide[:, : heads.shape[1]] = heads
        return wide.flatten(0, 1)
    return tensor.clone()


def _room(
    tensor: torch.Tensor, dim: int, factor: int, std: float, generator: torch.Generator
) -> torch.Tensor:
    """Of the tensor's shape, but `factor` times as long in a dimension; normally distributed."""
    shape = list(tensor.shape)
    shape[dim] *= factor
    return torch.empty(shape).normal_(generator=generator).mul_(std).to(tensor.dtype)


def _config(config: dict[str, Any], head_dim: int, factor: int) -> dict[str, Any]:
    """Raises ValueError where the new theta is none that float32 has."""
    rope = config.get("rope_parameters") or {"rope_type": "default"}
    theta = float(rope.get("rope_theta") or config["rope_theta"])
    if factor * math.log(theta) > math.log(torch.finfo(torch.float32).max):
        raise ValueError(f"head_dim: {theta:g} ** {factor} is no rope_theta, beyond float32")
    return config | {
        "head_dim": head_dim,
        "rope_parameters": rope | {"rope_theta": theta**factor},
    }
