"""The result document of a benchmark: what was measured, as JSON. Needs the standard library only.

A phase is one load under one policy in one repeat. Keys of the file that this version does not
know are ignored. Names end in _ms for milliseconds and in _tps for tokens per second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smartspec_bench.streams import Exchange
from smartspec_sim.latency import statistics_ms, summarise

FORMAT, VERSION = "smartspec-bench", 1


class DocumentError(ValueError):
    """The file is not a result document. The message names the file and the reason."""


class BenchError(RuntimeError):
    """The run cannot continue. The message says why."""


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles over the requests of a phase; None without values."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Phase:
    """shape: closed, steady, step, shift, mix or start (lockstep), or `at once` (live). load: share
    of the saturation rate without speculation, or the number of requests at once. duration_s: from
    the first due request to the last token. itl_ms: time between tokens, of each request.
    num_same_texts: requests with the same tokens as without speculation; None if not compared."""

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

    @property
    def place(self) -> tuple[str, str, float]:
        """What phases must share to be compared."""
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


def phase_of(
    policy: str, place: tuple[str, str, float], repeat: int, exchanges: Sequence[Exchange]
) -> Phase:
    """The phase of requests that have ended."""
    shape, workload, load = place
    found = summarise([exchange.timing for exchange in exchanges])
    last = [exchange.last for exchange in exchanges if exchange.timing.is_finished]
    num_steps, num_drafted, num_accepted = (
        sum(int(one.get(name, 0)) for one in last)
        for name in ("num_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    )
    gaps = [s for exchange in exchanges if (s := exchange.timing.tpot_s) is not None]
    return Phase(
        policy=policy,
        shape=shape,
        workload=workload,
        load=load,
        repeat=repeat,
        num_finished=found["num_finished"],
        num_failed=found["num_failed"],
        duration_s=found["elapsed_s"],
        e2e_ms=Spread(**found["e2e_ms"]),
        ttft_ms=Spread(**found["ttft_ms"]),
        itl_ms=Spread(**statistics_ms(gaps)),
        token_goodput_tps=found["token_goodput_tps"],
        mean_draft_len=num_drafted / num_steps if num_steps else 0.0,
        acceptance_rate=num_accepted / num_drafted if num_drafted else None,
    )


def described(title: str, **settings: object) -> dict[str, Any]:
    """The part `about` of a run that starts now on this machine."""
    from smartspec_py.engines.profile import machine_name

    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"title": title, "date": date, "machine": machine_name(), **settings}


class Recorder:
    """The document so far, in memory and on disk, so that an interrupted run keeps its phases."""

    def __init__(
        self,
        about: dict[str, Any],
        path: Path | None,
        on_phase: Callable[[Phase], object] = lambda phase: None,
    ) -> None:
        """path: the file to write; None: only memory. Raises OSError if it cannot be written."""
        self.document = Document(about)
        self._path, self._on_phase = path, on_phase
        self._write()

    def add(self, phase: Phase) -> None:
        self.document.phases.append(phase)
        self._write()
        self._on_phase(phase)

    def _write(self) -> None:
        if self._path is not None:
            write(self._path, self.document)


def write(path: Path, document: Document) -> None:
    """Write one line for each phase, atomically."""
    head = asdict(document)
    phases = ",\n  ".join(json.dumps(one, allow_nan=False) for one in head.pop("phases"))
    text = json.dumps(head, allow_nan=False, indent=1).rstrip("}\n")
    part = path.with_name(f"{path.name}.part")
    part.write_text(f'{text},\n "phases": [\n  {phases}\n ]\n}}\n', encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Document:
    """Raises DocumentError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path}: {error}") from error
    if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
        raise DocumentError(f"{path}: must be a result of `smartspec bench`")
    try:
        return Document(dict(raw["about"]), [_phase(one) for one in raw["phases"]])
    except (KeyError, TypeError) as error:
        raise DocumentError(f"{path}: {type(error).__name__}: {error}") from error


def _phase(raw: dict[str, Any]) -> Phase:
    known = {one.name: raw[one.name] for one in fields(Phase) if one.name in raw}
    spreads = {name: Spread(**known[name]) for name in ("e2e_ms", "ttft_ms", "itl_ms")}
    return Phase(**{**known, **spreads})
