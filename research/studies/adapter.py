"""What TensorRT-LLM's adapter costs the loop a step: its own Python, and the bindings' conversion.

Run by `scripts/study adapter`, seconds on a quiet machine. The executor is a stub that answers at
once, so that nothing is timed but the adapter. Every verification resends its whole text, and the
bindings turn its list into a `std::vector<int>`; that happens in their C++ and is measured apart,
by a module of one function that is compiled here with nanobind, as TensorRT-LLM's bindings are.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smartspec_bench.progress import tracked
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import DraftTask, TargetCapabilities, Verify
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from studies.document import publish, table

NUM_REPEATS = 300
VOCAB_SIZE = 128_256
DRAFT_LEN = 4
ASKED_S = 1e-3
SIZES = ((1, 2000), (16, 2000), (64, 500), (64, 2000), (256, 2000))
"""Sequences, and tokens of each. The asked one is the fourth."""

ASKED = (64, 2000)

SOURCE = """
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
NB_MODULE(token_lists, m) {
    m.def("take", [](std::vector<int> tokens) { return tokens.size(); });
}
"""


class Anything:
    """An object of the bindings: keeps what it is made of, as the real ones do."""

    __slots__ = ("args", "options")

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


BINDINGS = SimpleNamespace(
    Request=Anything,
    SamplingConfig=Anything,
    OutputConfig=Anything,
    ExternalDraftTokensConfig=Anything,
    FinishReason=SimpleNamespace(NOT_FINISHED=0, END_ID=1, STOP_WORDS=2, LENGTH=3),
)


@dataclass(slots=True)
class Response:
    request_id: int
    result: Any
    error_msg: str = ""

    def has_error(self) -> bool:
        return False


class StubExecutor:
    """Accepts half of the drafts of every request, at once."""

    def __init__(self) -> None:
        self._next = 0
        self._ids: list[int] = []

    def can_enqueue_requests(self) -> bool:
        return True

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        self._ids = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        return self._ids

    def await_responses(self, timeout: Any) -> list[Response]:
        ids, self._ids = self._ids, []
        return [Response(i, RESULT) for i in ids]

    def get_latest_iteration_stats(self) -> list[Any]:
        return []


RESULT = SimpleNamespace(
    is_final=True, output_token_ids=[[7] * (DRAFT_LEN // 2 + 1)], finish_reasons=[0]
)


@dataclass(frozen=True)
class Row:
    """Medians, seconds."""

    num_sequences: int
    num_tokens: int
    submit_s: float
    poll_s: float
    propose_s: float
    convert_s: float

    @property
    def own_s(self) -> float:
        return self.submit_s + self.poll_s + self.propose_s


def main() -> None:
    out = Path(sys.argv[1])
    take = compiled(Path(tempfile.mkdtemp()))
    sizes = tracked("adapter", SIZES, "sizes")
    rows = [measure(num, length, take) for num, length in sizes]
    publish(
        out,
        "adapter",
        "What TensorRT-LLM's adapter costs a step",
        page(rows),
        {"rows": [vars(row) | {"own_s": row.own_s} for row in rows]},
    )


def measure(num_sequences: int, num_tokens: int, take: Callable[[list[int]], int]) -> Row:
    """One step of this many sequences that all draft and verify, many times over."""
    capabilities = TargetCapabilities(
        num_sequences, 10**6, DRAFT_LEN, 16, None, False, vocab_size=VOCAB_SIZE
    )
    target = TrtllmTarget(StubExecutor(), BINDINGS, capabilities)
    proposer = TrtllmDraftProposer(
        StubExecutor(),
        BINDINGS,
        max_draft_len=DRAFT_LEN,
        max_context_len=10**6,
        vocab_size=VOCAB_SIZE,
    )
    greedy = SamplingParams(end_tokens=(2,))
    texts = [[1000 + n + i % 50_000 for i in range(num_tokens)] for n in range(num_sequences)]
    for sequence, text in enumerate(texts):
        target.begin(sequence, text, num_tokens, greedy)
    tasks = [DraftTask(n, text, num_tokens, DRAFT_LEN, greedy) for n, text in enumerate(texts)]
    work = [Verify(n, (7, 7, 8, 9)) for n in range(num_sequences)]

    def step() -> tuple[float, float, float, float]:
        started = time.perf_counter()
        proposer.propose(tasks)
        proposed = time.perf_counter()
        target.submit(work)
        submitted = time.perf_counter()
        target.poll(1.0)
        polled = time.perf_counter()
        for text in texts:
            take(text)
        converted = time.perf_counter()
        return (
            submitted - proposed,
            polled - submitted,
            proposed - started,
            converted - polled,
        )

    step()
    columns = zip(*(step() for _ in range(NUM_REPEATS)), strict=True)
    return Row(num_sequences, num_tokens, *map(statistics.median, columns))


def compiled(folder: Path) -> Callable[[list[int]], int]:
    """The function of SOURCE. Needs a C++ compiler and the package nanobind."""
    import nanobind

    root = Path(nanobind.include_dir()).parent
    source, library = folder / "token_lists.cpp", folder / "token_lists.so"
    source.write_text(SOURCE)
    subprocess.run(
        [
            *("g++", "-O3", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden"),
            f"-I{sysconfig.get_paths()['include']}",
            f"-I{root / 'include'}",
            f"-I{root / 'ext' / 'robin_map' / 'include'}",
            str(root / "src" / "nb_combined.cpp"),
            *(str(source), "-o", str(library)),
        ],
        check=True,
    )
    spec = importlib.util.spec_from_file_location("token_lists", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[list[int]], int] = module.take
    return function


def page(rows: list[Row]) -> list[str]:
    asked = next(row for row in rows if (row.num_sequences, row.num_tokens) == ASKED)
    verdict = "met" if asked.own_s <= ASKED_S else "missed"
    header = ["sequences", "tokens each", "submit", "poll", "propose", "own", "conversion"]
    lines = [
        [
            str(row.num_sequences),
            str(row.num_tokens),
            *(
                f"{1e3 * s:.3f}"
                for s in (row.submit_s, row.poll_s, row.propose_s, row.own_s, 2 * row.convert_s)
            ),
        ]
        for row in rows
    ]
    return [
        "How much does the adapter's own Python take? "
        f"**{1e3 * asked.own_s:.2f} ms per step at {ASKED[0]} sequences of {ASKED[1]} tokens. The "
        f"goal of at most {1e3 * ASKED_S:.0f} ms is {verdict}.** The conversion of lists to "
        f"vectors takes another {2e3 * asked.convert_s:.2f} ms, once for the draft and once for "
        "the target.",
        f"Medians of {NUM_REPEATS} steps in milliseconds. Every sequence drafts {DRAFT_LEN} tokens "
        "and verifies them.",
        table(header, lines),
        "*submit*, *poll* and *propose* are the adapter's calls, with an executor that answers at "
        "once and bindings that only store their arguments. *Conversion* is the time to make a "
        "`std::vector<int>` of every text twice, measured with a function that is compiled with "
        "nanobind, as the bindings of TensorRT-LLM 1.2 are. The other costs of a `Request` are not "
        "known.",
    ]


if __name__ == "__main__":
    main()
