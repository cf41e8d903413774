"""The machines for the papers' claims, as cost models.

- *fit*: published. Llama-3-8B with its EAGLE head on an H100, and Llama-3.1-70B on four with a 1B
  draft: linear fits in the public vLLM fork of SmartSpec's first author, for up to 32 rows.
- *engine*: published. A 7B on an A100 in vLLM of mid-2024, from times that the same author gives in
  vLLM's pull request 5691. That is the engine of the paper's first version.
- *roofline*: assumed. The limits by data sheets, from `smartspec_sim.hardware`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_sim.goodput import expected_tokens
from smartspec_sim.hardware import MODELS, Hardware, gpu_hardware

MAX_ROWS = 256

SCORED_ROWS = (24, 48, 96, 192, 384, 768)
SCORED_MS = (15.4, 17.7, 23.9, 36.4, 54.5, 96.2)
"""vLLM pull request 5691, column BatchExpansionTop1Scorer at 5 drafts and batches of 4 to 128.
Batch expansion verifies k drafts as k + 1 rows of a batch, so the column is also the time of a
decoding pass of that many rows. It includes keys and values of a context that is not stated."""

DRAFT_PASS_S = 1.16e-3
"""At batch 1, proposing takes 10 % of a step at k = 1 and 25 % at k = 5, and verifying 76 and 64 %,
in the same author's fork: 1.75 and 5.2 ms beside 13.3 ms. By interpolation, 3 drafts take 3.5 ms.
The cost per pass has no constant part, so this is a third of it."""

REJECTION_SHARE = 0.12
"""Rejection sampling takes 7 to 9 % of a step, verifying 64 to 76 %. It is charged to the passes
too, so that it is right at this number."""
SPREAD = 3

ENGINE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_ROWS)
ENGINE_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 512, 4096)


@dataclass(frozen=True)
class Gains:
    """Speed relative to no drafts, by draft length from 0."""

    by_length: tuple[float, ...]

    @property
    def best(self) -> int:
        return int(np.argmax(self.by_length))


def gains(
    cost: CostModel, batch_size: int, accept_prob: float, context_len: int, max_draft_len: int
) -> Gains:
    """The expectation by the formulas, if all rows draft the same number."""
    goodput = []
    for k in range(max_draft_len + 1):
        target_s = cost.target_s(batch_size, batch_size * (k + 1), context_len)
        seconds = target_s + k * cost.draft_s(batch_size) + cost.step_host_s(batch_size)
        goodput.append(expected_tokens([accept_prob] * k, k) / seconds)
    return Gains(tuple(g / goodput[0] for g in goodput))


@lru_cache
def machine(name: str) -> Hardware:
    """By its name in `MACHINES`."""
    return MACHINES[name]()


def engine(target: str = "vicuna-7b", num_gpus: int = 1) -> Hardware:
    """The engine of 2024 on A100s of 80 GB, with a draft of 160M.

    A prompt token is charged like a decoded one: 23 ms for a prompt of 227, which is the time of a
    separate pass, because that engine did not mix prompts with decoding. For models larger than the
    7B, target passes take longer in proportion to the weights on each GPU, which is a guess. The
    draft stays on one GPU and takes the same time.
    """
    room = gpu_hardware("a100-80gb", num_gpus, target, "llama-160m", MAX_ROWS)
    larger = MODELS[target].parameters / MODELS["vicuna-7b"].parameters / num_gpus
    seconds = tuple(
        tuple(larger * _scored_s(rows * tokens) for tokens in ENGINE_TOKENS) for rows in ENGINE_ROWS
    )
    draft_s = tuple(
        (DRAFT_PASS_S + larger * REJECTION_SHARE * _scored_s(rows * (1 + SPREAD)) / SPREAD,)
        for rows in ENGINE_ROWS
    )
    cost = CostModel(
        PassTable(ENGINE_ROWS, ENGINE_TOKENS, seconds),
        PassTable(ENGINE_ROWS, (1,), draft_s),
        catch_up_s=room.cost.catch_up_s,
    )
    return replace(room, cost=cost, notes=("vLLM pull request 5691, batch expansion",))


def _scored_s(batch_size: int) -> float:
    """Interpolated between the published points, and extrapolated with the first and the last
    slope."""
    points = list(zip(SCORED_ROWS, SCORED_MS, strict=True))
    if batch_size <= SCORED_ROWS[0]:
        (x, y), (x2, y2) = points[:2]
    elif batch_size >= SCORED_ROWS[-1]:
        (x, y), (x2, y2) = points[-2:]
    else:
        return 1e-3 * float(np.interp(batch_size, SCORED_ROWS, SCORED_MS))
    return 1e-3 * (y + (batch_size - x) * (y2 - y) / (x2 - x))


def _gpu(gpu: str, num_gpus: int, target: str, draft: str) -> Callable[[], Hardware]:
    return partial(gpu_hardware, gpu, num_gpus, target, draft, MAX_ROWS)


MACHINES: Mapping[str, Callable[[], Hardware]] = {
    "engine 7B": engine,
    "engine 33B": partial(engine, "vicuna-33b", 2),
    "fit 8B": _gpu("h100", 1, "llama-3-8b", "eagle"),
    "fit 70B": _gpu("h100", 4, "llama-3.1-70b", "llama-3.2-1b"),
    "roofline A100 7B": _gpu("a100-80gb", 1, "vicuna-7b", "llama-160m"),
    "roofline L40S 7B": _gpu("l40s", 1, "vicuna-7b", "llama-160m"),
    "roofline H100 7B": _gpu("h100", 1, "vicuna-7b", "llama-160m"),
}
