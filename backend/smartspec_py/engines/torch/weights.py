"""The weights of a checkpoint, read from its files one tensor at a time, and their compression.

A model is never in memory as a whole in its original precision: each tensor is read, compressed if
asked for, and given to the graph before the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from smartspec_py.engines.torch.checkpoint import ModelError, first_line, quantization, weight_files
from smartspec_py.engines.torch.gguf_folder import INDEX
from smartspec_py.engines.torch.gguf_weights import GgufWeights
from smartspec_py.engines.torch.quantized import QuantizedTensors
from smartspec_py.engines.torch.runner import RunnerConfig, check_finite, check_shape, check_type

CHUNK = 1 << 18
"""Numbers that are compressed at once. The float32 copy stays in the processor's caches: with 64
times as many, it took nine times as long."""


def file_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    """The tensors in the files of a model directory, by the names of the model's parameters.

    Those of safetensors are mapped into memory; those of a GGUF file or a quantised checkpoint
    are dequantised when they are read. Raises ModelError if a file cannot be read.
    """
    if (folder / INDEX).is_file():
        return GgufWeights(folder)
    paths = [folder / file for file in weight_files(str(folder), folder)]
    is_bin = any(path.suffix == ".bin" for path in paths)
    files = _bin_files(folder, paths) if is_bin else _Safetensors(paths)
    settings = quantization(str(folder), folder)
    return QuantizedTensors(files, settings) if settings else files


def _bin_files(folder: Path, paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            found = torch.load(path, mmap=is_zipfile(path), weights_only=True)
        except Exception as error:  # a damaged file can raise any exception of pickle
            reason = first_line(error)
            raise ModelError(f"{folder} cannot be loaded ({reason}): replace its files") from error
        check_tensors(path, found)
        _check_once(path, loaded, found)
        loaded |= found
    return loaded


def check_tensors(path: Path, loaded: Any) -> None:
    """Raise ModelError unless what PyTorch loaded of the file is tensors by name."""
    if not isinstance(loaded, dict) or not all(torch.is_tensor(one) for one in loaded.values()):
        raise ModelError(f"{path} does not have tensors alone: replace it")


def _check_once(path: Path, known: Iterable[str], found: Iterable[str]) -> None:
    """Which of two tensors is right cannot be known. known: names in the files before."""
    if twice := set(known) & set(found):
        raise ModelError(
            f"{path} has the tensor {min(twice)}, and so has another weight file: copy the whole "
            "checkpoint again"
        )


class _Safetensors(Mapping[str, torch.Tensor]):
    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self.types: dict[str, torch.dtype] = {}
        """Known without opening a file for each tensor, which some models have 20,000 of."""
        for path in paths:
            try:
                with safe_open(path, "pt") as file:
                    names = list(file.keys())
                    types = {name: file.get_tensor(name).dtype for name in names}
            except (SafetensorError, RuntimeError) as error:  # such as a type of 6 bits
                reason = first_line(error)
                raise ModelError(f"{path} cannot be loaded ({reason}): replace it") from error
            _check_once(path, self._files, types)
            self._files |= dict.fromkeys(types, path)
            self.types |= types

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def types_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """The types of the tensors by name."""
    if isinstance(tensors, _Safetensors):
        return tensors.types
    return {name: tensor.dtype for name, tensor in tensors.items()}


class FileWeights(Mapping[str, torch.Tensor]):
    """The tensors of a model directory by name, each checked when it is read first."""

    def __init__(self, config: RunnerConfig) -> None:
        """Raises ModelError if a file cannot be read; so does reading a tensor of another type or
        shape, or with a number that is not finite in the precision of the products."""
        self._config = config
        self._tensors = file_tensors(config.path)
        self._checked: set[str] = set()
        self._left_out: set[str] = set()
        self._shapes: dict[str, torch.Size] = {}

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that those of these names have these shapes."""
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def leave_out(self, names: Iterable[str]) -> None:
        """Be without these tensors from now on."""
        self._left_out |= set(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._left_out:
            raise KeyError(name)
        tensor = self._tensors[name]
        if name not in self._checked:
            check_type(name, tensor.dtype, self._config)
            check_shape(name, tensor.shape, self._shapes.get(name, tensor.shape), self._config)
            check_finite(name, tensor, self._config)
            self._checked.add(name)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name not in self._left_out)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A weight [out, in] of integers: weight = (values - zero) * scale.

    8 bits: values int8 [out, in], scale float32 [out, 1], zero 0. 4 bits: values of 0 to 15 in
    groups along `in`, two in a byte, the first in the low half: uint8 [out, in / 2]; scale float32
    [out, groups, 1]; zero uint8 [out, groups, 1].
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class Weights:
    """The weights of a model for its graph, by the names of its parameters.

    Several graphs may use the same object. Each matrix is compressed only once.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.int8 = cache(lambda *names: _joined([to_int8(self.stored(one)) for one in names]))
        """The matrices of these names in 8 bits, as one."""
        self.int4 = cache(
            lambda group, *names: _joined([to_int4(self.stored(one), group) for one in names])
        )
        """The matrices of these names in 4 bits, in groups of this size, as one."""

    def stored(self, *names: str) -> torch.Tensor:
        """The tensors of these names, joined by their first dimension."""
        found = [self.tensors[name].detach() for name in names]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found)


def _joined(parts: list[Compressed]) -> Compressed:
    if len(parts) == 1:
        return parts[0]
    zeros = [one.zero for one in parts]
    return Compressed(
        torch.cat([one.values for one in parts]),
        torch.cat([one.scale for one in parts]),
        torch.cat(zeros) if zeros[0].ndim else zeros[0],
    )


def to_int8(weight: torch.Tensor) -> Compressed:
    """Round each row of a weight [out, in] to 255 levels around 0."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), 1)
    for part in _parts(weight):
        numbers = weight[part].float()
        largest = numbers.abs().amax(1, keepdim=True)
        scale[part] = torch.where(largest > 0, largest / 127, torch.ones(()))
        values[part] = (numbers / scale[part]).round_().to(torch.int8)
    return Compressed(values, scale, torch.zeros((), dtype=torch.uint8))


def to_int4(weight: torch.Tensor, group: int) -> Compressed:
    """Round each group of a row of a weight [out, in] to 16 levels between its least and its
    largest number; 0 is one of them."""
    num_out, num_in = weight.shape
    values = torch.empty(num_out, num_in // 2, dtype=torch.uint8)
    scale = torch.empty(num_out, num_in // group, 1)
    zero = torch.empty(num_out, num_in // group, 1, dtype=torch.uint8)
    for part in _parts(weight):
        numbers = weight[part].float().view(-1, num_in // group, group)
        least = numbers.amin(-1, keepdim=True).clamp_(max=0)
        width = numbers.amax(-1, keepdim=True).clamp_(min=0) - least
        scale[part] = torch.where(width > 0, width / 15, torch.ones(()))
        offset = (-least / scale[part]).round_()
        zero[part] = offset.to(torch.uint8)
        levels = (numbers / scale[part]).round_().add_(offset).clamp_(0, 15).to(torch.uint8)
        first, second = levels.view(-1, num_in // 2, 2).unbind(-1)
        values[part] = first | second << 4
    return Compressed(values, scale, zero)


def _parts(weight: torch.Tensor) -> list[slice]:
    """Rows of at most CHUNK numbers."""
    num_rows = max(1, CHUNK // weight.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(weight), num_rows)]
