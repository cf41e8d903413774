"""One batched pass over many sequences with different numbers of new tokens.

The tokens of all sequences are packed into a single row without padding. Linear layers process
exactly these tokens, so verifications of different lengths and prompt chunks share a pass. Only
attention handles rows separately. Each sequence owns one row of a static buffer of keys and values.
The keys of position p are written to place p of the row. A query at position p sees the keys at
positions 0..p of its own row. Keys after p are stale and never read. So a rejected draft needs no
removal; later tokens overwrite it. Tokens of a tree are written one after another as well, and see
only their ancestors among them. If some are accepted, `RowCache.move` brings their keys to where
those of a chain are.

Models come from Hugging Face. Their attention is replaced through Transformers' attention
interface, and their cache is replaced by `RowCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from smartspec_py.core.types import NO_TOKEN
from smartspec_py.engines.device import on_device
from smartspec_py.engines.runtimes.runner import RowInput

ATTENTION_NAME = "smartspec_packed"

MAX_SHORT = 16
"""Inputs of up to this many tokens share one attention call, padded to the longest. Longer inputs
(prompt chunks) get separate attention calls."""

NUM_SCRATCH = 16
"""Slots after the rows, where padded passes write keys that are never read (see `graphs`). One
slot is enough; with sixteen, every layer of the cache starts at a multiple of 64 bytes."""


MAX_SPREAD, MIN_SPREAD = 2, 4
"""The keys of rows are copied if they span more than so many times their number, and so many."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows whose attention is computed in one call.

    tokens: where the group's tokens are in the packed row.
    rows: the cache rows that are read.
    mask: bool [rows, 1, width, context_len], True where the query sees the key. width and
        context_len: query tokens per row and keys per row, both after padding.
    places: [tokens] index of each token among the rows * width padded ones; None if the group needs
        no padding.
    picked: the index of each row that is needed among `rows`; None if all are.
    """

    tokens: slice
    rows: slice
    mask: torch.Tensor
    places: torch.Tensor | None = None
    picked: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer scores keys.

    window: a query at position p sees the keys at p - window + 1 to p; None means all keys up to p.
    scaling: None means D ** -0.5. softcap: scores are limited to +-softcap by tanh before masking.
    """

    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None

    def scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scaling is None else self.scaling


PLAIN = Scores()


class Attention(Protocol):
    """The attention of one pass."""

    def __call__(self, layer: int, queries: torch.Tensor, scores: Scores = PLAIN) -> torch.Tensor:
        """[N, heads, D] -> [N, heads * D] in the cache's precision, over the keys now in the
        rows."""
        ...


class Write(Protocol):
    """Writes the keys and values of a pass to a layer of the cache."""

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        held_keys: torch.Tensor,
        held_values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """keys, values: [kv_heads, N, D]. held_keys, held_values: of all slots, [slots, kv_heads,
        D]. slots: [N]."""
        ...


