"""Reads the header of a GGUF file: its fields and where its tensors are.

The reader of the package gguf takes a second for a vocabulary of 49,152 tokens, and this one a
tenth. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_py.defaults import ConfigError

FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Numbers, by their type in the file."""

STRING, ARRAY = 8, 9
VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """type: as the package gguf names it. shape: the last size changes fastest, as in PyTorch.
    offset, num_bytes: in the file."""

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """The fields and tensors by their names. Raises ConfigError."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{file} needs the package gguf: pip install gguf") from error
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
            reader = _Reader(m)
            _, version, num_tensors, num_fields = reader.numbers("4sIQQ")
            if version not in VERSIONS:
                raise ValueError(f"version {version}")
            fields = {reader.string(): reader.value() for _ in range(num_fields)}
            entries = []
            for _ in range(num_tensors):
                name, (num_dims,) = reader.string(), reader.numbers("I")
                entries.append((name, reader.numbers(f"{num_dims}Q"), *reader.numbers("IQ")))
            alignment = fields.get("general.alignment", 32)
            start = -(-reader.position // alignment) * alignment
            tensors = {}
            for name, sizes, number, offset in entries:
                kind = gguf.GGMLQuantizationType(number)
                block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                num_bytes = math.prod(sizes) // block_len * block_bytes
                if start + offset + num_bytes > len(m):
                    raise ValueError(f"{name} ends after the file")
                place = TensorPlace(kind.name, sizes[::-1], start + offset, num_bytes)
                tensors[name] = place
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise ConfigError(
            f"{file} is damaged, not complete or too new ({error}): copy it again"
        ) from error
    return fields, tensors


class _Reader:
    """Reads values one after another. All are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def numbers(self, formats: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{formats}", self._data, self.position)
        self.position += struct.calcsize(f"<{formats}")
        return found

    def string(self) -> str:
        (length,) = self.numbers("Q")
        start, self.position = self.position, self.position + length
        return self._data[start : self.position].decode()

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        if kind != ARRAY:
            return self.string() if kind == STRING else self.numbers(FORMATS[kind])[0]
        kind, length = self.numbers("IQ")
        if kind == STRING:
            return [self.string() for _ in range(length)]
        return list(self.numbers(f"{length}{FORMATS[kind]}"))
