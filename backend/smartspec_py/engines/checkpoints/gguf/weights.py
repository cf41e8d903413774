"""Reads the tensors of a GGUF file, for a folder that `folder` made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smartspec_py.engines.checkpoints.gguf.dequantise import dequantise, integers_of
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.gguf.places import ZEROS
from smartspec_py.engines.checkpoints.quantized import Integers
from smartspec_py.engines.checkpoints.rows import whole

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights(Mapping[str, torch.Tensor]):
    """The tensors by the names of the model's parameters. Each is dequantised when it is read:
    float32, or the type of the file if it is not quantised."""

    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._places = document["tensors"]
        self._bytes = {file: np.memmap(file, np.uint8, "r") for file in document["files"]}

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if place["type"] == ZEROS:
            return torch.zeros(place["shape"])
        matrix = self.rows(name)
        dtype = PLAIN.get(place["type"])
        numbers = matrix.stored(slice(None)).view(dtype) if dtype else whole(matrix)
        if "added" in place:
            numbers = numbers - place["added"]
        if place.get("is_rate"):
            numbers = (-numbers).log()
        return numbers.reshape(place["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor when it is read."""
        return PLAIN.get(self._places[name]["type"], torch.float32)

    def rows(self, name: str) -> GgufMatrix:
        """The matrix, or the vector as one row. The file must have it."""
        place = self._places[name]
        return GgufMatrix(place, self._bytes[place["file"]])

    def integers(self, name: str) -> Integers | None:
        """The matrix as the file has it, if that is in 4 bits or MXFP4."""
        return integers_of(self.rows(name).stored(slice(None)), self._places[name]["type"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class GgufMatrix:
    """See `Rows`."""

    def __init__(self, place: Mapping[str, Any], data: np.typing.NDArray[np.uint8]) -> None:
        """place: of the tensor in the file's bytes.

        llama.cpp's converter orders the rows of each head of queries and keys in another way: its
        rotation takes neighbours as pairs, and that of Transformers the two halves of a head.
        """
        *sizes, width = place["shape"]
        num_heads = place.get("num_heads")
        if num_heads and not sizes:  # a bias, of one number for each row
            sizes, width = [width], 1
        self.shape = torch.Size((math.prod(sizes), width))
        self._type = place["type"]
        stored = data[place["offset"] :][: place["num_bytes"]]
        self._stored = stored.reshape(self.shape[0], -1)
        self._order = np.arange(self.shape[0])
        if num_heads:
            self._order = self._order.reshape(num_heads, -1, 2).swapaxes(1, 2).flatten()

    def stored(self, rows: slice) -> torch.Tensor:
        """The bytes of these rows, [rows, bytes per row]."""
        return torch.from_numpy(self._stored[self._order[rows]])

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        dtype = PLAIN.get(self._type)
        if dtype:
            numbers.copy_(self.stored(rows).view(dtype))
        else:
            dequantise(self.stored(rows), self._type, numbers)
