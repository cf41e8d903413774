"""The inputs of a pass, and OpenVINO's attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
from openvino.op import _PagedAttentionExtension

from smartspec_py.engines.runtimes.openvino.operators import float_

BLOCK_LEN = 32
"""Tokens per block of keys and values, as OpenVINO's attention operator uses on a CPU."""

INPUTS = {
    "token_ids": np.int64,
    "positions": np.int64,
    "wanted": np.int64,
    "past_lens": np.int32,
    "subsequence_begins": np.int32,
    "block_indices": np.int32,
    "block_indices_begins": np.int32,
}
"""Vectors. Per token: its id and position. `wanted`: the tokens whose logits are needed. Per
sequence: cached tokens, index of its first token, its blocks, and where these begin."""

LONGEST = "max_context_len"
"""A scalar, int32."""


def cache_names(num_layers: int) -> list[str]:
    """Names of the cache inputs [num_blocks, kv_heads, BLOCK_LEN, head_dim]; a pass writes them. In
    8 bits, the last dimension also holds a scale and a zero."""
    return [f"{name}_cache.{i}" for i in range(num_layers) for name in ("key", "value")]


def paged_attention(
    inputs: Mapping[str, Any],
    longest: Any,
    caches: Sequence[Any],
    states: Sequence[Any],
    *,
    num_key_heads: int,
    head_dim: int,
    scaling: float,
    window: int,
    sinks: Any = None,
) -> Any:
    """Attention output [N, heads * D]. inputs, longest: of the pass. caches: of keys and of values.
    states: queries, keys and values, [N, heads * D] each. window: positions that a query sees; 0
    means all. sinks: a score of each head, [1, heads, 1, 1], for a key whose value is 0.

    The operator has many inputs that are not used here; these are empty.
    """
    nothing, no_floats = (
        op.constant(np.zeros(0, np.int32)),
        op.constant(np.zeros(0, np.float32)),
    )
    zero = op.constant(np.int32(0))
    operands = [*states, *caches]
    operands += [inputs["past_lens"], inputs["subsequence_begins"]]
    operands += [inputs["block_indices"], inputs["block_indices_begins"]]
    operands += [float_(scaling), op.constant(np.int32(window)), no_floats, longest]
    # Scores, rotated blocks, sparse attention, sinks, evicted blocks, mask between queries.
    operands += [nothing, nothing, nothing, no_floats, no_floats, zero, zero]
    no_sinks = op.constant(np.zeros((0, 0, 0, 0), np.float32))
    operands += [no_sinks if sinks is None else sinks, zero]
    operands += [nothing, nothing, nothing, nothing]
    # Masks of trees, and where they begin.
    operands += [op.constant(np.zeros(0, np.uint8)), nothing]
    node = _PagedAttentionExtension(
        [one if isinstance(one, ov.Output) else one.output(0) for one in operands]
    )
    info = node.get_rt_info()
    for name in ("k", "v"):
        info[f"num_{name}_heads"] = num_key_heads
        info[f"{name}_head_size"] = head_dim
    return node.output(0)
