"""Noise as a fixed function of its keys: (seed, position, stream) and, for Gumbel noise, the token.

The generator is counter-based and uses SplitMix64's finaliser. So each number can be computed
alone, in any order and on any device. Never change the numbers: texts that were stored with a seed
would change with them.
"""

from __future__ import annotations

from enum import Enum

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM_STEP = 0xD1B54A32D192ED03


class Stream(Enum):
    """The purpose of a number. Numbers of one position that are used in the same decision must be
    independent. Otherwise the text does not follow the target's distribution."""

    TARGET = 0  # the target's own draw; also the draft model's draw in coupled verification
    DRAFT = 1  # the draft model's draw if drafts are verified by rejection
    ACCEPT = 2  # whether such a draft is accepted
    RESIDUAL = 3  # the draw that replaces a rejected draft


def noise_key(seed: int, position: int, stream: Stream = Stream.TARGET) -> int:
    """Mix the three values into one key: a signed 64-bit integer, as PyTorch needs."""
    key = _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)
    if stream is not Stream.TARGET:
        key = _mix(key ^ (stream.value * _STREAM_STEP & _MASK))
    return _signed(key)


def gumbel_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n, m], float64, for keys [n] and tokens [n or 1, m]."""
    return _uniform(keys[:, None], tokens).log_().neg_().log_().neg_()


def uniform_noise(keys: torch.Tensor) -> torch.Tensor:
    """One number in (0, 1) for each key [n], float64."""
    return _uniform(keys, torch.zeros_like(keys))


def _uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = _mix_tensor_(keys + (tokens + 1) * _signed(_GOLDEN))
    # 52 bits plus one half are exact in float64, so no result is 0 or 1.
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_tensor_(x: torch.Tensor) -> torch.Tensor:
    """`_mix` on an int64 tensor, in place. Products wrap around; right shifts need a mask."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
