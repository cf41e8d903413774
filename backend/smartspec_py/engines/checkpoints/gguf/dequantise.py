"""The numbers of GGUF's quantised types.

The types of most files are computed here. The package gguf computes the others, which takes 5 to
10 times as long.

A row is a sequence of blocks of 32 or 256 numbers. The functions take the bytes of many blocks and
compute all of their numbers at once: first integers, of which eight bytes are in a word, and then
float32. Products and sums are those of the format's definition, so the numbers have its bits.
Format: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from smartspec_py.engines.checkpoints.quantized import Integers, mxfp4

MXFP4 = "MXFP4"

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 values of IQ4_NL stand for."""


def dequantise(stored: torch.Tensor, kind: str, numbers: torch.Tensor) -> None:
    """Write the numbers, float32 [rows, width], of bytes [rows, bytes per row] of this type."""
    if kind not in KINDS:
        _by_package(stored, kind, numbers)
        return
    block_bytes, block_len, compute = KINDS[kind]
    compute(stored.view(-1, block_bytes), numbers.view(-1, block_len))


def integers_of(stored: torch.Tensor, kind: str) -> Integers | None:
    """What bytes [rows, bytes per row] of this type stand for, if it has 4 bits or is MXFP4:
    integers in groups of 32, equal but for the last bit."""
    if kind == MXFP4:
        return _of_mxfp4(stored.view(-1, KINDS[kind][0]), len(stored))
    if kind not in FOUR_BITS:
        return None
    block_bytes, _, _ = KINDS[kind]
    blocks = stored.view(-1, block_bytes)
    integers, scales, least = FOUR_BITS[kind](blocks)
    # A block of equal numbers may have no scale.
    is_equal = scales == 0
    zeros = torch.where(is_equal, 1.0, -least / scales)
    integers.view(*scales.shape, 32)[is_equal] = 0
    scales = torch.where(is_equal, -least, scales)
    integers, zeros, scales = (each.view(len(stored), -1) for each in (integers, zeros, scales))
    return Integers(integers, zeros, scales, num_bits=4, group_of=None)


def _of_mxfp4(blocks: torch.Tensor, num_rows: int) -> Integers:
    blocks = blocks.view(num_rows, -1, blocks.shape[1])
    return mxfp4(blocks[..., 1:], blocks[..., 0], is_split=True)


def _by_package(stored: torch.Tensor, kind: str, numbers: torch.Tensor) -> None:
    import gguf

    found = gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    numbers.copy_(torch.from_numpy(found))


def _q8_0(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    numbers.copy_(blocks[:, 2:].view(torch.int8)).mul_(_halves(blocks, 0))


def _q4_0(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    numbers.copy_(_bytes(_nibbles(blocks[:, 2:], 16))).sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    numbers.copy_(_bytes(_nibbles(blocks[:, 4:], 16)))
    numbers.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    integers = _nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    numbers.copy_(_bytes(integers)).sub_(16).mul_(_halves(blocks, 0))


def _q5_1(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    integers = _nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    numbers.copy_(_bytes(integers)).mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _iq4_nl(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    places = _bytes(_nibbles(blocks[:, 2:], 16)).int()
    numbers.copy_(torch.tensor(LEVELS, dtype=torch.int8)[places]).mul_(_halves(blocks, 0))


def _mxfp4(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    _of_mxfp4(blocks, len(blocks)).read(slice(None), numbers)


def _q4_k(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    numbers.copy_(_bytes(_nibbles(blocks[:, 16:], 32)))
    _scale(numbers, blocks)


def _q5_k(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    integers = _nibbles(blocks[:, 48:], 32).view(-1, 8, 4)
    high = _words(blocks[:, 16:48])
    for i in range(8):
        integers[:, i] |= (high >> i & _each(1)) << 4
    numbers.copy_(_bytes(integers))
    _scale(numbers, blocks)


def _q6_k(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    integers = _nibbles(blocks[:, :128], 64).view(-1, 2, 4, 4)
    high = _words(blocks[:, 128:192]).view(-1, 2, 4)
    for i in range(4):
        integers[:, :, i] |= (high >> 2 * i & _each(3)) << 4
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    numbers.copy_(_bytes(integers)).sub_(32)
    numbers.view(-1, 16, 16).mul_(scales[:, :, None])


KINDS: dict[str, tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    "Q8_0": (34, 32, _q8_0),
    "Q4_0": (18, 32, _q4_0),
    "Q4_1": (20, 32, _q4_1),
    "Q5_0": (22, 32, _q5_0),
    "Q5_1": (24, 32, _q5_1),
    "IQ4_NL": (18, 32, _iq4_nl),
    MXFP4: (17, 32, _mxfp4),
    "Q4_K": (144, 256, _q4_k),
    "Q5_K": (176, 256, _q5_k),
    "Q6_K": (210, 256, _q6_k),
}
"""Bytes of a block, its numbers, and what computes them of blocks [n, bytes], as float32 [n,
numbers]."""


def _four_bits_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = _halves(blocks, 0)
    return _bytes(_nibbles(blocks[:, 2:], 16)), scales, -8 * scales


def _four_bits_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _bytes(_nibbles(blocks[:, 4:], 16)), _halves(blocks, 0), _halves(blocks, 2)


def _four_bits_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales, least = _scales(blocks)
    return _bytes(_nibbles(blocks[:, 16:], 32)), scales, -least


FOUR_BITS = {"Q4_0": _four_bits_0, "Q4_1": _four_bits_1, "Q4_K": _four_bits_k}
"""For each type of 4 bits, what computes of blocks [n, bytes] the integers, uint8 [n, numbers], and
for each 32 of them the scale and what integer 0 stands for, float32 [n, numbers / 32]."""


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at this byte, as float32 [blocks, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _words(part: torch.Tensor) -> torch.Tensor:
    """Eight bytes in each: int64 [blocks, bytes / 8]."""
    return part.contiguous().view(torch.int64)


def _each(byte: int) -> int:
    """A word with this in each byte."""
    return int.from_bytes(bytes([byte] * 8), "little")


def _nibbles(part: torch.Tensor, num: int) -> torch.Tensor:
    """Of each `num` bytes, the low halves and then the high ones, as bytes in words [blocks, n]."""
    words = _words(part).view(len(part), -1, num // 8)
    return torch.stack([words & _each(15), words >> 4 & _each(15)], 2).flatten(1)


def _fifth_bits(part: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, each as 16 in a byte: words [blocks, 4]."""
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    bits = (byte >> torch.arange(8, dtype=torch.uint8) & 1) << 4
    return bits.view(torch.int64).flatten()[part.int()]


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """[blocks, 32 or 256]"""
    return words.view(torch.uint8).view(len(words), -1)


def _scale(numbers: torch.Tensor, blocks: torch.Tensor) -> None:
    scales, least = _scales(blocks)
    numbers.view(-1, 8, 32).mul_(scales[:, :, None]).sub_(least[:, :, None])


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: each 32 numbers have a scale and a minimum of 6 bits."""
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], 1) * _halves(blocks, 0)
    least = torch.cat([middle & 63, high >> 4 | (middle >> 2 & 48)], 1) * _halves(blocks, 2)
    return scales, least
