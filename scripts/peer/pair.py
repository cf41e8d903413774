"""The pair that both engines run: that of `scripts/bench`, made fit for vLLM.

It has kernels for heads of 32 and more on a CPU, and wants one vocabulary for both models.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from smartspec_py.expand import PRESETS, Size, expand
from smartspec_py.expand_heads import widen_heads

HEAD_DIM = 64
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


if __name__ == "__main__":
    make(Path(sys.argv[1]))
