"""The result document of a benchmark: what was measured, as JSON.

A phase is one load under one policy in one repeat. Names end in _ms for milliseconds and in _tps
for tokens per second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smartspec_bench.streams import COUNTS, Exchange
from smartspec_py.engines.profile import machine_name, write_json
from smartspec_sim.latency import summarise

FORMAT, VERSION = "smartspec-bench", 1

Spread = Mapping[str, float | None]
"""mean, p50, p90, p95 and p99 over the requests of a phase; None without values."""

PlaceKey = tuple[str, str, float]
"""Shape, workload and load, which phases must share to be compared.

Shape: closed, steady, step or start (lockstep), or `at once` (live). Load: share of the
saturation rate without speculation, or the number of requests at once.
"""


class DocumentError(ValueError):
    """The file is not a result document. The message names the file and the reason."""


class BenchError(RuntimeError):
    """The run cannot continue. The message says why."""


def check_answered(exchanges: Sequence[Exchange]) -> None:
    """Raises BenchError if a request failed."""
    failed = [one.error for one in exchanges if one.error is not None]
    if failed:
        raise BenchError(f"{len(failed)} of {len(exchanges)} requests failed: {failed[0]}")


@dataclass(frozen=True)
class Phase:
    """shape, workload, load: see `PlaceKey`. duration_s: from the first due request to the last
    token. itl_ms: time between tokens, of each request. num_same_texts: requests with the same
    tokens as without speculation; None if not compared. failure: why the first of the failed ones
    failed."""

    policy: str
    shape: str
    workload: str
    load: float
    repeat: int
    num_finished: int
    num_failed: int
    duration_s: float
    e2e_ms: Spread
    ttft_ms: Spread
    itl_ms: Spread
    token_goodput_tps: float
    mean_draft_len: float
    acceptance_rate: float | None
    num_same_texts: int | None = None
    failure: str | None = None

    @property
    def place(self) -> PlaceKey:
        return self.shape, self.workload, self.load


@dataclass(frozen=True)
class Document:
    """about: the machine, the models and the settings, for the reader. error: why the run ended
    early."""

    about: dict[str, Any]
    phases: list[Phase] = field(default_factory=list)
    error: str | None = None
    format: str = FORMAT
    version: int = VERSION


def phase_of(policy: str, place: PlaceKey, repeat: int, exchanges: Sequence[Exchange]) -> Phase:
    """The phase of requests that have ended."""
    found = summarise([exchange.timing for exchange in exchanges])
    failures = (exchange.timing.error for exchange in exchanges)
    last = [exchange.last for exchange in exchanges if exchange.timing.is_finished]
    num_steps, num_drafted, num_accepted = (
        sum(int(one.get(name, 0)) for one in last) for name in COUNTS
    )
    same = ("num_finished", "num_failed", "e2e_ms", "ttft_ms", "token_goodput_tps")
    return Phase(
        policy,
        *place,
        repeat,
        **{name: found[name] for name in same},
        duration_s=found["elapsed_s"],
        itl_ms=found["tpot_ms"],
        mean_draft_len=num_drafted / num_steps if num_steps else 0.0,
        acceptance_rate=num_accepted / num_drafted if num_drafted else None,
        failure=next(filter(None, failures), None),
    )


def described(title: str, **settings: object) -> dict[str, Any]:
    """The part `about` of a run that starts now on this machine."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"title": title, "date": date, "machine": machine_name(), **settings}


class Recorder:
    """The document so far, in memory and on disk, so that an interrupted run keeps its phases."""

    def __init__(
        self,
        about: dict[str, Any],
        path: Path | None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """path: the file to write; None: only memory. say: gets a line for each phase. Raises
        OSError if the file cannot be written."""
        self.document = Document(about)
        self._path, self._say = path, say
        self._write()

    def add(self, phase: Phase) -> None:
        self.document.phases.append(phase)
        self._write()
        failed = f", {phase.num_failed} failed: {phase.failure}" if phase.num_failed else ""
        self._say(f"{phase.policy}: {phase.token_goodput_tps:,.1f} tokens/s{failed}")

    def _write(self) -> None:
        if self._path is not None:
            write(self._path, self.document)


def write(path: Path, document: Document) -> None:
    """Write the file atomically; what is no file, such as /dev/null, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(json.dumps(asdict(document)), encoding="utf-8")
    else:
        write_json(path, asdict(document))


def read(path: Path) -> Document:
    """Raises DocumentError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if (raw.pop("format"), raw.pop("version")) != (FORMAT, VERSION):
            raise ValueError("another format or version")
        phases = [Phase(**one) for one in raw.pop("phases")]
        return Document(phases=phases, **raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = "must be a result of `smartspec bench`"
        raise DocumentError(f"{path}: {rule} ({type(error).__name__}: {error})") from error
