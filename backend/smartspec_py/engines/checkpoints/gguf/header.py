"""Reads the header of a GGUF file, or of its parts: its fields and where its tensors are.

The reader of the package gguf takes a second for a vocabulary of 49,152 tokens, and this one a
tenth. A file that states an array of 2**60 numbers makes that one loop without an end.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from smartspec_py.faults import ConfigError

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
MOST, MOST_NAMES, MOST_SIZES = 1 << 22, 1 << 16, 4
"""Numbers or texts of an array, and bytes of a text; fields, and tensors; sizes of a tensor. More
are refused at once."""

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of a part, as llama-gguf-split writes it."""

MOST_PARTS = 999


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """type: as the package gguf names it. shape: the last size changes fastest, as in PyTorch.
    offset, num_bytes: in the file."""

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    file: str


_Entry = tuple[str, tuple[int, ...], int, int]
"""Name, sizes, type and offset of a tensor. The first size changes fastest."""


_P = TypeVar("_P", bound=PurePath)


def part_files(file: _P) -> list[_P]:
    """The parts of the model that the file is a part of, or the file alone, by its name."""
    part = PART.search(file.name)
    if part is None or not 1 <= int(part[1]) <= int(part[2]) <= MOST_PARTS:
        return [file]
    start = file.name[: part.start()]
    return [
        file.with_name(f"{start}-{number:05}-of-{part[2]}.gguf")
        for number in range(1, int(part[2]) + 1)
    ]


def base_name(file: PurePath) -> str:
    """The name without its end, which all parts have in common."""
    return PART.sub("", file.name).removesuffix(".gguf")


def read_headers(files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """The fields of the first of these parts, and the tensors of all. Raises ConfigError."""
    fields: dict[str, Any] = {}
    tensors: dict[str, TensorPlace] = {}
    for number, file in enumerate(files):
        if not file.is_file():
            raise ConfigError(f"{file} is missing: copy all {len(files)} parts of the model")
        of_part, places = read_header(file)
        fields = fields or of_part
        given = of_part.get("split.no", 0), of_part.get("split.count") or 1
        if given != (number, len(files)):
            raise ConfigError(
                f"{file} has the split.no {given[0]} and the split.count {given[1]}, which its "
                "name does not say: give parts the names that llama-gguf-split writes"
            )
        if twice := tensors.keys() & places.keys():
            raise ConfigError(f"{file} has the tensor {min(twice)}, and so has a part before it")
        tensors |= places
    return fields, tensors


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """The fields and tensors by their names. Raises ConfigError."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
            reader = _Reader(m)
            magic, version, num_tensors, num_fields = reader.numbers("4sIQQ")
            if magic != b"GGUF":
                raise ValueError("not a GGUF file; a pointer of Git LFS needs `git lfs pull`")
            if version not in VERSIONS:
                raise ValueError(f"version {version}")
            fields = _named(
                [(reader.string(), reader.value()) for _ in _range(num_fields, MOST_NAMES)]
            )
            entries = [reader.entry() for _ in _range(num_tensors, MOST_NAMES)]
            alignment = fields.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
                raise ValueError(f"general.alignment {alignment}")
            start = _aligned(reader.position, alignment)
            return fields, _places(file, entries, start, alignment, len(m))
    except ImportError as error:
        raise ConfigError(f"{file} needs the package gguf: pip install gguf") from error
    except (ValueError, struct.error) as error:
        raise ConfigError(
            f"{file} is damaged, not complete or too new ({error}): copy it again"
        ) from error


def _places(
    file: Path, entries: list[_Entry], start: int, alignment: int, num_bytes: int
) -> dict[str, TensorPlace]:
    """start: of the tensors in the file, which has num_bytes. Tensors follow one another."""
    import gguf

    places, end = [], start
    for name, sizes, number, offset in entries:
        kind = gguf.GGMLQuantizationType(number)
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not sizes or min(sizes) < 1 or sizes[0] % block_len:
            raise ValueError(f"{name} has the sizes {sizes}")
        if start + offset != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        size = math.prod(sizes) // block_len * block_bytes
        place = TensorPlace(kind.name, sizes[::-1], end, size, str(file.resolve()))
        if end + place.num_bytes > num_bytes:
            raise ValueError(f"{name} ends after the file")
        end = _aligned(end + place.num_bytes, alignment)
        places.append((name, place))
    return _named(places)


def _range(count: int, most: int = MOST) -> range:
    if count > most:
        raise ValueError(f"{count} entries")
    return range(count)


def _named(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(entries)
    if len(by_name) != len(entries) or not all(name.isprintable() for name in by_name):
        raise ValueError("it has a name twice, or one that cannot be printed")
    return by_name


def _format(kind: int) -> str:
    if kind not in FORMATS:
        raise ValueError(f"a field of the type {kind}")
    return FORMATS[kind]


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Reader:
    """Reads values one after another. All are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def numbers(self, formats: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(f"<{formats}", self._data, self.position)
        self.position += struct.calcsize(f"<{formats}")
        return numbers

    def string(self) -> str:
        (length,) = self.numbers("Q")
        start, self.position = self.position, self.position + len(_range(length))
        return self._data[start : self.position].decode()

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        if kind != ARRAY:
            return self.string() if kind == STRING else self.numbers(_format(kind))[0]
        kind, length = self.numbers("IQ")
        if kind == STRING:
            return [self.string() for _ in _range(length)]
        return list(self.numbers(f"{len(_range(length))}{_format(kind)}"))

    def entry(self) -> _Entry:
        name, (num_sizes,) = self.string(), self.numbers("I")
        if num_sizes > MOST_SIZES:
            raise ValueError(f"{name} has {num_sizes} sizes")
        return name, self.numbers(f"{num_sizes}Q"), *self.numbers("IQ")
