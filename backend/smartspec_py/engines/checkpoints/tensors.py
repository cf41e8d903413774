"""The tensors in the files of a checkpoint, read one at a time, and the checks of their names and
numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from smartspec_py.engines.checkpoints.checks import (
    GRANITE_4,
    GRANITE_MOE,
    WITH_IMAGES,
    ModelError,
    first_line,
    is_plain_granite,
    model_type,
    quantization,
    read_json,
    weight_files,
)
from smartspec_py.engines.checkpoints.experts import ByExpert
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.gguf.weights import GgufWeights
from smartspec_py.engines.checkpoints.quantized import Integers, QuantizedTensors
from smartspec_py.engines.checkpoints.rows import Rows, TensorRows
from smartspec_py.engines.phases import READING, Steps

CONSTANTS = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)(position_ids|version)$|\.(attn|attention)\.(masked_)?bias$"
)
"""Names of tensors that old checkpoints have although they follow from the configuration."""

OF_IMAGES = re.compile(
    r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\."
)
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Beginnings of names in models that read images or audio."""

OWN_HEAD = re.compile(r"^mtp\.")
"""Beginning of names in Qwen3.5: of a head that drafts, which is not read."""

OF_GRANITE = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
}
"""Ends of names in files of Granite, and what they are in Transformers."""

WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def file_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    """The tensors in the files of a model directory, by the names of the model's parameters.

    Those of safetensors are mapped into memory; those of a GGUF file or a quantised checkpoint
    are dequantised when they are read. Raises ModelError if a file cannot be read.
    """
    if (folder / INDEX).is_file():
        return GgufWeights(folder)
    paths = [folder / file for file in weight_files(str(folder), folder)]
    is_bin = any(path.suffix == ".bin" for path in paths)
    files: Mapping[str, torch.Tensor] = _bin_files(folder, paths) if is_bin else _Safetensors(paths)
    kind = model_type(str(folder), folder)
    if kind in WITH_IMAGES:
        files = _LanguageModel(files)
    if settings := quantization(str(folder), folder):
        files = QuantizedTensors(ByExpert(files), settings)
    if kind in (GRANITE_MOE, GRANITE_4):
        document = read_json(str(folder), folder, "config.json") or {}
        return _Granite(files, kind == GRANITE_4 and is_plain_granite(document))
    return files


