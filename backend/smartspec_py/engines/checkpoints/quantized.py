"""Reads matrices of quantised checkpoints: GPTQ, AWQ, compressed-tensors, FP8, MXFP4.

All but FP8 have integers [out, in], and a scale and a zero point for each row and group of columns:
weight = (integer - zero point) * scale. They differ in how the files' tensors hold these. FP8 has
numbers of 8 bits [out, in], and a scale for each block. As numbers, weights are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartspec_py.engines.checkpoints.checks import ModelError, first_line
from smartspec_py.engines.checkpoints.rows import whole

Part = Callable[[str], torch.Tensor | None]
"""A tensor of the matrix by the end of its name; None if the files have none."""

PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "blocks",
)
"""Ends of the names of tensors that only quantised matrices have."""

SCALES = ("weight_scale", "weight_scale_inv")
"""Those of matrices whose weight is in the files by its name. Both are factors."""

OF_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "q_zero_point",
    "k_zero_point",
    "v_zero_point",
)
"""The same of tensors that are left out: activations, keys and values are not quantised as the
checkpoint says."""

INTEGERS = ("qweight", "weight_packed", "blocks")
"""Those that stand for the weight. Else, one of SCALES says that the weight is quantised."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

ORDERED = ("group", "dynamic", True)
"""Values of actorder with weight_g_idx."""

MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what its 16 values stand for: whole numbers."""

MXFP4_BYTES = 1.125
"""Of a weight as `Integers`: its number gets 8 bits, and a group of 32 a float32."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ has each of its eight columns."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix as its file has it. See `Rows`.

    values: [out, in], of so many bits in the file; with 4, they are 0 to 15, but those of MXFP4 are
    int8. zeros, scales: [out, groups]; those of MXFP4 and of GGUF's types are float32.
    group_of: of each column; None for adjacent groups of equal size.
    """

    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    num_bits: int
    group_of: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def group(self) -> int:
        """Columns with one scale; 0 if they are not adjacent."""
        return 0 if self.group_of is not None else self.shape[1] // self.scales.shape[1]

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        zeros, scales = self.zeros[rows].float(), self.scales[rows].float()
        numbers.copy_(self.values[rows])
        if self.group_of is None:
            groups = numbers.view(*zeros.shape, -1)
            groups.sub_(zeros[:, :, None]).mul_(scales[:, :, None])
        else:
            numbers.sub_(zeros[:, self.group_of]).mul_(scales[:, self.group_of])


@dataclass(frozen=True, slots=True)
class Floats:
    """A matrix of FP8. See `Rows`.

    values: [out, in]. scales: of blocks, float32 [blocks, blocks]. block: rows and columns of each.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        height, width = self.block
        scales = self.scales[torch.arange(rows.start, rows.stop) // height]
        numbers.copy_(self.values[rows])
        numbers.mul_(scales.repeat_interleave(width, 1)[:, : self.shape[1]])


class QuantizedTensors(Mapping[str, torch.Tensor]):
    """The tensors by the names of the model's parameters. Matrices are dequantised when they are
    read."""

    def __init__(self, stored: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        """settings: quantization_config, which `checks.check_quantization` accepts."""
        self._stored, self._settings = stored, settings
        ends = {name: name.rpartition(".") for name in stored}
        self._matrices = {base for base, _, end in ends.values() if end in (*INTEGERS, *SCALES)}
        self._names = dict.fromkeys(
            f"{base}.weight" if end in INTEGERS else name
            for name, (base, _, end) in ends.items()
            if end in INTEGERS
            or not (end in OF_ACTIVATIONS or (end in PARTS and base in self._matrices))
        )

    @property
    def group(self) -> int:
        """Columns with one scale, if they are adjacent and the same in all matrices of 4 bits as
        far as the settings say; else 0."""
        sizes = _group_sizes(self._settings)
        orders = [self._settings.get("desc_act"), *_of_weights(self._settings, "actorder")]
        return sizes.pop() if len(sizes) == 1 and not any(o in ORDERED for o in orders) else 0

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        matrix = self.matrix(name)
        return self._stored[name] if matrix is None else whole(matrix)

    def integers(self, name: str) -> Integers | None:
        """`matrix`, if it has integers."""
        matrix = self.matrix(name)
        return matrix if isinstance(matrix, Integers) else None

    def matrix(self, name: str) -> Integers | Floats | None:
        """The matrix of this name; None if it is not quantised. Raises ModelError."""
        base, _, end = name.rpartition(".")
        if name not in self._names or end != "weight" or base not in self._matrices:
            return None
        left = {end for end in (*PARTS, "weight") if f"{base}.{end}" in self._stored}

        def part(end: str) -> torch.Tensor | None:
            left.discard(end)
            return self._stored.get(f"{base}.{end}")

        try:
            matrix = READERS[self._settings["quant_method"].lower()](part, self._settings)
            if left:
                raise ValueError(f"{min(left)} is not used")
            return matrix
        except (ValueError, RuntimeError) as error:  # PyTorch names shapes that do not fit
            raise ModelError(
                f"the quantised tensors of {name} do not fit together ({first_line(error)}): "
                "use another checkpoint"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _gptq(part: Part, settings: Mapping[str, Any]) -> Integers:
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], g_idx [in]; n numbers
    are in a word. The first version of the format stores zero points minus 1."""
    bits, scales = settings["bits"], _needed(part, "scales")
    values = _unpacked(_needed(part, "qweight").T, bits)
    zeros = _unpacked(_needed(part, "qzeros"), bits)[:, : scales.shape[1]]
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if version.lower() != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    group_of = part("g_idx")
    if group_of is None and settings.get("desc_act") and len(scales) > 1:
        raise ValueError("no g_idx, but desc_act in config.json")
    return _checked(values, zeros.T, scales.T, bits, settings, group_of=group_of)


def _awq(part: Part, settings: Mapping[str, Any]) -> Integers:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    values, zeros = (
        _unpacked(words, 4).reshape(len(words), -1, 8)[..., AWQ_PLACES].flatten(1)
        for words in (_needed(part, "qweight"), _needed(part, "qzeros"))
    )
    return _checked(values.T, zeros.T, _needed(part, "scales").T, 4, settings)


def _fp8(part: Part, settings: Mapping[str, Any]) -> Floats:
    """weight FP8 [out, in]; weight_scale_inv or weight_scale [blocks, blocks], or one number."""
    scales = part("weight_scale_inv")
    if scales is None:
        scales = _needed(part, "weight_scale")
    return _floats(_needed(part, "weight"), scales, [settings.get("weight_block_size")])


def _floats(values: torch.Tensor, scales: torch.Tensor, blocks: Sequence[Any]) -> Floats:
    """blocks: rows and columns of a block, by each part of the settings; None without blocks."""
    if values.dtype not in FP8 or values.ndim != 2:
        raise ValueError(f"a weight of {values.dtype} {tuple(values.shape)} instead of FP8")
    if not scales.is_floating_point():
        raise ValueError(f"scales of the type {scales.dtype}")
    num_out, num_in = values.shape
    if scales.numel() == 1:
        return Floats(values, scales.float().reshape(1, 1), (num_out, num_in))
    if scales.shape in ((num_out,), (num_out, 1)):
        return Floats(values, scales.float().reshape(-1, 1), (1, num_in))
    for height, width in filter(None, blocks):
        if scales.shape == (-(-num_out // height), -(-num_in // width)):
            return Floats(values, scales.float(), (height, width))
    raise ValueError(f"scales {tuple(scales.shape)} for a matrix {tuple(values.shape)}")


def _compressed_tensors(part: Part, settings: Mapping[str, Any]) -> Integers | Floats:
    """weight int8 [out, in], or weight_packed [out, in / n]; weight_scale [out or 1, groups] or one
    number; weight_zero_point of the same shape. Packed numbers are above those they stand for by
    half of the range; so are the zero points of the result."""
    scales, zeros = _needed(part, "weight_scale"), part("weight_zero_point")
    if (floats := part("weight")) is not None and floats.dtype in FP8:
        return _floats(floats, scales, _of_weights(settings, "block_structure"))
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    if zeros is None:
        symmetric = _of_weights(settings, "symmetric")
        if symmetric and all(value is False for value in symmetric):
            raise ValueError("no weight_zero_point, but symmetric is false in config.json")
        zeros = torch.zeros_like(scales, dtype=torch.int8)
    packed, bits = part("weight_packed"), 8
    if packed is None:
        values = _needed(part, "weight")
    else:
        num_out, num_in = _needed(part, "weight_shape").long().tolist()
        bits = _num_bits(packed, num_in)
        if bits not in (_of_weights(settings, "num_bits") or [bits]):
            raise ValueError(f"numbers of {bits} bits, but another num_bits in config.json")
        values = _unpacked(packed, bits)[:, :num_in]
        if zeros.dtype == torch.int32:
            zeros = _packed_zeros(zeros, bits, num_out)
        elif not zeros.is_floating_point():
            zeros = zeros.short() + 2 ** (bits - 1)
    if values.is_floating_point() or zeros.is_floating_point():
        raise ValueError(f"{values.dtype} and zero points of {zeros.dtype}, not integers")
    group_of = part("weight_g_idx")
    orders = _of_weights(settings, "actorder")
    if group_of is None and orders and all(order in ORDERED for order in orders):
        raise ValueError("no weight_g_idx, but actorder is group in config.json")
    if group_of is not None and bool((group_of == -1).any()):
        group_of = None  # it was never set, and groups are adjacent
    zeros = zeros.reshape(scales.shape)
    return _checked(values, zeros, scales, bits, settings, group_of=group_of)


def _mxfp4(part: Part, settings: Mapping[str, Any]) -> Integers:
    """blocks [out, groups, 16], two numbers in a byte, the first in the low half; scales [out,
    groups], exponents of 2 above 127."""
    blocks, scales = _needed(part, "blocks"), _needed(part, "scales")
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks of {blocks.dtype} and scales of {scales.dtype}")
    if blocks.shape != (*scales.shape, 16) or scales.ndim != 2 or not scales.numel():
        raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)}")
    return mxfp4(blocks, scales)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, is_split: bool = False) -> Integers:
    """See `_mxfp4`. is_split: the second number of a byte comes 16 behind the first, as in GGUF."""
    numbers, byte = torch.tensor(MXFP4, dtype=torch.int8), torch.arange(256)
    both, places = (numbers[byte & 15], numbers[byte >> 4]), blocks.flatten().int()
    if is_split:
        words = (half.index_select(0, places).view(torch.int64).view(-1, 2) for half in both)
        values = torch.cat([*words], 1)
    else:
        values = torch.stack(both, 1).view(torch.int16).flatten().index_select(0, places)
    halves = torch.ldexp(torch.ones(scales.shape), scales.int() - 128)
    zeros = torch.zeros(()).expand_as(halves)
    values = values.view(torch.int8).view(len(blocks), -1)
    return Integers(values, zeros, halves, num_bits=4, group_of=None)


def _group_sizes(settings: Any) -> set[int]:
    """Those in all parts of the settings, which can differ by the layer."""
    if not isinstance(settings, Mapping):
        return set()
    size = settings.get("group_size")
    sizes = {size} if isinstance(size, int) and size > 0 else set()
    return sizes.union(*map(_group_sizes, settings.values()))


def _of_weights(settings: Mapping[str, Any], field: str) -> list[Any]:
    """The field's values for the weights of all config_groups."""
    groups = settings.get("config_groups") or {}
    return [group["weights"].get(field) for group in groups.values()]


def _num_bits(packed: torch.Tensor, num_in: int) -> int:
    for bits in (4, 8):
        if packed.shape[1] == -(-num_in * bits // 32):
            return bits
    raise ValueError(f"{packed.shape[1]} words for {num_in} numbers")


def _packed_zeros(words: torch.Tensor, bits: int, num_out: int) -> torch.Tensor:
    """Since version 0.9.4 of compressed-tensors (April 2025), zero points are packed along `out`:
    int32 [out / n, groups]. Before, and with one scale per matrix, they are int8."""
    if words.ndim != 2 or len(words) != -(-num_out * bits // 32):
        raise ValueError(f"weight_zero_point is int32 {tuple(words.shape)} for {num_out} rows")
    return _unpacked(words.T, bits)[:, :num_out].T


READERS: Mapping[str, Callable[[Part, Mapping[str, Any]], Integers | Floats]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _needed(part: Part, end: str) -> torch.Tensor:
    tensor = part(end)
    if tensor is None:
        raise ValueError(f"no {end}")
    return tensor


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of 4 or 8 bits in int32 words [rows, n], the first in the lowest bits: uint8."""
    if words.is_floating_point() or words.ndim != 2:
        raise ValueError(f"{words.dtype} {tuple(words.shape)} instead of integers in a matrix")
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], -1).flatten(1)


def _checked(
    values: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    num_bits: int,
    settings: Mapping[str, Any],
    group_of: torch.Tensor | None = None,
) -> Integers:
    """values [out, in]; zeros and scales [out or 1, groups]; group_of [in]: the group of each
    column; None for adjacent groups of equal size, which must be one of the settings."""
    (num_out, num_in), num_groups = values.shape, scales.shape[-1]
    if scales.shape not in ((num_out, num_groups), (1, num_groups)) or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {tuple(scales.shape)} and zero points {tuple(zeros.shape)} for a matrix "
            f"{tuple(values.shape)}"
        )
    if not scales.is_floating_point():
        raise ValueError(f"scales of the type {scales.dtype}")
    if group_of is None:
        if num_in % num_groups:
            raise ValueError(f"{num_groups} groups do not divide {num_in} columns")
        size, sizes = num_in // num_groups, _group_sizes(settings)
        if num_groups > 1 and sizes and size not in sizes:
            known = ", ".join(map(str, sorted(sizes)))
            raise ValueError(f"groups of {size} columns, but group_size {known} in config.json")
    else:
        group_of = group_of.long()
        _check_groups(group_of, num_in, num_groups)
        if num_in % num_groups == 0 and torch.equal(
            group_of, torch.arange(num_in) // (num_in // num_groups)
        ):
            group_of = None
    of_all = num_out, num_groups
    return Integers(
        values.contiguous(), zeros.expand(of_all), scales.expand(of_all), num_bits, group_of
    )


def _check_groups(group_of: torch.Tensor, num_in: int, num_groups: int) -> None:
    if group_of.shape != (num_in,) or not 0 <= group_of.min() <= group_of.max() < num_groups:
        raise ValueError(f"indices of groups that are not in 0..{num_groups - 1}")
