"""Pass times of the target on this processor, for each library that can compute it.

Run by `scripts/study passes`, four minutes on a quiet machine, on the pair of `scripts/bench_peer`.
The gain of speculation depends on these times: the cost of 2, 4, 8 or 16 tokens of a sequence,
relative to one. All libraries are timed in turns, and the best of the rounds counts. Results of
other processors in the folder are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from peer.pair import make
from peer.results import processor
from smartspec_bench.progress import tracked
from smartspec_py.engines.torch.openvino_runner import load_openvino_runner
from smartspec_py.engines.torch.runner import Runner, RunnerConfig, load_runner
from studies.document import table, wrapped

PAIR = Path(".smartspec/peer/pair")
NUM_THREADS = 1
"""What the server takes of two cores."""

MAX_ROWS, ROW_LEN, CONTEXT_LEN, VOCAB_SIZE = 32, 512, 192, 2048
ROWS, TOKENS = (1, 8, 32), (1, 2, 4, 8, 16)
NUM_ROUNDS = 7
DTYPES = (torch.float32, torch.bfloat16)

Way = dict[str, list[float]]
"""Milliseconds by rows; for each of TOKENS."""


def runners() -> Iterator[tuple[str, Runner]]:
    has_bfloat16 = processor().has_bfloat16
    for dtype in DTYPES if has_bfloat16 else DTYPES[:1]:
        name = str(dtype).removeprefix("torch.")
        config = RunnerConfig(
            PAIR / "target", torch.device("cpu"), dtype, MAX_ROWS, ROW_LEN, VOCAB_SIZE
        )
        yield f"{name}, PyTorch", load_runner(config)
        yield f"{name}, OpenVINO", load_openvino_runner(config)


def measure() -> dict[str, Way]:
    ways = dict(runners())
    found: dict[str, Way] = {
        name: {str(rows): [float("inf")] * len(TOKENS) for rows in ROWS} for name in ways
    }
    for number in tracked("passes", range(NUM_ROUNDS + 1), "rounds"):
        for name, runner in ways.items():
            for rows in ROWS:
                for i, tokens in enumerate(TOKENS):
                    ms = 1e3 * runner.time_pass(rows, tokens, CONTEXT_LEN)
                    if number:  # the first pass of a shape makes its kernels
                        found[name][str(rows)][i] = min(ms, found[name][str(rows)][i])
    return found


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    header = ["computed in, by", "sequences", *(f"{n} token{'s' * (n > 1)}" for n in TOKENS)]
    for name, one in document.items():
        yield f"## {name}"
        yield wrapped(f"{one['source']}.")
        yield table(
            header,
            [
                [way, rows, *map(_cell, of_rows)]
                for way, ms in one["ways"].items()
                for rows, of_rows in ms.items()
            ],
        )


def _cell(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    make(PAIR)
    folder = Path(sys.argv[1])
    path = folder / "passes.json"
    document = json.loads(path.read_text()) if path.is_file() else {}
    source = f"`scripts/study passes`, {datetime.now(UTC):%Y-%m-%d}, {NUM_THREADS} thread"
    document[processor().name] = {"source": source, "ways": measure()}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    text = "\n\n".join(
        [
            "# Pass times on CPUs",
            wrapped(
                "Milliseconds of a target pass by processor, library and number of tokens per "
                "sequence. The target of `research/peer/pair.py` (97 M parameters), "
                f"{CONTEXT_LEN} tokens of context, best of {NUM_ROUNDS} rounds in turn. See "
                "[CPU performance](../research/performance.md)."
            ),
            *sections(document),
        ]
    )
    (folder / "passes.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
