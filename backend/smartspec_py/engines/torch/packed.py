"""One batched pass over many sequences with different numbers of new tokens.

The tokens of all sequences are packed into a single row, so that every linear layer sees exactly
the tokens there are: verifications of different lengths and prompt chunks share a pass without
padding. Only attention knows rows. Each sequence owns a row of one static buffer of keys and
values; position p of row r is written in place, and a query at position p sees the keys at
positions 0..p of its own row. What lies behind is stale and never seen, so that taking back a
rejected draft is nothing but writing over it later.

Models are Hugging Face's: their attention is replaced through Transformers' attention interface
and their cache by `RowCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION_NAME = "smartspec_packed"

MAX_SHORT = 16
"""Inputs up to this many tokens are attended together, padded to the longest; longer ones
(prompt chunks) are attended one by one."""

CALL_KEYS = 512
"""Keys that attention on a CPU reads in the time of a call of its own, or so."""

KEY_BLOCK = 512
"""PyTorch's attention on a CPU goes through the keys in blocks of so many. How its matrix product
sums a shorter one depends on the processor."""

QUERY_TILE = 4
"""With fewer queries than this, the same product sums in another order."""

NUM_SCRATCH = 16
"""Slots behind the rows, where padded passes write what nobody reads (see `buckets`). One would do;
sixteen leave every layer of the cache on a border of 64 bytes."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """New tokens of one row, the first of them at `position`; logits for the last `num_logits`."""

    row: int
    position: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows whose attention is computed at once.

    first, last: the group's tokens in the packed row, [first, last).
    row_lo, row_hi: the cache rows that are read, [row_lo, row_hi).
    width: query tokens a row, context_len: keys a row, both after padding.
    mask: bool [rows, 1, width, context_len], True where the query may look.
    gather: [rows * width] index of each padded query's token in the group; None where the group
        is already rectangular. scatter: [last - first] where each token stands in the padded form.
    """

    first: int
    last: int
    row_lo: int
    row_hi: int
    width: int
    context_len: int
    mask: torch.Tensor
    gather: torch.Tensor | None
    scatter: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """token_ids, positions, slots: [1, N], [1, N], [N]; wanted: [M] tokens whose logits are asked.

    The order of the inputs is kept in `wanted`: M logits, input after input.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    wanted: torch.Tensor
    groups: tuple[AttentionGroup, ...]


def pack(
    inputs: Sequence[RowInput],
    max_len: int,
    device: torch.device,
    batch_invariant: bool = False,
) -> PackedBatch:
    """Lay out the inputs: short ones, which are attended together, in the order of their rows, then
    the others.

    batch_invariant: attention is padded so that no query's sums depend on what shares the pass;
    max_len must then be a `padded_len`.
    """
    assert not batch_invariant or max_len == padded_len(max_len), "padding would leave the row"
    short = sorted((i for i in inputs if len(i.tokens) <= MAX_SHORT), key=lambda i: i.row)
    long = [i for i in inputs if len(i.tokens) > MAX_SHORT]
    if device.type == "cpu" and not batch_invariant:
        together = _calls(short)
    else:
        together = [short] if short else []
    together += [[item] for item in long]
    ordered = short + long
    firsts, num_tokens = {}, 0
    for item in ordered:
        firsts[item.row] = num_tokens
        num_tokens += len(item.tokens)
    token_ids = [token for item in ordered for token in item.tokens]
    positions = [item.position + j for item in ordered for j in range(len(item.tokens))]
    slots = [
        item.row * max_len + item.position + j for item in ordered for j in range(len(item.tokens))
    ]
    wanted = [
        firsts[item.row] + j
        for item in inputs
        for j in range(len(item.tokens) - item.num_logits, len(item.tokens))
    ]
    return PackedBatch(
        token_ids=torch.tensor([token_ids], device=device),
        positions=torch.tensor([positions], device=device),
        slots=torch.tensor(slots, device=device),
        wanted=torch.tensor(wanted, dtype=torch.long, device=device),
        groups=tuple(
            _group(items, firsts[items[0].row], device, batch_invariant) for items in together
        ),
    )


def _calls(items: Sequence[RowInput]) -> list[list[RowInput]]:
    """Cut the inputs, in the order of their rows, where padding all to the longest context would
    read more than twice what there is, and a call's worth."""
    calls: list[list[RowInput]] = []
    longest = total = 0
    for item in items:
        length = item.position + len(item.tokens)
        longest, total = max(longest, length), total + length
        if not calls or (item.row - calls[-1][0].row + 1) * longest > 2 * total + CALL_KEYS:
            calls.append([])
            longest = total = length
        calls[-1].append(item)
    return calls


def padded_len(context_len: int) -> int:
    """The least length >= context_len at which the sums over keys are those of every longer one."""
    return _round_up(context_len, KEY_BLOCK)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _group(
    items: Sequence[RowInput], first: int, device: torch.device, batch_invariant: bool
) -> AttentionGroup:
    """Rows row_lo..row_hi of the cache, padded to the widest; rows between that have no input
    compute padding."""
    row_lo, row_hi = items[0].row, items[-1].row + 1
    num_rows, width = row_hi - row_lo, max(len(item.tokens) for item in items)
    context_len = max(item.position + len(item.tokens) for item in items)
    if batch_invariant:
        width, context_len = _round_up(width, QUERY_TILE), padded_len(context_len)
    num_tokens = sum(len(item.tokens) for item in items)
    starts = [0] * num_rows
    gather = [0] * (num_rows * width)
    scatter: list[int] = []
    for item in items:
        starts[item.row - row_lo] = item.position
        base = (item.row - row_lo) * width
        for j in range(len(item.tokens)):
            gather[base + j] = len(scatter)
            scatter.append(base + j)
    is_rectangular = num_tokens == num_rows * width
    queries = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return AttentionGroup(
        first=first,
        last=first + num_tokens,
        row_lo=row_lo,
        row_hi=row_hi,
        width=width,
        context_len=context_len,
        mask=causal_mask(queries, context_len),
        gather=None if is_rectangular else torch.tensor(gather, device=device),
        scatter=None if is_rectangular else torch.tensor(scatter, device=device),
    )


