"""The processor: its instructions, and the number of compute threads if engine.json leaves it open.

With all cores but one, other busy processes do not slow down a pass. With few cores, the last one
is worth more: passes are timed with both numbers, and all cores are used if they are clearly
faster.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

MAX_TRIED_CORES = 4
"""With more cores, the last one gains too little for a timing to tell."""

MIN_GAIN = 0.9
"""All cores are used if a pass then takes less than this share of the time."""

NUM_TURNS = 5

TRIED_PASS = (1, 8, 0)
"""Rows, tokens per row and context of the timed pass. One token would say too little: with 8-bit
weights one thread reads them almost as fast as two, and takes twice as long for 8 tokens."""


def thread_counts(configured: int) -> tuple[int, ...]:
    """The numbers to try, ascending. configured: 0 leaves the number open."""
    cores = os.cpu_count() or 1
    if configured or not 1 < cores <= MAX_TRIED_CORES:
        return (configured or max(1, cores - 1),)
    return cores - 1, cores


def set_fastest(counts: Sequence[int], pass_s: Callable[[], float]) -> None:
    """Make PyTorch use one of these numbers of threads.

    pass_s: the seconds of one pass. The numbers take turns, because the speed of a machine changes
    from second to second. The first pass of each turn is not counted.
    """
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(NUM_TURNS if len(counts) > 1 else 0):
        for count in counts:
            torch.set_num_threads(count)
            pass_s()
            seconds[count].append(pass_s())
    chosen = counts[0]
    for count in counts[1:]:
        if statistics.median(seconds[count]) < MIN_GAIN * statistics.median(seconds[chosen]):
            chosen = count
    torch.set_num_threads(chosen)


@cache
def cpu_flags() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def has_vnni() -> bool:
    """Whether the processor multiplies 8-bit integers."""
    return bool(cpu_flags() & {"avx512_vnni", "avx_vnni"})
