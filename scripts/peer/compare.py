"""Is this repository's PyTorch engine as fast as vLLM's CPU build?

    scripts/bench_peer [FOLDER [K ..]]

The same checkpoint, prompts, precision, threads and number of tokens. A round does each job once on
either side, in alternating order, such that `none` is next to vLLM; while one side works, the other
is stopped. Every job is done with one token a request too: that is the time to the first token, and
what is left is decoding. K: only so many drafts of vLLM are measured, and what FOLDER has of others
stays.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from studies.document import machine, table
from worker import Done, Job, Settings, Worker

from smartspec_py.bench.ratios import Ratio, interval
from smartspec_py.prompts import PROMPT_SEED, generated

HERE = Path(__file__).parent
SIZES = (1, 8, 32)
POLICIES = ("none", "fixed:1", "fixed:3", "fixed:5", "goodput")
BLOCKS: Mapping[int, tuple[Sequence[int], Sequence[str], int]] = {
    0: (SIZES, POLICIES, 8),
    1: ((32,), ("fixed:1", "goodput"), 3),
    3: (SIZES, ("fixed:3", "goodput"), 3),
    5: ((1,), ("fixed:5", "goodput"), 3),
}
"""By vLLM's drafts a step, for which it is started anew, some minutes where it drafts: requests at
once, ours beside it, and rounds."""

NUM_TOKENS = 48
NUM_THREADS = 2
MAX_CONTEXT_LEN = 512
DTYPE = "float32"
PAIR = {"target": ".smartspec/peer/target", "draft": ".smartspec/peer/draft"}
SEEDS_A_SIZE = 100
VERSION = 2
"""Of the document."""

VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "OMP_NUM_THREADS": str(NUM_THREADS),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Times:
    """Of one job. first_s: with one token a request. whole_s: with NUM_TOKENS."""

    first_s: float
    whole_s: float

    @property
    def token_s(self) -> float:
        """Between a request's tokens, on average; without speculation a step."""
        return (self.whole_s - self.first_s) / (NUM_TOKENS - 1)


