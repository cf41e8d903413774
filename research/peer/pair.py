"""The pair that all engines run: that of `scripts/bench`, made fit for the peers.

vLLM has kernels for heads of 32 and more on a CPU, and wants one vocabulary for both models.
OpenVINO stores tensors that are equal once. The output projections of layers that only cost time
are all zero: it would read a quarter less from memory than the others.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import load, save

from smartspec_bench.expand import PRESETS, Size, expand
from smartspec_bench.expand_heads import widen_heads

HEAD_DIM = 64
TINY = 2.0**-100
PRESET_OF = {"target": "88m", "draft": "4m"}


def make(folder: Path) -> None:
    for name, preset in PRESET_OF.items():
        if (folder / name).is_dir():
            continue
        size = PRESETS[preset]
        with tempfile.TemporaryDirectory() as between:
            wide = Path(between) / name
            widen_heads(Path("engines_build/tiny") / name, wide, HEAD_DIM)
            expand(
                wide,
                folder / name,
                **Size(
                    hidden_size=size["hidden_size"],
                    num_layers=size["num_layers"],
                    intermediate_size=size["intermediate_size"],
                    num_heads=size["num_heads"],
                ),
            )
            tell_apart(folder / name / "model.safetensors")


def tell_apart(path: Path) -> None:
    """Give each tensor of zeros one element of its own, far too small to change a sum."""
    tensors = load(path.read_bytes())
    zeros = [tensor for tensor in tensors.values() if not tensor.any()]
    for number, tensor in enumerate(zeros):
        tensor.view(-1)[number] = TINY
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
