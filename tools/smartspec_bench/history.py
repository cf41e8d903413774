"""What a history of prompt lookup takes: bytes of memory, and processor time per token.

`python -m smartspec_bench.history 1000000 10000000` fills a history of each size twice over with
texts of 500 random tokens, and searches it. Frequent tokens have Zipf's distribution, as in texts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from smartspec_py.engines.drafts.history import MAX_MATCH, History, Text

LEN = 500
"""Tokens of a text."""

NUM_TEXTS, NUM_SEARCHES, NUM_DRAFTS = 2000, 10_000, 8


def main(sizes: list[int], say: Callable[[str], object] = print) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.zipf(1.3, LEN).clip(0, 150_000).tolist() for _ in range(NUM_TEXTS)]
    for size in sizes:
        say(measured(size, texts))


def measured(size: int, texts: list[list[int]]) -> str:
    """One line about a history of this many tokens."""
    before, history = _resident_bytes(), History(size, ngram=2)
    num = 2 * size // LEN + 1
    add_us = _timed_us(lambda: _fill(history, texts, num)) / (num * LEN)
    search_us = _timed_us(lambda: _search(history, texts)) / NUM_SEARCHES
    per_token = history.num_bytes / size
    return (
        f"{size} tokens: {per_token:.1f} bytes per token, "
        f"{1e-6 * (_resident_bytes() - before):.0f} MB resident after {num * LEN} tokens; "
        f"{add_us:.2f} us per token, {search_us:.1f} us per search"
    )


def _fill(history: History, texts: list[list[int]], num: int) -> None:
    for text in islice(cycle(texts), num):
        history.extend(Text(history, 0, 0), text)


def _search(history: History, texts: list[list[int]]) -> None:
    for number, text in enumerate(islice(cycle(texts), NUM_SEARCHES)):
        end = MAX_MATCH + number % (LEN - MAX_MATCH)
        history.find(text[end - MAX_MATCH : end], NUM_DRAFTS)


def _timed_us(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return 1e6 * (time.process_time() - begin)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
