"""The result document of a run under load: JSON, read and written here and nowhere else.

Milliseconds end in _ms, requests a second in _rps, tokens a second in _tps. What is not known is
null, or an empty list or object; nothing is left out.
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
    """The file is no result document; the message names the file and the first wrong place."""


@dataclass(frozen=True)
class About:
    """What ran where. date: of the start, ISO 8601. pair: the target and the draft.

    limits: the server's, by their names in engine.json. definitions: of the measures, as text.
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
    """What this machine can do at most, measured before the phases.

    saturation_rps: by policy, with the queue never empty. target_pass_ms: a decoding pass of the
    target without drafts, by its number of sequences. copy_gb_per_s: bytes read and written by a
    copy in memory, of 1e9.
    """

    saturation_rps: dict[str, float] = field(default_factory=dict)
    target_pass_ms: dict[str, float] = field(default_factory=dict)
    copy_gb_per_s: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """Of one measure over the requests of a phase; None where no request had it."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Series:
    """A phase over time, about a point a second; lists of equal length, or all empty.

    rate_rps: requests that came due. running: requests out, waiting ones included. draft_len: mean
    of the steps whose tokens came in that second; 0 where there was none.
    """

    time_s: list[float] = field(default_factory=list)
    rate_rps: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    draft_len: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """One stretch of load under one policy.

    shape: steady, step, shift, mix or closed. load: share of the saturation rate of `none`; 0
    where it changes, or where the next request waits for the last. rate_rps: mean of the requests
    due; 0 where closed. seed: of arrivals and prompts, the same for every policy. duration_s: from
    the first request due to the last token.
    draft_len_counts: decoding steps of a sequence with 0, 1, 2, .. drafts. accepted_counts: those
    with drafts, of which 0, 1, 2, .. were accepted.
    time_shares: draft, target (passes of decoding work) and host (all else, reading prompts
    included), of the time in which a request was out. itl_ms, tpot_ms: see about.definitions.
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
    """One question at one point, over all repeats. ratio: policy over against, with a 95 %
    interval. bound: what the claim allows the ratio to be. verdict: met, missed or open."""

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
        """With format and version first, for a person who opens the file."""
        return {"format": self.format, "version": self.version, **asdict(self)}


_ADAPTER = TypeAdapter(Document)


def read(path: Path) -> Document:
    """Raises DocumentError."""
    needed = f"a document of `bench load`, version {VERSION}"
    return checked(path, raw_of(path), _ADAPTER, (FORMAT, VERSION), needed)


def raw_of(path: Path) -> Any:
    """What the file holds. Raises DocumentError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path}: {error}") from error


def kind_of(raw: Any) -> tuple[Any, Any]:
    """Format and version."""
    return (raw.get("format"), raw.get("version")) if isinstance(raw, dict) else (None, None)


def checked(path: Path, raw: Any, adapter: TypeAdapter[T], kind: tuple[str, int], needed: str) -> T:
    """needed: what it must be, in words. Raises DocumentError."""
    if kind_of(raw) != kind:
        raise DocumentError(f"{path}: must be {needed}, but is {_what_is(raw)}")
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DocumentError(f"{path}: {place}: {first['msg']}") from error


def _what_is(raw: Any) -> str:
    """What a file holds instead of a document of `bench load`."""
    if not isinstance(raw, dict):
        return f"a JSON {type(raw).__name__}"
    name = raw.get("format", "smartspec-arms" if "arms" in raw else None)
    if name == FORMAT:
        return f"version {raw.get('version')}"
    writer = OTHERS.get(name) if isinstance(name, str) else None
    return f"a document of `{writer}`" if writer else f"JSON of the format {name!r:.80}"


def write(path: Path, document: Document) -> None:
    """Whole or not at all: an interruption leaves the file of before."""
    write_text(path, entry_lines(document.to_json()))


def entry_lines(document: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each entry of a list under a key."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            entries = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value)
            text = f"[\n  {entries}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
