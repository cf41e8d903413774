"""Is this repository's PyTorch engine as fast as vLLM's CPU build and OpenVINO GenAI?

The same checkpoint, prompts, precision, threads and number of tokens. A round does each job once on
either side, in alternating order, such that `none` is next to the peer; while one side works, the
other is stopped. Every job is done with one token per request too: that is the time to the first
token, and what is left is decoding.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

from peer import pair
from peer.environments import VERSIONS, python_of
from peer.page import NAMES, page, shown
from peer.plan import FULL, SIZES, START_S, Estimate, Planned, plan
from peer.results import (
    DTYPES,
    NUM_TOKENS,
    PEERS,
    Block,
    Dtype,
    Measured,
    Times,
    processor,
    read,
    write,
)
from peer.worker import Job, Settings, Worker, WorkerEnded
from smartspec_bench.progress import duration
from smartspec_bench.prompts import PROMPT_SEED, generated

NUM_THREADS = 2
MAX_CONTEXT_LEN = 512
SEEDS_A_SIZE = 100
NUM_TEXTS = 16
WARM_UP_TOKENS = 8
NUM_TRIES = 3
CACHE = Path(".smartspec/peer")
PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "OMP_NUM_THREADS": str(NUM_THREADS),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def measure(
    planned: Sequence[Planned], pythons: Mapping[str, str], save: Callable[[Block], None]
) -> None:
    """Each block is saved as soon as it is measured."""
    logs = Path(tempfile.mkdtemp(prefix="bench_peer-"))
    say(f"logs: {logs}")
    estimate = Estimate(sum(one.expected_s for one in planned))
    for dtype, blocks in groupby(planned, key=lambda one: one.dtype):
        with (
            (logs / f"ours-{dtype}.log").open("w") as file,
            Worker(sys.executable, "peer.ours", _settings(CACHE / "pair", dtype), {}, file) as ours,
        ):
            for one in blocks:
                before_s = estimate.done_s
                log = logs / f"{one.peer}-{dtype}-{one.k}.log"
                save(measure_block(ours, pythons[one.peer], one, log, estimate))
                estimate.done_s = before_s + one.expected_s


def measure_block(
    ours: Worker, python: str, planned: Planned, log: Path, estimate: Estimate
) -> Block:
    """Raises WorkerEnded where it is our side that ended."""
    label = f"{planned.dtype}, {NAMES[planned.peer]} with k = {planned.k or 'none'}"
    models = CACHE / ("pair" if planned.peer == "vllm" else f"openvino-{planned.dtype}")
    settings = _settings(models, planned.dtype, planned.k)
    module = f"peer.theirs_{planned.peer}"
    measured: list[Measured] = []
    same: tuple[int, int] | None = None
    refused: str | None = None
    say(f"{label}: it starts", estimate)
    try:
        with (
            log.open("w") as file,
            Worker(python, module, settings, PEER_ENVIRONMENT, file) as theirs,
        ):
            same = same_texts(ours, theirs)
            estimate.done_s += START_S[planned.peer]
            say(f"{label}: {same[0]} of {same[1]} greedy texts are the same", estimate)
            for batch_size in planned.sizes:
                measured.append(measure_size(ours, theirs, planned, batch_size, label, estimate))
    except RuntimeError as error:
        if isinstance(error, WorkerEnded) and error.module == ours.module:
            raise
        refused = f"{error}; {_last_error(log)}"
        say(f"{label}: {refused}")
    return Block(
        processor=processor().name,
        dtype=planned.dtype,
        peer=planned.peer,
        k=planned.k,
        version=VERSIONS[planned.peer],
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        is_quick=planned.is_quick,
        same_texts=same,
        refused=refused,
        measured=measured,
    )


def measure_size(
    ours: Worker, theirs: Worker, planned: Planned, batch_size: int, label: str, estimate: Estimate
) -> Measured:
    """All rounds of a number of requests at once. A first round is not counted."""
    found = Measured(batch_size=batch_size, theirs=[], ours={})
    order = ["", *planned.policies]
    for number in range(-1, planned.num_rounds):
        seed = PROMPT_SEED + SEEDS_A_SIZE * batch_size + number
        prompts = [prompt.text for prompt in islice(generated("mixed", seed), batch_size)]
        num_tokens = WARM_UP_TOKENS if number < 0 and planned.is_quick else NUM_TOKENS
        times = {
            name: job_times(ours if name else theirs, prompts, name or "none", num_tokens)
            for name in (reversed(order) if number % 2 else order)
        }
        if number >= 0:
            found = found.with_round(times.pop(""), times)
            estimate.done_s += planned.round_s(batch_size)
            ratios = ", ".join(f"{name} {shown(found.ratio(name))}" for name in planned.policies)
            so_far = f"{batch_size} at once, round {number + 1} of {planned.num_rounds}: {ratios}"
            say(f"{label}, {so_far}", estimate)
    return found


def job_times(worker: Worker, prompts: Sequence[str], policy: str, num_tokens: int) -> Times:
    """Again where a first token took longer than the whole answer: another program was running."""
    for _ in range(NUM_TRIES):
        first = worker.run(Job(prompts, 1, policy))
        whole = worker.run(Job(prompts, num_tokens, policy))
        if whole.num_tokens != len(prompts) * num_tokens:
            raise RuntimeError(f"{whole.num_tokens} tokens came, not {len(prompts)} x {num_tokens}")
        if whole.seconds > first.seconds:
            return Times(round(first.seconds, 6), round(whole.seconds, 6))
    raise RuntimeError("first tokens took longer than whole answers: is the machine quiet?")


def same_texts(ours: Worker, theirs: Worker) -> tuple[int, int]:
    """Requests whose greedy text is the same on both sides, ours with goodput, and how many."""
    prompts = [prompt.text for prompt in islice(generated("mixed", PROMPT_SEED), NUM_TEXTS)]
    mine = ours.run(Job(prompts, NUM_TOKENS, "goodput")).texts
    others = theirs.run(Job(prompts, NUM_TOKENS)).texts
    return sum(a == b for a, b in zip(mine, others, strict=True)), len(prompts)


def _settings(models: Path, dtype: str, k: int = 0) -> Settings:
    return Settings(
        target=str(models / "target"),
        draft=str(models / "draft"),
        dtype=dtype,
        num_threads=NUM_THREADS,
        max_sequences=max(SIZES),
        max_context_len=MAX_CONTEXT_LEN,
        k=k,
    )


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text().splitlines() if "Error" in line]
    return lines[-1][:300] if lines else "no error in its log"


def prepare(dtypes: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """Environments, the pair and its exports, each made once. Returns the peers' interpreters."""
    pythons = {peer: python_of(peer, say) for peer in peers}
    pair.make(CACHE / "pair")
    for dtype in dtypes if "openvino" in peers else ():
        out = CACHE / f"openvino-{dtype}"
        if not out.is_dir():
            say(f"Exporting the pair for OpenVINO in {dtype} (once, some 20 s)")
            command = [pythons["openvino"], "-m", "peer.export", str(CACHE / "pair"), str(out)]
            environment = {**os.environ, **PEER_ENVIRONMENT}
            done = subprocess.run(
                [*command, dtype], env=environment, stderr=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{done.stderr}\nThe export failed.")
    return pythons


def chosen_dtypes(wanted: Dtype | Literal["both"], has_bfloat16: bool) -> list[Dtype]:
    """Ends the program where only bfloat16 is wanted and the processor has none."""
    dtypes: list[Dtype] = list(DTYPES) if wanted == "both" else [wanted]
    if has_bfloat16 or "bfloat16" not in dtypes:
        return dtypes
    without = "this processor has neither avx512_bf16 nor amx_bf16: bfloat16 is left out"
    if wanted == "bfloat16":
        sys.exit(without)
    say(without)
    return ["float32"]


def say(text: str, estimate: Estimate | None = None) -> None:
    left = f"; about {duration(estimate.left_s)} left" if estimate else ""
    print(f"{text}{left}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_peer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, none and goodput alone")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"])
    parser.add_argument("--peer", choices=[*PEERS, "both"], default="both")
    parser.add_argument("--k", type=int, nargs="+", choices=FULL, help="the peers' draft lengths")
    parser.add_argument("--rounds", type=int, metavar="N", help="8 or 3, in a quick run 2")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="FOLDER")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    has_bfloat16 = processor().has_bfloat16
    fastest: Dtype = "bfloat16" if has_bfloat16 else "float32"
    wanted: Dtype | Literal["both"] = options.dtype or (fastest if options.quick else "both")
    dtypes = chosen_dtypes(wanted, has_bfloat16)
    peers = PEERS if options.peer == "both" else [options.peer]
    planned = plan(dtypes, peers, options.k, options.quick, options.rounds)
    if not planned:
        sys.exit("--quick measures k = 0 and 3 alone")
    document = read(options.out / "peer.json")

    def save(block: Block) -> None:
        nonlocal document
        document = document.with_block(block)
        write(options.out, document)
        (options.out / "peer.md").write_text(page(document), encoding="utf-8")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or stopped workers would stay
    try:
        measure(planned, prepare(dtypes, peers), save)
    except KeyboardInterrupt:
        sys.exit(f"Interrupted; the blocks that were complete are in {options.out}.")
    except WorkerEnded as error:
        sys.exit(str(error))
    print(page(document))


if __name__ == "__main__":
    main()