@dataclass(frozen=True)
class Found:
    """A pair of measurements by round. name: what this side did. k: what vLLM did."""

    date: str
    num_rows: int
    k: int
    name: str
    ours: Sequence[Times]
    theirs: Sequence[Times]

    def ratio(self, figure: str) -> Ratio | None:
        """Ours over vLLM's: below 1 is faster."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return interval([math.log(getattr(a, figure) / getattr(b, figure)) for a, b in pairs])


def rounds(
    ours: Worker, theirs: Worker, num_rows: int, k: int, names: Sequence[str], num_rounds: int
) -> Iterator[Found]:
    """A first round is not counted."""
    kept: dict[str, list[tuple[Times, Times]]] = {}
    for number in range(-1, num_rounds):
        seed = PROMPT_SEED + SEEDS_A_SIZE * num_rows + number
        prompts = [prompt.text for prompt in islice(generated("mixed", seed), num_rows)]
        peer: Times | None = None
        order = [*reversed(names), "vllm"] if number % 2 else ["vllm", *names]
        mine: dict[str, Times] = {}
        for name in order:
            if name == "vllm":
                peer = _times(theirs, prompts, "none")
            else:
                mine[name] = _times(ours, prompts, name)
        if number >= 0 and peer is not None:
            for name, times in mine.items():
                kept.setdefault(name, []).append((times, peer))
    for name, pairs in kept.items():
        yield Found(today(), num_rows, k, name, [a for a, _ in pairs], [b for _, b in pairs])


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def _times(worker: Worker, prompts: Sequence[str], policy: str) -> Times:
    first = worker.run(Job(prompts, 1, policy))
    whole = worker.run(Job(prompts, NUM_TOKENS, policy))
    _check(whole, len(prompts))
    return Times(first.seconds, whole.seconds)


def _check(done: Done, num_rows: int) -> None:
    if done.num_tokens != num_rows * NUM_TOKENS:
        raise RuntimeError(f"{done.num_tokens} tokens came, {num_rows * NUM_TOKENS} were asked")


def same_texts(ours: Worker, theirs: Worker) -> tuple[int, int]:
    """Requests whose greedy text is the same on both sides, and how many there were."""
    prompts = [prompt.text for prompt in islice(generated("mixed", PROMPT_SEED), 16)]
    pairs = zip(
        ours.run(Job(prompts, NUM_TOKENS)).texts,
        theirs.run(Job(prompts, NUM_TOKENS)).texts,
        strict=True,
    )
    return sum(a == b for a, b in pairs), len(prompts)


@contextmanager
def their_worker(python: str, k: int, log: Path) -> Iterator[Worker]:
    settings = Settings(**PAIR, **_shared(), k=k)
    with (
        log.open("w") as file,
        Worker(python, str(HERE / "theirs.py"), settings, VLLM_ENVIRONMENT, file) as worker,
    ):
        yield worker


def _shared() -> dict[str, object]:
    return {
        "dtype": DTYPE,
        "num_threads": NUM_THREADS,
        "max_sequences": max(SIZES),
        "max_context_len": MAX_CONTEXT_LEN,
    }


def measure(
    python: str, logs: Path, chosen: Sequence[int]
) -> tuple[list[Found], tuple[int, int], list[str]]:
    """What was found, texts that are the same, and what vLLM refused."""
    found: list[Found] = []
    refused: list[str] = []
    same = (0, 0)
    with (
        (logs / "ours.log").open("w") as file,
        Worker(
            sys.executable, str(HERE / "ours.py"), Settings(**PAIR, **_shared()), {}, file
        ) as ours,
    ):
        for k in chosen:
            sizes, names, num_rounds = BLOCKS[k]
            log = logs / f"vllm-{k}.log"
            try:
                with their_worker(python, k, log) as theirs:
                    if k == chosen[0]:
                        same = same_texts(ours, theirs)
                    for num_rows in sizes:
                        say(f"k = {k}, {num_rows} at once")
                        found += rounds(ours, theirs, num_rows, k, names, num_rounds)
            except RuntimeError as error:
                refused.append(f"k = {k}: {error}; {_last_error(log)}")
                say(refused[-1])
    return found, same, refused


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text().splitlines() if "Error" in line]
    return lines[-1][:300] if lines else "no error in its log"


def page(found: Sequence[Found], same: tuple[int, int], refused: list[str], version: str) -> str:
    """Markdown."""
    rows = [
        (
            one.num_rows,
            one.name,
            one.k or "none",
            f"{len(one.ours)}, {one.date}",
            _ms(one.ours, "token_s"),
            _ms(one.theirs, "token_s"),
            _shown(one.ratio("token_s")),
            _shown(one.ratio("first_s")),
            _shown(one.ratio("whole_s")),
        )
        for one in sorted(found, key=lambda one: (one.num_rows, one.k, one.name))
    ]
    header = (
        "at once",
        "ours",
        "vLLM's k",
        "rounds",
        "ours, ms a token",
        "vLLM, ms a token",
        "ratio",
        "first token, ratio",
        "whole answer, ratio",
    )
    parts = [
        "# The PyTorch engine beside vLLM's CPU build",
        f"`scripts/bench_peer`, {machine()}; vllm-cpu {version}; "
        f"the pair of scripts/peer/pair.py (97 M and 5.6 M parameters), {DTYPE}, {NUM_THREADS} "
        f"threads on either side, {NUM_TOKENS} tokens a request, prompts of the mixed workload, "
        "sides in turn.",
        "Ratios are ours over vLLM's, below 1 we are faster; 95 % intervals over the rounds. ms a "
        "token: median over the rounds, of the time between a request's tokens; without "
        "speculation that is a step. vLLM's k is fixed at its start; ours is the policy of the "
        "request.",
        table(header, rows),
        f"Greedy texts that are the same on both sides: {same[0]} of {same[1]}.",
    ]
    if refused:
        parts.append("What vLLM refused:\n\n" + "\n".join(f"- {line}" for line in refused))
    return "\n\n".join(parts) + "\n"


def _ms(times: Sequence[Times], figure: str) -> str:
    return f"{1e3 * statistics.median(getattr(one, figure) for one in times):.1f}"


def _shown(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kept(path: Path) -> list[Found]:
    """What an earlier run wrote there."""
    if not path.is_file():
        return []
    document = json.loads(path.read_text())
    if document["version"] != VERSION:
        return []
    return [
        Found(
            **{name: value for name, value in one.items() if name not in ("ours", "theirs")},
            ours=[Times(**times) for times in one["ours"]],
            theirs=[Times(**times) for times in one["theirs"]],
        )
        for one in document["measured"]
    ]


def main() -> None:
    python, version, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    logs = Path(tempfile.mkdtemp(prefix="bench_peer-"))
    say(f"logs: {logs}")
    chosen = [int(k) for k in sys.argv[4:]] or list(BLOCKS)
    unknown = [k for k in chosen if k not in BLOCKS]
    if unknown:
        sys.exit(f"K: {unknown[0]} is none of {', '.join(map(str, BLOCKS))}")
    found, same, refused = measure(python, logs, chosen)
    found += [one for one in kept(folder / "peer.json") if one.k not in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peer.md").write_text(page(found, same, refused, version))
    document = {
        "format": "smartspec-peer",
        "version": VERSION,
        "machine": machine(),
        "peer": f"vllm-cpu {version}",
        "pair": PAIR,
        "num_tokens": NUM_TOKENS,
        "same_texts": same,
        "refused": refused,
        "measured": [asdict(one) for one in found],
    }
    (folder / "peer.json").write_text(json.dumps(document, indent=1) + "\n")
    print((folder / "peer.md").read_text())


if __name__ == "__main__":
    main()