def write_plainly(
    keys: torch.Tensor,
    values: torch.Tensor,
    held_keys: torch.Tensor,
    held_values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `Write`."""
    for held, new in ((held_keys, keys), (held_values, values)):
        held.index_copy_(0, slots, new.transpose(0, 1).to(held.dtype))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """token_ids, positions: [1, N]. slots: [N], where their keys are written, by `write`. states:
    [N, width], that a head reads. adapters: [N], of the tokens, see `Adapters`; None if no token
    has one."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: Attention
    states: torch.Tensor | None = None
    adapters: torch.Tensor | None = None
    write: Write = write_plainly


def pack(
    inputs: Sequence[RowInput],
    cache: RowCache,
    device: torch.device,
    states: torch.Tensor | None = None,
) -> tuple[PackedBatch, list[int]]:
    """Lay out the inputs: first the short ones in the order of their rows, then the long ones. Also
    returns, of each input, the index of its first token. states: of all tokens of the inputs."""
    order = sorted(
        range(len(inputs)),
        key=lambda i: (len(inputs[i].tokens) > MAX_SHORT, inputs[i].row, inputs[i].position),
    )
    firsts, num_tokens = [0] * len(inputs), 0
    for i in order:
        firsts[i] = num_tokens
        num_tokens += len(inputs[i].tokens)
    ordered = [inputs[i] for i in order]
    short = [item for item in ordered if len(item.tokens) <= MAX_SHORT]
    together = ([short] if short else []) + [[item] for item in ordered[len(short) :]]
    groups, first = [], 0
    for items in together:
        groups.append(_group(items, first, device))
        first += sum(len(item.tokens) for item in items)
    token_ids = [token for item in ordered for token in item.tokens]
    positions = [position for item in ordered for position in item.positions]
    slots = [item.row * cache.block_len + slot for item in ordered for slot in item.slots]
    adapters = [item.adapter for item in ordered for _ in item.tokens]
    if states is not None:
        of_inputs = torch.split(states, [len(item.tokens) for item in inputs])
        states = torch.cat([of_inputs[i] for i in order])
    packed = PackedBatch(
        token_ids=torch.tensor([token_ids], device=device),
        positions=torch.tensor([positions], device=device),
        slots=torch.tensor(slots, device=device),
        attention=PassAttention(groups, cache),
        states=states,
        adapters=torch.tensor(adapters, device=device) if any(adapters) else None,
    )
    return packed, firsts


def complete(
    staged: torch.Tensor, given: torch.Tensor, inputs: Sequence[RowInput], firsts: Sequence[int]
) -> None:
    """Write the given tokens to those of the pass [N] that are NO_TOKEN, in the order of the
    inputs. firsts: see `pack`."""
    places = [
        first + j
        for first, item in zip(firsts, inputs, strict=True)
        for j, token in enumerate(item.tokens)
        if token == NO_TOKEN
    ]
    staged.index_copy_(0, on_device(places, staged.device), given)


def wanted_of(inputs: Sequence[RowInput], firsts: Sequence[int]) -> list[int]:
    """The tokens whose logits are needed, in the order of the inputs. firsts: see `pack`."""
    return [
        first + j
        for first, item in zip(firsts, inputs, strict=True)
        for j in range(len(item.tokens) - item.num_logits, len(item.tokens))
    ]


def _group(items: Sequence[RowInput], first: int, device: torch.device) -> AttentionGroup:
    """One attention call over the cache rows from the first to the last item, padded to the longest
    input. Rows without an input in between compute padding; if there are many, the others are
    copied."""
    rows: Sequence[int] = range(items[0].row, items[-1].row + 1)
    is_spread = len(rows) > max(MIN_SPREAD, MAX_SPREAD * len(items))
    if is_spread:
        rows = [item.row for item in items]
    num_rows, width = len(rows), max(len(item.tokens) for item in items)
    starts, firsts = torch.zeros(2, num_rows, dtype=torch.long)
    places: list[int] = []
    for item in items:
        row, num = rows.index(item.row), len(item.tokens)
        starts[row], firsts[row] = item.position, item.first
        places += range(row * width, row * width + num)
    context_len = max(item.position + len(item.tokens) for item in items)
    is_rectangular = len(places) == num_rows * width
    mask = attention_mask(starts.to(device), firsts.to(device), width, context_len)
    for item in items:
        if item.tree:
            hide_other_branches(mask[rows.index(item.row), 0], item)
    return AttentionGroup(
        slice(first, first + len(places)),
        slice(rows[0], rows[-1] + 1),
        mask,
        None if is_rectangular else torch.tensor(places, device=device),
        torch.tensor(rows, device=device) - rows[0] if is_spread else None,
    )


def hide_other_branches(mask: torch.Tensor, item: RowInput) -> None:
    """Change the causal mask of a row with a tree, bool [width, context_len], in place."""
    num = len(item.tokens)
    bits = torch.from_numpy(item.seen)[:, None] >> torch.arange(num)
    mask[:num, item.position : item.position + num] &= bits.bitwise_and(1).bool().to(mask.device)


def attention_mask(
    starts: torch.Tensor, firsts: torch.Tensor, width: int, context_len: int
) -> torch.Tensor:
    """The mask of rows with `width` new tokens, bool [rows, 1, width, context_len].

    starts: [rows], the slot of each row's first new token. firsts: [rows], the row's first slot
    with a key.
    """
    keys = torch.arange(context_len, device=starts.device)
    slots = starts[:, None] + torch.arange(width, device=starts.device)
    mask = (keys <= slots[:, :, None]) & (keys >= firsts[:, None, None])
    return mask[:, None]


_Read = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""


class RowCache(Cache):  # type: ignore[misc]
    """Keys and values of all rows in one static buffer.

    storage: [layers, 2, rows * block_len + NUM_SCRATCH, kv_heads, head_dim]. `buffer` is the view
    of storage without scratch slots: [layers, 2, rows, block_len, kv_heads, head_dim].
    """

    spreads_nan = True  # 0 times NaN is NaN

    def __init__(self, storage: torch.Tensor, num_rows: int) -> None:
        super().__init__(layers=[])
        self.scratch_slot = storage.shape[2] - NUM_SCRATCH
        self.num_blocks, self.block_len = num_rows, self.scratch_slot // num_rows
        by_slot = storage[:, :, : self.scratch_slot]
        by_token = (num_rows, self.block_len, *storage.shape[3:])
        self.buffer = by_slot.view(*storage.shape[:2], *by_token)
        self._storage = storage
        self.by_slot = [(layer[0], layer[1]) for layer in storage]
        # Keys of the first layer, values of the first layer, keys of the second layer, ..
        self._by_row = self.buffer.flatten(0, 1).transpose(2, 3)
        self.slots = torch.empty(0, dtype=torch.long)
        self.write: Write = write_plainly
        """These two are those of the pass that runs now."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, kv_heads, N, D] to `slots`; `packed_attention` reads the cache itself."""
        self.write(key_states[0], value_states[0], *self.by_slot[layer_idx], self.slots)
        return key_states, value_states

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def read_by(self, group: AttentionGroup) -> _Read:
        """For every layer, views of the keys and values that a group reads: [rows of the group,
        kv_heads, context_len, D]."""
        read = self._by_row[:, group.rows, :, : group.mask.shape[-1]].unbind()
        return list(zip(read[::2], read[1::2], strict=True))

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy the keys and values of slots [n] to other slots [n], of all layers at once."""
        self._storage.index_copy_(2, destinations, self._storage.index_select(2, sources))

    def copy_block(self, source: int, destination: int, num_tokens: int) -> None:
        """See `KeyStore`."""
        self.buffer[:, :, destination, :num_tokens] = self.buffer[:, :, source, :num_tokens]

    def clear(self, blocks: Sequence[int], first: int = 0) -> None:
        """See `KeyStore`."""
        for row in blocks:
            self.buffer[:, :, row, first:] = 0
            first = 0

    def drop(self, blocks: Sequence[int]) -> None:
        """Does nothing: the memory of all rows is one tensor."""


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention: Attention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Transformers calls: query [1, heads, N, D] -> [1, N, heads, D]."""
    assert attention is not None, "the model does not pass keyword arguments on to its attention"
    tokens = query[0].transpose(0, 1)
    attended = attention(module.layer_idx, tokens, Scores(sliding_window, scaling, softcap))
    return attended.view(tokens.shape)[None].to(query.dtype), None


def additive_mask(
    group: AttentionGroup, num_shared: int, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """The mask that is added to scores: 0 or minus infinity, [rows, 1, num_shared * width,
    context_len].

    num_shared: query heads that share a key head, see `attend`. window: see `Scores`.
    """
    seen = group.mask
    if window is not None and window < seen.shape[-1]:
        # The key at j is outside the window exactly if the key at j + window is visible.
        seen = seen.clone()
        seen[..., :-window] &= ~group.mask[..., window:]
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf")).repeat(1, 1, num_shared, 1)


class PassAttention:
    """Attention of one pass by PyTorch. Masks and views are made once and used in all layers."""

    def __init__(self, groups: Sequence[AttentionGroup], cache: RowCache) -> None:
        self._dtype = cache.dtype
        self._calls: list[tuple[AttentionGroup, _Read, dict[int | None, torch.Tensor]]] = [
            (group, cache.read_by(group), {}) for group in groups
        ]

    def __call__(self, layer: int, queries: torch.Tensor, scores: Scores = PLAIN) -> torch.Tensor:
        """See `Attention`."""
        queries, window, parts = queries.to(self._dtype), scores.window, []
        for group, read, masks in self._calls:
            keys, values = read[layer]
            if group.picked is not None:  # copies, so only now, when the keys of the pass are there
                keys, values = keys[group.picked], values[group.picked]
            if window not in masks:
                num_shared = queries.shape[1] // keys.shape[1]
                masks[window] = additive_mask(group, num_shared, self._dtype, window)
            tokens = queries[group.tokens]
            parts.append(attend(tokens, keys, values, group, masks[window], scores))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(
    tokens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    mask: torch.Tensor,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """tokens [N, heads, D] of a group -> [N, heads * D].

    keys, values: of the group's rows, [rows, kv_heads, context_len, D]. mask: see `additive_mask`.
    """
    num_heads, head_dim = tokens.shape[1:]
    num_rows, num_kv_heads = keys.shape[:2]
    width, num_shared = group.mask.shape[2], num_heads // num_kv_heads
    if group.places is not None:
        padded = tokens.new_zeros(num_rows * width, num_heads, head_dim)
        tokens = padded.index_copy_(0, group.places, tokens)
    queries = tokens.view(num_rows, width, num_heads, head_dim).transpose(1, 2)
    # Query heads that share a key head are treated as more query tokens of that head. Then the keys
    # are read once and never copied.
    queries = queries.reshape(num_rows, num_kv_heads, num_shared * width, head_dim)
    if (cap := scores.softcap) is None:
        scale = scores.scaling
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    else:
        scale = scores.scale(head_dim) / cap
        capped = cap * torch.tanh(queries @ keys.transpose(-1, -2) * scale)
        out = torch.softmax(capped + mask, dim=-1) @ values
    out = out.reshape(num_rows, num_heads, width, head_dim).transpose(1, 2)
    out = out.reshape(num_rows * width, num_heads * head_dim)
    return out if group.places is None else out.index_select(0, group.places)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
