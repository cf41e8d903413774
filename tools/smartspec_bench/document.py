"""The result document of a load run, as JSON. Only this module reads and writes it.

Names end in _ms for milliseconds, _rps for requests per second, _tps for tokens per second.
Every key is present. A value that is not known is null, or an empty list or object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from smartspec_sim.traces.files import write_text

T = TypeVar("T")

FORMAT = "smartspec-bench"
VERSION = 1

OTHERS = {"smartspec-arms": "bench arms", "smartspec-overhead": "bench overhead"}
"""Formats of other documents, and the commands that write them."""


class DocumentError(ValueError):
    """The file is not a result document. The message names the file and the first wrong key."""


@dataclass(frozen=True)
class About:
    """The run and the machine. date: start of the run, ISO 8601. pair: target and draft model.

    limits: of the server, by their names in engine.json. definitions: of the metrics, as text.
    """

    title: str
    date: str
    command: str
    machine: str
    cores: int
    versions: dict[str, str]
    commit: str
    pair: str
    limits: dict[str, int | float | bool | None]
    form: str
    definitions: str


@dataclass(frozen=True)
class Ceilings:
    """Limits of this machine, measured before the phases.

    saturation_rps: by policy, with a queue that is never empty. target_pass_ms: time of a target
    decode pass without drafts, by number of sequences. copy_gb_per_s: memory copy bandwidth, bytes
    read plus bytes written, in units of 1e9 bytes.
    """

    saturation_rps: dict[str, float] = field(default_factory=dict)
    target_pass_ms: dict[str, float] = field(default_factory=dict)
    copy_gb_per_s: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one metric over the requests of a phase; None without values."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Series:
    """A phase over time, one point per second. The lists have equal lengths, or all are empty.

    rate_rps: requests that became due. running: requests in flight, including waiting ones.
    draft_len: mean over the steps whose tokens arrived in that second; 0 without steps.
    """

    time_s: list[float] = field(default_factory=list)
    rate_rps: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    draft_len: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """One period of load under one policy.

    shape: steady, step, shift, mix or closed. load: share of the saturation rate of `none`; 0 for
    step and closed. rate_rps: mean rate of due requests; 0 for closed. seed: of arrivals and
    prompts, the same for every policy. duration_s: from the first due request to the last token.
    draft_len_counts: number of decoding steps of a sequence with 0, 1, 2, .. drafts.
    accepted_counts: number of steps with drafts, by number of accepted drafts 0, 1, 2, ..
    time_shares: draft, target (target passes that decode) and host (the rest, including prefill),
    as shares of the time with a request in flight. itl_ms, tpot_ms: see about.definitions.
    """

    policy: str
    shape: str
    workload: str
    load: float
    rate_rps: float
    seed: int
    repeat: int
    num_sent: int
    num_finished: int
    num_failed: int
    duration_s: float
    e2e_ms: Spread
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    send_lag_ms: Spread
    token_goodput_tps: float
    slo_goodput_rps: float | None
    mean_draft_len: float
    acceptance_rate: float | None
    draft_len_counts: list[int] = field(default_factory=list)
    accepted_counts: list[int] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    time_shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """One comparison at one point, over all repeats.

    ratio: metric of `policy` / metric of `against`, with its 95 % interval. bound: limit of the
    ratio in the claim; None if the claim has none. verdict: met, missed or open.
    """

    shape: str
    workload: str
    load: float
    rate_rps: float
    policy: str
    against: str
    role: str
    metric: str
    ratio: float
    low: float
    high: float
    num_pairs: int
    bound: float | None
    verdict: str
    text: str


@dataclass(frozen=True)
class Document:
    about: About
    ceilings: Ceilings = field(default_factory=Ceilings)
    phases: list[Phase] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    format: str = FORMAT
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """The document with format and version first, so that readers see them at the top."""
        return {"format": self.format, "version": self.version, **asdict(self)}


_ADAPTER = TypeAdapter(Document)


def read(path: Path) -> Document:
    """Raises DocumentError."""
    needed = f"a document of `bench load`, version {VERSION}"
    return checked(path, raw_of(path), _ADAPTER, (FORMAT, VERSION), needed)


def raw_of(path: Path) -> Any:
    """The parsed JSON of the file. Raises DocumentError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path}: {error}") from error


def kind_of(raw: Any) -> tuple[Any, Any]:
    """Format and version; None where they are missing."""
    return (raw.get("format"), raw.get("version")) if isinstance(raw, dict) else (None, None)


def checked(path: Path, raw: Any, adapter: TypeAdapter[T], kind: tuple[str, int], needed: str) -> T:
    """Validate a document. needed: the expected kind, for the message. Raises DocumentError."""
    if kind_of(raw) != kind:
        raise DocumentError(f"{path}: must be {needed}, but is {_what_is(raw)}")
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DocumentError(f"{path}: {place}: {first['msg']}") from error


def _what_is(raw: Any) -> str:
    """Describes the content of a file that has another kind, for the error message."""
    if not isinstance(raw, dict):
        return f"a JSON {type(raw).__name__}"
    name = raw.get("format", "smartspec-arms" if "arms" in raw else None)
    if name == FORMAT:
        return f"version {raw.get('version')}"
    writer = OTHERS.get(name) if isinstance(name, str) else None
    return f"a document of `{writer}`" if writer else f"JSON of the format {name!r:.80}"


def write(path: Path, document: Document) -> None:
    """Write atomically. An interruption leaves the previous file unchanged."""
    write_text(path, entry_lines(document.to_json()))


def entry_lines(document: Mapping[str, Any]) -> str:
    """JSON with one line per key, and one line per entry of a top-level list."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            entries = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value)
            text = f"[\n  {entries}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
