"""Attention over the row cache as one kernel for all inputs of a pass, for captured passes.

Written in OpenAI's Triton language, which PyTorch for CUDA contains. All lengths are read on the
device, so that one CUDA graph serves all passes with the same number of tokens. Packing the query
heads that share a key head, and dividing the keys of long rows, are known from FlashDecoding and
from vLLM's Triton backend (arXiv 2511.11581).

A program computes one tile (see `layout`) for one key head. It reads keys in blocks, counted from
slot 0 of the row. At every multiple of SPLIT_KEYS, a new split begins, with a maximum and a sum of
its own, and the splits are joined in their order. In small passes over long rows, each split is a
program of its own; the numbers are the same. So the result for a token depends on its row and on
whether its input is short, and not on the other inputs of the pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from smartspec_py.engines.runtimes.pytorch.layout import SPLIT_KEYS, Line, Tiling
from smartspec_py.engines.runtimes.pytorch.packed import PLAIN, Scores

BLOCK_KEYS = 64

MOST_DIVIDED = 128
"""Splits of larger passes are not computed by several programs: their tiles fill a GPU alone, and
the results of splits need memory."""

LOG2_E = tl.constexpr(1.4426950408889634)
SLOT = tl.constexpr(int(Line.SLOT))
FIRST_SLOT = tl.constexpr(int(Line.FIRST_SLOT))
INPUT_SLOT = tl.constexpr(int(Line.INPUT_SLOT))
SEEN = tl.constexpr(int(Line.SEEN))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lines: torch.Tensor,
    scores: Scores = PLAIN,
    *,
    tiling: Tiling,
    max_len: int,
    context_len: int,
) -> torch.Tensor:
    """The attention of a laid out pass: queries [N, heads, D] -> [N, heads * D]. Padding tokens get
    any numbers.

    keys, values: of all slots, [slots, kv_heads, D], with those of this pass. lines: [lines, N],
    see `layout.Line`. max_len: slots of a row. context_len: no row of the pass has more keys.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_shared = num_heads // num_kv_heads
    num_splits = triton.cdiv(context_len, SPLIT_KEYS) if num_tokens <= MOST_DIVIDED else 1
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    # Of each split: the weighted sum of values, the maximum, and the sum of weights.
    num_parts = num_splits if num_splits > 1 else 0
    sums = out.new_empty((num_parts, *out.shape), dtype=torch.float32)
    peaks, totals = out.new_empty((2, *sums.shape[:-1]), dtype=torch.float32)
    split_results = out, sums, peaks, totals, lines
    numbers = {
        "num_tokens": num_tokens,
        "max_len": max_len,
        "window": scores.window or max_len,
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_SHARED": num_shared,
        "PADDED_SHARED": triton.next_power_of_2(num_shared),
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT": SPLIT_KEYS,
    }
    more: dict[str, Any] = {
        "scale": scores.scale(head_dim),
        "softcap": scores.softcap or 1.0,
        "HAS_SOFTCAP": scores.softcap is not None,
        "BLOCK": BLOCK_KEYS,
        "num_warps": 4,
    }
    given = queries, keys, values, *split_results
    short = lines[Line.SHORT_TILE], lines[Line.SHORT_COUNT]
    is_divided, grid = num_splits > 1, (tiling.num_short(num_tokens), num_kv_heads)
    options = {"TILE": tiling.short, **numbers}
    # More stages hide more of the reads, as far as shared memory allows: 99 KB on small GPUs.
    num_stages = 3 if keys.element_size() <= 2 else 2
    _attend_tiles[*grid, num_splits](
        *given, *short, IS_DIVIDED=is_divided, **options, **more, num_stages=num_stages
    )
    if is_divided:
        _join_splits[grid](*split_results, *short, **options)
    if num_long := tiling.num_long(num_tokens):
        long = lines[Line.LONG_TILE], lines[Line.LONG_COUNT]
        options = {"TILE": tiling.long, **numbers}
        _attend_tiles[num_long, num_kv_heads](
            *given, *long, IS_DIVIDED=False, **options, **more, num_stages=2
        )
    return out.flatten(1)


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    held_keys: torch.Tensor,
    held_values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `Write`. One kernel instead of two, which are slower."""
    num_kv_heads, num_tokens, head_dim = keys.shape
    _write_tokens[num_tokens,](
        keys, values, held_keys, held_values, slots, *keys.stride(), *values.stride(),
        NUM=num_kv_heads * head_dim, PADDED_NUM=triton.next_power_of_2(num_kv_heads * head_dim),
        HEAD_DIM=head_dim,
    )  # fmt: skip


@triton.jit
def _write_tokens(
    keys, values, held_keys, held_values, slots,
    key_head, key_token, key_dim, value_head, value_token, value_dim,
    NUM: tl.constexpr, PADDED_NUM: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The key and value of a token. The numbers after the slots are strides."""
    token = tl.program_id(0)
    number = tl.arange(0, PADDED_NUM)
    is_number = number < NUM
    head, dim = number // HEAD_DIM, number % HEAD_DIM
    at = tl.load(slots + token) * NUM + number
    key = tl.load(keys + head * key_head + token * key_token + dim * key_dim, mask=is_number)
    value_at = head * value_head + token * value_token + dim * value_dim
    value = tl.load(values + value_at, mask=is_number)
    tl.store(held_keys + at, key, mask=is_number)
    tl.store(held_values + at, value, mask=is_number)


@triton.jit(do_not_specialize=["num_tokens", "max_len", "window"])
def _attend_tiles(
    queries, keys, values, out, sums, peaks, totals, lines, tiles, counts,
    num_tokens, max_len, window, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, NUM_SHARED: tl.constexpr, PADDED_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_DIVIDED: tl.constexpr,
):  # fmt: skip
    """A tile for one key head; if IS_DIVIDED, one split of it."""
    count = tl.load(counts + tl.program_id(0))
    if count == 0:
        return
    kv_head = tl.program_id(1)
    token, place, dim, is_query, row_slot, slot, begin, end = _tile(
        lines, tiles, count, num_tokens, max_len, window,
        NUM_KV_HEADS, NUM_SHARED, PADDED_SHARED, PADDED_DIM, TILE,
    )  # fmt: skip
    is_wanted = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    at = place[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + at, mask=is_wanted, other=0.0)
    first_slot = tl.load(lines + FIRST_SLOT * num_tokens + token, mask=is_query, other=0)
    input_slot = tl.load(lines + INPUT_SLOT * num_tokens + token, mask=is_query, other=0)
    seen = tl.load(lines + SEEN * num_tokens + token, mask=is_query, other=0)
    total_sum = tl.zeros([TILE * PADDED_SHARED, PADDED_DIM], tl.float32)
    total_peak = tl.full([TILE * PADDED_SHARED], float("-inf"), tl.float32)
    total = tl.zeros([TILE * PADDED_SHARED], tl.float32)
    if IS_DIVIDED:
        split_begin = tl.program_id(2) * SPLIT
        end = tl.minimum(end, split_begin + SPLIT)
        begin = tl.maximum(begin, split_begin)
        if begin >= end:
            return
    for split_begin in range(begin // SPLIT * SPLIT, end, SPLIT):
        weighted = tl.zeros([TILE * PADDED_SHARED, PADDED_DIM], tl.float32)
        peak = tl.full([TILE * PADDED_SHARED], float("-inf"), tl.float32)
        weight = tl.zeros([TILE * PADDED_SHARED], tl.float32)
        first_key = tl.maximum(begin, split_begin) // BLOCK * BLOCK
        for block in range(first_key, tl.minimum(end, split_begin + SPLIT), BLOCK):
            key = row_slot + block + tl.arange(0, BLOCK)
            is_held = (key < row_slot + end)[:, None] & (dim < HEAD_DIM)[None, :]
            key_at = (key[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
            some_keys = tl.load(keys + key_at, mask=is_held, other=0.0)
            some_values = tl.load(values + key_at, mask=is_held, other=0.0)
            score = tl.dot(query, tl.trans(some_keys), input_precision="ieee") * scale
            if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            place_in_input = tl.minimum(tl.maximum(key[None, :] - input_slot[:, None], 0), 63)
            sees = (key[None, :] <= slot[:, None]) & (key[None, :] >= first_slot[:, None])
            sees &= key[None, :] > slot[:, None] - window
            is_earlier = key[None, :] < input_slot[:, None]
            sees &= is_earlier | (((seen[:, None] >> place_in_input) & 1) == 1)
            score = tl.where(sees, score * LOG2_E, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shrink = tl.exp2(peak - base)
            weights = tl.exp2(score - base[:, None])
            weight = weight * shrink + tl.sum(weights, 1)
            weighted = weighted * shrink[:, None]
            part = tl.dot(weights.to(some_values.dtype), some_values, input_precision="ieee")
            weighted += part
            peak = new_peak
        total_sum, total_peak, total = _joined(total_sum, total_peak, total, weighted, peak, weight)
    if IS_DIVIDED:
        place += tl.program_id(2) * num_tokens * (NUM_KV_HEADS * NUM_SHARED)
        at_sum = place[:, None] * HEAD_DIM + dim[None, :]
        tl.store(sums + at_sum, total_sum, mask=is_wanted)
        tl.store(peaks + place, total_peak, mask=is_query)
        tl.store(totals + place, total, mask=is_query)
    else:
        _store(out, at, total_sum, total, is_wanted)


@triton.jit(do_not_specialize=["num_tokens", "max_len", "window"])
def _join_splits(
    out, sums, peaks, totals, lines, tiles, counts, num_tokens, max_len, window,
    NUM_KV_HEADS: tl.constexpr, NUM_SHARED: tl.constexpr, PADDED_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile for one key head, from the results of its splits."""
    count = tl.load(counts + tl.program_id(0))
    if count == 0:
        return
    _, place, dim, is_query, _, _, begin, end = _tile(
        lines, tiles, count, num_tokens, max_len, window,
        NUM_KV_HEADS, NUM_SHARED, PADDED_SHARED, PADDED_DIM, TILE,
    )  # fmt: skip
    is_wanted = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    at = place[:, None] * HEAD_DIM + dim[None, :]
    total_sum = tl.zeros([TILE * PADDED_SHARED, PADDED_DIM], tl.float32)
    total_peak = tl.full([TILE * PADDED_SHARED], float("-inf"), tl.float32)
    total = tl.zeros([TILE * PADDED_SHARED], tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
        of_split = place + split * num_tokens * (NUM_KV_HEADS * NUM_SHARED)
        at_sum = of_split[:, None] * HEAD_DIM + dim[None, :]
        total_sum, total_peak, total = _joined(
            total_sum,
            total_peak,
            total,
            tl.load(sums + at_sum, mask=is_wanted, other=0.0),
            tl.load(peaks + of_split, mask=is_query, other=float("-inf")),
            tl.load(totals + of_split, mask=is_query, other=0.0),
        )
    _store(out, at, total_sum, total, is_wanted)


@triton.jit
def _tile(
    lines, tiles, count, num_tokens, max_len, window,
    NUM_KV_HEADS: tl.constexpr, NUM_SHARED: tl.constexpr, PADDED_SHARED: tl.constexpr,
    PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of each query of the program's tile and key head: its token, its place among all queries of
    the pass, and its slot. The row's first slot, and the keys that some query sees, from the first
    to the last, counted from there."""
    query = tl.arange(0, TILE * PADDED_SHARED)
    token, shared = query // PADDED_SHARED, query % PADDED_SHARED
    is_query = (token < count) & (shared < NUM_SHARED)
    token += tl.load(tiles + tl.program_id(0))
    place = (token * NUM_KV_HEADS + tl.program_id(1)) * NUM_SHARED + shared
    slot = tl.load(lines + SLOT * num_tokens + token, mask=is_query, other=0)
    first_slot = tl.load(lines + FIRST_SLOT * num_tokens + token, mask=is_query, other=0)
    row_slot = tl.max(slot) // max_len * max_len
    lowest = tl.min(tl.where(is_query, slot, row_slot + max_len))
    begin = tl.maximum(tl.max(first_slot), lowest - window + 1) - row_slot
    end = tl.max(slot) - row_slot + 1
    return token, place, tl.arange(0, PADDED_DIM), is_query, row_slot, slot, begin, end


@triton.jit
def _joined(sums, peaks, totals, more_sums, more_peaks, more_totals):
    """The results of some splits with those of the next one."""
    new_peaks = tl.maximum(peaks, more_peaks)
    base = tl.where(new_peaks == float("-inf"), 0.0, new_peaks)
    shrink, more_shrink = tl.exp2(peaks - base), tl.exp2(more_peaks - base)
    joined = sums * shrink[:, None] + more_sums * more_shrink[:, None]
    return joined, new_peaks, totals * shrink + more_totals * more_shrink


@triton.jit
def _store(out, at, sums, totals, is_wanted):
    """Store weighted means. A query of no token has no weights."""
    means = sums / tl.where(totals > 0.0, totals, 1.0)[:, None]
    tl.store(out + at, means, mask=is_wanted)
