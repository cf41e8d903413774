"""Reads the tensors of a GGUF file, for a folder that `folder` made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from smartspec_py.engines.checkpoints.gguf.config import ZEROS
from smartspec_py.engines.checkpoints.gguf.folder import INDEX

LONG_ROW = 1 << 15
"""Rows are joined up to this many numbers. The package `gguf` computes 16 rows at once: with rows
of 896, an embedding of 152 thousand tokens took 2.8 times as long."""

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights(Mapping[str, torch.Tensor]):
    """The tensors by the names of the model's parameters. Each is dequantised when it is read:
    float32, or the type of the file if it is not quantised."""

    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._places = document["tensors"]
        self._bytes = np.memmap(document["file"], np.uint8, "r")

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if place["type"] == ZEROS:
            return torch.zeros(place["shape"])
        return dequantised(self.stored(name), place["type"]).reshape(place["shape"])

    def stored(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor as uint8 [rows, bytes per row], in the order of the model's rows.

        llama.cpp's converter orders the rows of each head of queries and keys in another way: its
        rotation takes neighbours as pairs, and that of Transformers the two halves of a head.
        """
        place = self._places[name]
        num_rows = int(np.prod(place["shape"][:-1])) if len(place["shape"]) > 1 else 1
        if heads := place.get("num_heads"):
            num_rows = place["shape"][0]
        rows = self._bytes[place["offset"] :][: place["num_bytes"]].reshape(num_rows, -1)
        if heads:
            rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2)
        return np.array(rows).reshape(num_rows, -1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def dequantised(stored: npt.NDArray[np.uint8], kind: str) -> torch.Tensor:
    """The numbers in bytes [rows, bytes per row] of this type, as GGUF names it."""
    if kind in PLAIN:
        return torch.from_numpy(stored).view(PLAIN[kind])
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    numbers_per_block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    num_rows, row_bytes = stored.shape
    width = row_bytes // block_bytes * numbers_per_block
    num_joined = math.gcd(num_rows, 1 << max(0, (LONG_ROW // width).bit_length() - 1))
    joined = stored.reshape(num_rows // num_joined, -1)
    return torch.from_numpy(gguf.quants.dequantize(joined, type_)).reshape(num_rows, width)
