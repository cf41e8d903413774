"""What the kernels of `runtimes.pytorch.attention` must compute, without Triton's language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smartspec_py.engines.runtimes.pytorch.layout import Line
from smartspec_py.engines.runtimes.pytorch.packed import PLAIN, Scores, Write, write_plainly


def kernels() -> tuple[Callable[..., torch.Tensor], Write]:
    """See `graphs.kernels`."""
    return attend, write_plainly


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lines: torch.Tensor,
    of_layer: Scores = PLAIN,
    *,
    max_len: int,
    **_: Any,
) -> torch.Tensor:
    """Every query against the keys of all rows. Tokens that no tile has get NaN, because nothing
    may read their results, nor the keys that they write to scratch slots."""
    num_slots = len(keys) // max_len * max_len
    keys, values = keys[:num_slots], values[:num_slots]
    (num_tokens, _, head_dim), num_kv_heads = queries.shape, keys.shape[1]
    slot, input_slot, seen = (
        lines[line][:, None] for line in (Line.SLOT, Line.INPUT_SLOT, Line.SEEN)
    )
    key = torch.arange(len(keys), device=keys.device)[None]
    sees = (key <= slot) & (key >= lines[Line.FIRST_SLOT][:, None])
    sees &= key > slot - (of_layer.window or max_len)
    sees &= (key < input_slot) | ((seen >> (key - input_slot).clamp(0, 63)) & 1).bool()
    grouped = queries.view(num_tokens, num_kv_heads, -1, head_dim)
    scores = torch.einsum("nksd,tkd->nkst", grouped, keys)
    scores = scores * of_layer.scale(head_dim)
    if (softcap := of_layer.softcap) is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees[:, None, None], float("-inf"))
    weights = scores.softmax(-1)
    attended = torch.einsum("nkst,tkd->nksd", weights, values).reshape(num_tokens, -1)
    return attended.masked_fill(~_has_tile(lines)[:, None], float("nan"))


def _has_tile(lines: torch.Tensor) -> torch.Tensor:
    """[N]: whether a token belongs to exactly one tile."""
    token = torch.arange(lines.shape[1], device=lines.device)[None]
    num_tiles = torch.zeros_like(lines[0])
    for tile, count in ((Line.SHORT_TILE, Line.SHORT_COUNT), (Line.LONG_TILE, Line.LONG_COUNT)):
        first, last = lines[tile][:, None], (lines[tile] + lines[count])[:, None]
        num_tiles += ((token >= first) & (token < last)).sum(0)
    return num_tiles == 1