def _bin_files(folder: Path, paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            tensors = torch.load(path, mmap=is_zipfile(path), weights_only=True)
        except Exception as error:  # a damaged file can raise any exception of pickle
            reason = first_line(error)
            raise ModelError(f"{folder} cannot be loaded ({reason}): replace its files") from error
        check_tensors(path, tensors)
        _check_once(path, loaded, tensors)
        loaded |= tensors
    return loaded


def check_tensors(path: Path, loaded: Any) -> None:
    """Raise ModelError unless what PyTorch loaded of the file is tensors by name."""
    if not isinstance(loaded, dict) or not all(torch.is_tensor(value) for value in loaded.values()):
        raise ModelError(f"{path} does not have tensors alone: replace it")


def _check_once(path: Path, known: Iterable[str], names: Iterable[str]) -> None:
    """Which of two tensors is right cannot be known. known: names in the files before."""
    if twice := set(known) & set(names):
        raise ModelError(
            f"{path} has the tensor {min(twice)}, and so has another weight file: copy the whole "
            "checkpoint again"
        )


class _Safetensors(Mapping[str, torch.Tensor]):
    """The last file stays open: some have 20,000 tensors, and opening takes a millisecond."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._opened: tuple[Path, Any] = Path(), None
        self.types: dict[str, torch.dtype] = {}
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
        opened, path = self._opened, self._files[name]
        if opened[0] != path:
            self._opened = opened = path, safe_open(path, "pt")
        tensor: torch.Tensor = opened[1].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _LanguageModel(Mapping[str, torch.Tensor]):
    """Of a model that reads images, the tensors of its language model by their names in a model
    without images. Transformers writes `language_model.model.` or `model.language_model.`."""

    def __init__(self, files: Mapping[str, torch.Tensor]) -> None:
        self._files = files
        self._names: dict[str, str] = {}
        for in_file in files:
            name = LANGUAGE_MODEL.sub(r"\1", in_file)
            if name in self._names:
                raise ModelError(
                    f"the weight files have both {in_file} and {self._names[name]}: copy the "
                    "whole checkpoint again"
                )
            if not OF_IMAGES.match(in_file):
                self._names[name] = in_file
        types = types_of(files)
        self.types = {name: types[in_file] for name, in_file in self._names.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Granite(Mapping[str, torch.Tensor]):
    """The tensors of a Granite with experts or of a Granite 4 by the names of Transformers. Of a
    plain one, those of its MLPs by their names in a `granite`: the rows of gate and up are those of
    one matrix."""

    def __init__(self, files: Mapping[str, torch.Tensor], is_plain: bool) -> None:
        self._files = files
        self._places: dict[str, tuple[str, int | None]] = {}
        for name in files:
            if not is_plain:
                end = next((end for end in OF_GRANITE if name.endswith(end)), "")
                served = name.removesuffix(end) + OF_GRANITE.get(end, "")
                self._places[served] = name, None
            elif ".shared_mlp.input_linear." in name:
                for half, part in enumerate(("gate_proj", "up_proj")):
                    served = name.replace("shared_mlp.input_linear", f"mlp.{part}")
                    self._places[served] = name, half
            else:
                served = name.replace("shared_mlp.output_linear", "mlp.down_proj")
                self._places[served] = name, None

    def __getitem__(self, name: str) -> torch.Tensor:
        in_file, half = self._places[name]
        tensor = self._files[in_file]
        return tensor if half is None else tensor.chunk(2)[half].clone()  # not both in memory

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def num_bytes(folder: Path) -> int:
    """Bytes of the files with weights."""
    if (index := read_json(str(folder), folder, INDEX)) is not None:
        return int(index["size"])
    return sum((folder / file).stat().st_size for file in weight_files(str(folder), folder))


def source_files(folder: Path) -> list[Path]:
    """The files that decide what the tensors of a model directory are."""
    index = read_json(str(folder), folder, INDEX)
    weights = weight_files(str(folder), folder) if index is None else index["files"]
    return sorted({*folder.glob("*.json"), *(folder / file for file in weights)})


def types_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """The types of the tensors by name."""
    if isinstance(tensors, _Safetensors | _LanguageModel):
        return tensors.types
    return {name: tensor.dtype for name, tensor in tensors.items()}


class CheckedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a model directory by name, each checked when it is read first."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """dtype: of the products. Raises ModelError if a file cannot be read; so does reading a
        tensor of another type or shape, or with a number that is not finite in this precision."""
        self._folder, self._dtype = folder, dtype
        self._tensors = file_tensors(folder)
        if not isinstance(self._tensors, GgufWeights | QuantizedTensors):
            self._tensors = ByExpert(self._tensors)
        self._names = {name: name for name in self._tensors}
        """In the files, by the names of the model's parameters."""
        self._checked: set[str] = set()
        self.shapes: dict[str, torch.Size] = {}
        """Of the model's parameters, once they are known."""
        self._steps: Steps | None = None
        self._lock = Lock()

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that those of these names have these shapes, and report the reading of them."""
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        num_numbers = sum(each.numel() for name, each in tensors.items() if name in self._names)
        self._steps = Steps(READING, num_numbers, num_bytes(self._folder))

    def leave_out(self, names: Iterable[str]) -> None:
        """Be without these tensors from now on."""
        for name in names:
            del self._names[name]

    def rename(self, name: str, parameter: str) -> None:
        """Return the tensor of this name as that of this parameter of the model."""
        self._names[parameter] = self._names.pop(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[self._names[name]]
        if name not in self._checked:
            check_type(name, tensor.dtype, self._folder)
            check_shape(name, tensor.shape, self.shapes.get(name, tensor.shape), self._folder)
            self._check(name, tensor)
            self._checked.add(name)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor when it is read. Does not dequantise it."""
        if isinstance(self._tensors, GgufWeights):
            return self._tensors.dtype(self._names[name])
        return self[name].dtype

    def rows(self, name: str) -> Rows:
        """The matrix; its parts are checked when they are read."""
        matrix: Rows | None = None
        if isinstance(self._tensors, GgufWeights):
            matrix = self._tensors.rows(self._names[name])
        elif isinstance(self._tensors, QuantizedTensors):
            matrix = self._tensors.matrix(self._names[name])
        if matrix is None:
            return TensorRows(self[name])
        check_shape(name, matrix.shape, self.shapes.get(name, matrix.shape), self._folder)
        return _CheckedRows(matrix, partial(self._check, name))

    @property
    def group(self) -> int:
        """See `QuantizedTensors`."""
        return self._tensors.group if isinstance(self._tensors, QuantizedTensors) else 0

    def integers(self, name: str) -> Integers | None:
        """The matrix as its file has it; None if that is in numbers, or in a type of GGUF that is
        neither MXFP4 nor has 4 bits."""
        if not isinstance(self._tensors, QuantizedTensors | GgufWeights):
            return None
        matrix = self._tensors.integers(self._names[name])
        if matrix is not None:
            check_shape(name, matrix.shape, self.shapes.get(name, matrix.shape), self._folder)
            largest = matrix.scales.float() * 2**matrix.num_bits  # or a little more
            check_finite(name, largest, self._dtype, self._folder)
            self._advance(matrix.values.numel())
        return matrix

    def _check(self, name: str, numbers: torch.Tensor) -> None:
        check_finite(name, numbers, self._dtype, self._folder)
        self._advance(numbers.numel())

    def _advance(self, num_numbers: int) -> None:
        if self._steps is not None:
            with self._lock:
                self._steps.add(num_numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _CheckedRows:
    """See `Rows`."""

    def __init__(self, matrix: Rows, check: Callable[[torch.Tensor], None]) -> None:
        self.shape = matrix.shape
        self._matrix, self._check = matrix, check

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        self._matrix.read(rows, numbers)
        self._check(numbers)


def check_complete(missing: Collection[str], folder: Path) -> None:
    """Transformers initialises missing weights at random, so they must be an error here."""
    if missing:
        raise ModelError(
            f"{folder}: the weight files lack {len(missing)} tensors, such as {min(missing)}: "
            "copy the whole checkpoint"
        )


def check_used(
    unexpected: Collection[str], tensors: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """A tensor that the model does not have would be left out, so it must be an error here. Biases
    of 0, which some quantised checkpoints have everywhere, constants and heads change nothing.

    unexpected: names in the files. tensors: the files.
    """
    for name in sorted(unexpected):
        is_zero = name.endswith(".bias") and name in tensors and not tensors[name].any()
        if not (is_zero or CONSTANTS.search(name) or OWN_HEAD.match(name)):
            raise ModelError(
                f"{folder}: the weight files have the tensor {name}, which the model of "
                "config.json has not: use the config.json of this checkpoint, or another model"
            )


def check_tied(is_tied: bool, folder: Path) -> None:
    """is_tied: whether the output layer of a model with tie_word_embeddings is its embedding."""
    if not is_tied:
        raise ModelError(
            f"{folder}: the weight files have an output layer that is not the embedding: set "
            "tie_word_embeddings in config.json to false"
        )


def check_type(name: str, dtype: torch.dtype, folder: Path) -> None:
    """Numbers of other types stand for others, with scales that the files do not have."""
    if dtype not in WEIGHT_TYPES and not CONSTANTS.search(name):
        type_name, *known = (str(kind).removeprefix("torch.") for kind in (dtype, *WEIGHT_TYPES))
        raise ModelError(
            f"{folder}: the weight files have the tensor {name} of the type {type_name}, which "
            f"must be one of {', '.join(known)}: use another checkpoint"
        )


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int], folder: Path) -> None:
    """shape: of the tensor in the files. wanted: of the model of config.json."""
    if tuple(shape) != tuple(wanted):
        raise ModelError(
            f"{folder}: the weight files have the tensor {name} of the shape {tuple(shape)}, "
            f"but its config.json says {tuple(wanted)}: use the config.json of this checkpoint"
        )


def check_finite(name: str, weight: torch.Tensor, dtype: torch.dtype, folder: Path) -> None:
    """Non-finite logits would give empty texts without an error, so reject such weights. dtype: of
    the products."""
    if not weight.is_floating_point() or not weight.numel():
        return
    # The minimum and maximum are NaN if any weight is. This reads the weights once and makes no
    # copy, unlike `isfinite`.
    if not all(math.isfinite(value.to(dtype)) for value in weight.detach().aminmax()):
        raise ModelError(
            f"{folder}: the weights {name} are not all finite in "
            f"{str(dtype).removeprefix('torch.')}: replace the file that holds them, or "
            "set another dtype"
        )
