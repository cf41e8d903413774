"""Part: pass times, compared with the memory bandwidth, and the best k according to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from smartspec_bench.gpu.document import Bandwidth
from smartspec_bench.gpu.pair import Pair
from smartspec_bench.gpu.plan import BANDWIDTH_GOAL, MAX_CONTEXT_LEN, MAX_DRAFT_LEN
from smartspec_py.engines.base import Profilable
from smartspec_py.serving.step import StepRecord
from smartspec_sim.goodput import expected_tokens

NUM_PASSES, NUM_WARM_UPS = 30, 3
NUM_TIMES = 5
"""Passes of each size that are not timed; the first may be slow."""

CONTEXT_LEN = MAX_CONTEXT_LEN // 2


def bandwidth(pair: Pair, copy_gb_per_s: float) -> Bandwidth:
    """Time a pass over one token of one sequence; no server may run. Only the weights are counted
    as read: 14 GB in 4 ms are 3500 GB/s."""
    seconds = _passes_s(pair.target)
    bytes_read = pair.info.target.bytes_read
    return Bandwidth(
        bytes_read=bytes_read,
        context_len=CONTEXT_LEN,
        median_ms=1e3 * median(seconds),
        best_ms=1e3 * min(seconds),
        plain_ms=None if pair.plain is None else 1e3 * median(_passes_s(pair.plain)),
        copy_gb_per_s=copy_gb_per_s,
        share=bytes_read / median(seconds) / (1e9 * copy_gb_per_s),
        goal=BANDWIDTH_GOAL,
    )


def _passes_s(engine: Profilable) -> list[float]:
    """Seconds of each pass over one token of one sequence, after a warm-up."""
    seconds = [engine.time_pass(1, 1, CONTEXT_LEN) for _ in range(NUM_WARM_UPS + NUM_PASSES)]
    return seconds[NUM_WARM_UPS:]


def accept_probs(records: Sequence[StepRecord]) -> list[float]:
    """Acceptance probability of draft 1, 2, .., if those before it were accepted, for the drafts
    that were tried.

    Of two verifications of 3 drafts, with 1 and 3 accepted, draft 1 was right both times, draft 2
    once in two, draft 3 once in one: 1, 1/2, 1.
    """
    events = [event for record in records for event in record.events if event.num_drafted]
    found: list[float] = []
    for index in range(MAX_DRAFT_LEN):
        tried = [e for e in events if e.num_drafted > index and e.num_accepted >= index]
        if not tried:
            break
        found.append(sum(e.num_accepted > index for e in tried) / len(tried))
    return found


@dataclass(frozen=True)
class PassTimes:
    """target_ms: of a pass over 1 + k tokens per sequence, by k from 0. draft_ms: of a pass over
    one."""

    target_ms: list[float]
    draft_ms: float


def pass_times(pair: Pair, batch_size: int) -> PassTimes:
    """The best of several passes, as in the cost profile, but at every k; no server may run."""
    widths = range(1, MAX_DRAFT_LEN + 2)
    return PassTimes(
        [_best_ms(pair.target, batch_size, width) for width in widths],
        _best_ms(pair.draft, batch_size, 1),
    )


def _best_ms(engine: Profilable, batch_size: int, width: int) -> float:
    return 1e3 * min(engine.time_pass(batch_size, width, CONTEXT_LEN) for _ in range(NUM_TIMES))


def predicted_tps(batch_size: int, times: PassTimes, probs: Sequence[float]) -> list[float]:
    """Tokens a second by k from 0, without the loop's own time:

    rows * (1 + s(1) + .. + s(k)) / (target pass over 1 + k tokens + k draft passes)
    """
    return [
        1e3 * batch_size * expected_tokens(probs, k) / (times.target_ms[k] + k * times.draft_ms)
        for k in range(len(probs) + 1)
    ]
