"""Exports the pair for OpenVINO, its weights in one data type. Runs in OpenVINO's environment.

python -m peer.export PAIR OUT float32|bfloat16
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FORMATS = {"float32": "fp32", "bfloat16": "bf16"}


def export(pair: Path, out: Path, dtype: str) -> None:
    """The tokenizers are exported as well: OpenVINO compares those of a pair."""
    import torch
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as between:
        for name in ("target", "draft"):
            main_export(
                str(pair / name),
                Path(between) / "pair" / name,
                task="text-generation-with-past",
                library_name="transformers",
                torch_dtype=getattr(torch, dtype),
                ov_config=OVConfig(dtype=FORMATS[dtype]),  # without it, a large model gets int8
                convert_tokenizer=True,
            )
        (Path(between) / "pair").rename(out)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
