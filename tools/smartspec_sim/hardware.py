"""The machine to simulate: a measured profile, or published costs of an H100.

The published costs are of Llama-3-8B with an EAGLE head on one H100. They are fits from the public
vLLM fork of SmartSpec's first author (branches of 2024-10 to 2025-04), made with up to about 30
sequences of traces similar to ShareGPT. A pass of n tokens over B rows with a context of c tokens
each takes, in seconds,

    KV_S B c  +  TOKEN_S n  +  ROW_S min(B, FITTED_ROWS)  +  BASE_S

The negative ROW_S comes from collinear data. So for the same number of tokens per row, times are
not allowed to fall with more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.profile import load_cost

KV_S = 4.859e-8
TOKEN_S = 1.844e-5
ROW_S = -4.331e-5
BASE_S = 6.939e-3
FITTED_ROWS = 32

EAGLE_PASS_S = 0.4522e-3 + 0.4471e-3 / 3
"""Seconds of a draft pass. Each step with drafts also takes a constant 0.4471 ms. A cost per pass
has no such constant, so it is spread over 3 passes."""
EAGLE_ROW_S = 5.528e-6
EAGLE_PREFILL_S = 4.387e-8

TARGET_BYTES = 4 * 32 * 8 * 128
EAGLE_BYTES = 4 * 8 * 128
"""KV cache bytes per token, in 16 bits: 4 * layers * kv_heads * head_dim, by config.json."""

CACHE_BYTES = int(0.9 * 80e9 - 2 * (8.03e9 + 0.25e9))
"""Nine tenths of the GPU's memory, less the weights in 16 bits. Activations, CUDA graphs and the
driver take the rest."""

ROW_GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKEN_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Hardware:
    """A machine with a pair of models, as the simulator needs it.

    target_bytes, draft_bytes: KV cache bytes per token. cache_bytes: memory for both caches; 0
    means that memory is not modelled. notes: sources of the numbers.
    """

    cost: CostModel
    target_bytes: int = 0
    draft_bytes: int = 0
    cache_bytes: int = 0
    notes: tuple[str, ...] = ()


def published() -> Hardware:
    """Llama-3-8B with an EAGLE head on an H100."""

    def target_s(rows: int, num_tokens: int) -> float:
        return TOKEN_S * num_tokens + ROW_S * min(rows, FITTED_ROWS) + BASE_S

    def draft_s(rows: int, num_tokens: int) -> float:
        return EAGLE_PASS_S + EAGLE_ROW_S * rows

    cost = CostModel(
        _table(target_s, TOKEN_GRID, KV_S), _table(draft_s, (1,)), draft_prefill_s=EAGLE_PREFILL_S
    )
    notes = (f"Llama 3 8B with an EAGLE head on an H100: published fit up to {FITTED_ROWS} rows",)
    return Hardware(cost, TARGET_BYTES, EAGLE_BYTES, CACHE_BYTES, notes)


def _table(
    pass_s: Callable[[int, int], float], tokens: tuple[int, ...], context_s: float = 0.0
) -> PassTable:
    """Evaluate the function of rows and tokens on the grid."""
    columns = [list(accumulate((pass_s(r, r * t) for r in ROW_GRID), max)) for t in tokens]
    return PassTable(ROW_GRID, tokens, tuple(zip(*columns, strict=True)), context_s=context_s)


def measured(profile: Path, max_rows: int) -> Hardware:
    """The machine of a profile. Raises OSError, ValueError, KeyError or TypeError."""
    cost = load_cost(profile)
    notes = [f"measured profile {profile.name}"]
    if max_rows > cost.target.rows[-1]:
        notes.append(f"above {cost.target.rows[-1]} rows it is extrapolated with the last slope")
    return Hardware(cost, notes=tuple(notes))