def causal_mask(queries: torch.Tensor, context_len: int) -> torch.Tensor:
    """queries: positions [rows, width] -> bool [rows, 1, width, context_len]."""
    keys = torch.arange(context_len, device=queries.device)
    return (keys <= queries[:, :, None])[:, None]


_Read = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""


class RowCache(Cache):
    """Keys and values of all rows in one static buffer, and the moving of a row.

    storage: [layers, 2, num_rows * max_len + NUM_SCRATCH, kv_heads, head_dim]. `buffer` is what
    attention and the moving of rows see of it: [layers, 2, rows, max_len, kv_heads, head_dim].
    """

    def __init__(self, storage: torch.Tensor, num_rows: int) -> None:
        super().__init__(layers=[])
        self.scratch_slot = storage.shape[2] - NUM_SCRATCH
        self.max_len = self.scratch_slot // num_rows
        by_slot = storage[:, :, : self.scratch_slot]
        by_token = (num_rows, self.max_len, *storage.shape[3:])
        self.buffer = by_slot.view(*storage.shape[:2], *by_token)
        self._flat = [(layer[0], layer[1]) for layer in storage]
        # Keys of the first layer, its values, keys of the second, ..
        self._by_row = self.buffer.flatten(0, 1).transpose(2, 3)
        self.slots = torch.empty(0, dtype=torch.long)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, kv_heads, N, D] to `slots`; `packed_attention` reads the cache itself."""
        self.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def write(self, layer: int, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Write [N, kv_heads, D] to `slots`."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, self.slots, new_keys.to(keys.dtype))
        values.index_copy_(0, self.slots, new_values.to(values.dtype))

    def read_by(self, group: AttentionGroup) -> _Read:
        """Of every layer, views of the keys and values that a group reads, [its rows, kv_heads,
        context_len, D]."""
        read = self._by_row[:, group.row_lo : group.row_hi, :, : group.context_len].unbind()
        return list(zip(read[::2], read[1::2], strict=True))

    def copy_row(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of a row's first tokens."""
        self.buffer[:, :, destination, :num_tokens] = self.buffer[:, :, source, :num_tokens]


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention: PassAttention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers calls it: query [1, heads, N, D] -> [1, N, heads, D]."""
    assert attention is not None, "the model does not pass keyword arguments on to its attention"
    tokens = query[0].transpose(0, 1)
    attended = attention(module.layer_idx, tokens, sliding_window, scaling, softcap)
    return attended.view(tokens.shape)[None].to(query.dtype), None


def additive_mask(
    group: AttentionGroup, num_shared: int, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """What is added to scores: 0 or minus infinity, [rows, 1, num_shared * width, context_len].

    num_shared: query heads that share a key head, see `attend`. window: a query at position p sees
    the keys at p - window + 1 to p; None for all up to p.
    """
    seen = group.mask
    if window is not None and window < group.context_len:
        # The key at j is outside the window exactly where the one at j + window is visible.
        seen = seen.clone()
        seen[..., :-window] &= ~group.mask[..., window:]
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf")).repeat(1, 1, num_shared, 1)


class PassAttention:
    """Attention of one pass: what is the same in all of its layers is made once."""

    def __init__(self, packed: PackedBatch, cache: RowCache) -> None:
        self._dtype = cache.dtype
        self._calls: list[tuple[AttentionGroup, _Read, dict[int | None, torch.Tensor]]] = [
            (group, cache.read_by(group), {}) for group in packed.groups
        ]

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        window: int | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """[N, heads, D] -> [N, heads * D] in the cache's precision, over what the layer's rows hold
        by now. window: see `additive_mask`. softcap: see `attend`."""
        queries, parts = queries.to(self._dtype), []
        for group, read, masks in self._calls:
            keys, values = read[layer]
            if window not in masks:
                num_shared = queries.shape[1] // keys.shape[1]
                masks[window] = additive_mask(group, num_shared, self._dtype, window)
            tokens = queries[group.first : group.last]
            parts.append(attend(tokens, keys, values, group, masks[window], scaling, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(
    tokens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """tokens [N, heads, D] of a group -> [N, heads * D].

    keys, values: of its rows, [rows, kv_heads, context_len, D]. mask: see `additive_mask`.
    softcap: scores are squashed to within +- this before they are masked.
    """
    num_heads, head_dim = tokens.shape[1:]
    num_rows, num_kv_heads = keys.shape[:2]
    padded = tokens if group.gather is None else tokens.index_select(0, group.gather)
    queries = padded.view(num_rows, group.width, num_heads, head_dim).transpose(1, 2)
    num_shared = num_heads // num_kv_heads
    if num_shared > 1:
        # Query heads that share a key head stand in as further query tokens of that head: the
        # keys are then read once and never copied.
        queries = queries.reshape(num_rows, num_kv_heads, num_shared * group.width, head_dim)
    if softcap is None:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    else:
        scale = head_dim**-0.5 if scaling is None else scaling
        scores = softcap * torch.tanh(queries @ keys.transpose(-1, -2) * (scale / softcap))
        out = torch.softmax(scores + mask, dim=-1) @ values
    if num_shared > 1:
        out = out.reshape(num_rows, num_heads, group.width, head_dim)
    out = out.transpose(1, 2).reshape(num_rows * group.width, num_heads * head_dim)
    return out if group.scatter is None else out.index_select(0, group.scatter)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
