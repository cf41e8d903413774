"""The study's load on a real server: texts, their oracle, records and step traces.

All prompts are answered with known texts. They are generated once without drafts, and each prompt
then asks for as many tokens as its text has. So a request ends by its length, and the accepted
drafts at each position are known for every draft length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from smartspec_bench.prompts import MIXED, generated
from smartspec_bench.streams import step_trace
from smartspec_launch.triton_server import TritonServer, free_address
from smartspec_py.core.types import FinishReason
from smartspec_py.serving.config import LimitsConfig, ServerConfig, TorchEngineConfig
from smartspec_sim.traces.oracle import OracleSequence, ProposerTrace, read_oracle

BENCH = Path(".smartspec/bench")
TARGET, DRAFT = "88m", "4m"

PROMPT_SEED = 7_700_017
"""Seed of the prompts. It differs from the seeds of the shipped pair's training."""

MAX_TOKENS = 64
ALL_AT_ONCE = 1000.0
"""Requests per second that fill the queue before the first of them ends."""

PREFILL_CHUNK = 128
LIMITS = LimitsConfig(
    max_sequences=16,
    max_queue=256,
    max_context_len=512,
    prefill_chunk=PREFILL_CHUNK,
    reuse_prefixes=False,
)
"""Prompts occur several times in a run, and the simulator does not model prefix reuse."""

NUM_STEPS = 1024
"""As many as the server keeps."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One load on the server. share: of the policy's saturation rate; None sends all at once.

    name: of its files, the record NAME.jsonl and the step trace NAME.steps.jsonl.
    """

    name: str
    policy: str
    share: float | None
    rate: float
    repeat: int

    def record(self, folder: Path) -> Path:
        return folder / f"{self.name}.jsonl"

    def steps(self, folder: Path) -> Path:
        return folder / f"{self.name}.steps.jsonl"


def warm_up_of(policy: str) -> Run:
    """The first load of a policy, all at once. Its figures are not used."""
    return Run(f"warm-{policy.replace(':', '')}", policy, None, ALL_AT_ONCE, 0)


def expand_pair(say: Say) -> None:
    """The pair of the benchmarks, as `scripts/bench` makes it."""
    for source, name in (("target", TARGET), ("draft", DRAFT)):
        if not (BENCH / name).is_dir():
            say(f"expanding {name}")
            BENCH.mkdir(parents=True, exist_ok=True)
            _smartspec(
                "expand", f"engines_build/tiny/{source}", str(BENCH / name), "--preset", name
            )


def write_prompts(folder: Path, num_prompts: int, dtype: str) -> None:
    """The prompts with the lengths of their texts, and the oracle trace of these texts."""
    plain, oracle = folder / "plain.jsonl", folder / "oracle.jsonl"
    prompts = list(islice(generated(MIXED, PROMPT_SEED), num_prompts))
    _write_lines(plain, [{"prompt": p.text, "kind": p.kind} for p in prompts])
    options = ["--input", str(plain), "--temperatures", "0", "--max-tokens", str(MAX_TOKENS)]
    options += ["--max-draft-len", str(LIMITS.max_draft_len), "--dtype", dtype]
    _smartspec("trace", *_pair(), "--out", str(oracle), *options)
    texts = read_oracle(oracle)[1]
    assert len(texts) == num_prompts, "a prompt did not fit"
    _write_lines(
        folder / "prompts.jsonl",
        [
            {"prompt": prompt.text, "max_tokens": text.num_generated, "kind": prompt.kind}
            for prompt, text in zip(prompts, texts, strict=True)
        ],
    )


def read_texts(folder: Path) -> list[OracleSequence]:
    """By prompt, as a request of exactly this length generates it: without the draw of the end
    token."""
    return [_by_length(text) for text in read_oracle(folder / "oracle.jsonl")[1]]


def _by_length(text: OracleSequence) -> OracleSequence:
    num = text.num_generated
    proposers = {
        name: ProposerTrace(one.accepted[:num], one.available and one.available[:num])
        for name, one in text.proposers.items()
    }
    return replace(text, max_tokens=num, finish=FinishReason.LENGTH, proposers=proposers)


@contextmanager
def serving(folder: Path, dtype: str) -> Iterator[TritonServer]:
    """The server, ready; it ends with the block. Its profile is measured again and kept in the
    folder, and the server adds its host time when it ends."""
    engine = TorchEngineConfig(
        model=str((BENCH / TARGET).resolve()),
        draft=str((BENCH / DRAFT).resolve()),
        dtype=dtype,  # type: ignore[arg-type]
        profile_cache=str(folder.resolve()),
    )
    for old in folder.glob("profile-*.json"):
        old.unlink()
    config = ServerConfig(engine=engine, limits=LIMITS, explain=True)
    with TritonServer(config, (folder / "server").resolve(), free_address()) as server:
        server.wait_ready()
        yield server


def profile_path(folder: Path) -> Path:
    (found,) = folder.glob("profile-*.json")
    return found


class Load:
    """Sends runs to a server, one after the other."""

    def __init__(self, server: TritonServer, folder: Path) -> None:
        self._url = server.address.http_url
        self._folder = folder
        self._last_start_s = -1.0

    def offer(self, run: Run, num_requests: int, duration_s: float) -> dict[str, Any]:
        """Send the requests, and store the record and the steps. Returns the summary of `smartspec
        load`."""
        options = ["--rate", str(run.rate), "--requests", str(num_requests)]
        options += ["--duration", str(duration_s), "--seed", str(100 + run.repeat)]
        options += ["--policy", run.policy, "--jsonl", str(run.record(self._folder))]
        options += ["--prompts", str(self._folder / "prompts.jsonl")]
        found: dict[str, Any] = json.loads(
            _smartspec("load", "--url", self._url, *options, "--timeout", "120", "--json", "-")
        )
        self._keep_steps(run.steps(self._folder))
        return found

    def _keep_steps(self, path: Path) -> None:
        """Those that were not kept with an earlier run."""
        header, *lines = step_trace(self._url, NUM_STEPS).splitlines()
        starts = [json.loads(line)["start_s"] for line in lines]
        new = [line for line, s in zip(lines, starts, strict=True) if s > self._last_start_s]
        self._last_start_s = max([self._last_start_s, *starts])
        path.write_text("".join(f"{line}\n" for line in (header, *new)), encoding="utf-8")


def write_runs(folder: Path, runs: Sequence[Run]) -> None:
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))


def read_runs(folder: Path) -> list[Run]:
    return [Run(**raw) for raw in json.loads((folder / "runs.json").read_text())]


def _pair() -> list[str]:
    return ["--model", str(BENCH / TARGET), "--draft", str(BENCH / DRAFT)]


def _write_lines(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in documents), encoding="utf-8")


def _smartspec(*arguments: str) -> str:
    """Standard output of the command, run as a process. Raises with its last lines."""
    command = [str(Path(sys.executable).parent / "smartspec"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"smartspec {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout
