"""The document of a run, as JSON; `page` makes a page of it.

Names end in _ms for milliseconds, _s for seconds, _rps for requests per second, _tps for tokens per
second, _gb for 1e9 bytes. A part that was not measured (yet) is null or empty, and `left_out` names
it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from smartspec_bench.document import checked

FORMAT = "smartspec-gpu-bench"
VERSION = 1

DRY_RUN_NOTE = (
    "A dry run on a CPU with small models: it shows that every part works, and its figures mean "
    "nothing."
)

DEVICE, PAIR, EXACTNESS, BANDWIDTH, BATCHES, LOAD = PARTS = (
    "device",
    "pair",
    "exactness",
    "bandwidth",
    "batches",
    "load",
)


@dataclass(frozen=True)
class DeviceInfo:
    """copy_gb_per_s: bytes read and written by a copy within the device's memory."""

    name: str
    kind: str
    machine: str
    driver: str
    memory_gb: float
    free_gb: float
    copy_gb_per_s: float
    versions: dict[str, str]


@dataclass(frozen=True)
class ModelInfo:
    """size: of the expansion. bytes_read: of the weights that every pass reads, which are all but
    the embeddings. cache_bytes_per_token: keys and values."""

    size: dict[str, Any]
    num_parameters: int
    bytes_read: int
    cache_bytes_per_token: int


@dataclass(frozen=True)
class PairInfo:
    """max_sequences: the largest batch that fits in memory. uses_graphs: whether short passes are
    replays of CUDA graphs. graph_error: why not, if capturing failed. build_s, profile_s: time for
    making both models and their graphs, and for timing their passes."""

    dtype: str
    target: ModelInfo
    draft: ModelInfo
    max_sequences: int
    uses_graphs: bool
    graph_error: str
    build_s: float
    profile_s: float


@dataclass(frozen=True)
class ArmExactness:
    """Texts of one policy compared with those of none. A text that differs counts once, at its
    first difference: num_near_ties of them come from rounding, num_faults do not."""

    policy: str
    mode: str
    num_requests: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_differences: int
    num_near_ties: int

    @property
    def num_faults(self) -> int:
        return self.num_differences - self.num_near_ties


@dataclass(frozen=True)
class Bandwidth:
    """A pass of the target over one token of one sequence, including launches and the copy of its
    token to the host. plain_ms: the median of such a pass that is launched kernel by kernel, if it
    is usually served in another way. share: bytes_read over the median time, divided by the copy
    bandwidth. context_len: tokens whose keys and values it also reads, which are not counted."""

    bytes_read: int
    context_len: int
    median_ms: float
    best_ms: float
    plain_ms: float | None
    copy_gb_per_s: float
    share: float
    goal: float


@dataclass(frozen=True)
class PolicyRate:
    """tokens_tps: of each round. draft_len: mean per decoding step and sequence, zeros included.
    accepted: share of the drafted tokens; null if nothing was drafted."""

    policy: str
    tokens_tps: list[float]
    draft_len: float
    accepted: float | None

    @property
    def median_tps(self) -> float:
        return median(self.tokens_tps)


@dataclass(frozen=True)
class BatchPoint:
    """One number of sequences at once. target_ms: a pass over 1 + k tokens per sequence, by k from
    0. draft_ms: a draft pass. predicted_tps: by k, from those and the measured acceptance, without
    the loop's own time. rates: measured, by policy."""

    batch_size: int
    target_ms: list[float]
    draft_ms: float
    predicted_tps: list[float]
    rates: list[PolicyRate]

    @property
    def predicted_k(self) -> int:
        return self.predicted_tps.index(max(self.predicted_tps))

    @property
    def best_fixed(self) -> PolicyRate:
        """The best fixed length, chosen after the measurement; the baseline is not among them."""
        fixed = [rate for rate in self.rates if rate.policy.startswith("fixed:")]
        return max(fixed, key=lambda rate: rate.median_tps)

    def rate(self, policy: str) -> PolicyRate:
        return next(rate for rate in self.rates if rate.policy == policy)


@dataclass(frozen=True)
class LoadPoint:
    """One policy under Poisson arrivals; those of a load are the same for every policy.

    load: share of the saturation rate of none. Latency counts from when a request was due; null
    where no request finished.
    """

    load: float
    rate_rps: float
    policy: str
    num_requests: int
    num_failed: int
    mean_ms: float | None
    p95_ms: float | None
    tokens_tps: float


@dataclass(frozen=True)
class Document:
    """accept_probs: of draft 1, 2, .., if those before it were accepted. saturation_rps: of none,
    at the largest batch."""

    is_dry_run: bool
    date: str
    elapsed_s: float = 0.0
    device: DeviceInfo | None = None
    pair: PairInfo | None = None
    exactness: list[ArmExactness] = field(default_factory=list)
    bandwidth: Bandwidth | None = None
    accept_probs: list[float] = field(default_factory=list)
    batches: list[BatchPoint] = field(default_factory=list)
    saturation_rps: float | None = None
    load: list[LoadPoint] = field(default_factory=list)
    left_out: list[str] = field(default_factory=lambda: list(PARTS))

    @property
    def note(self) -> str:
        return DRY_RUN_NOTE if self.is_dry_run else ""

    @property
    def num_faults(self) -> int:
        return sum(arm.num_faults for arm in self.exactness)

    def to_json(self) -> dict[str, Any]:
        """The document, with the explanations first, for a person who opens the file."""
        return {"format": FORMAT, "version": VERSION, "note": self.note, **asdict(self)}


def with_part(
    document: Document, part: str, lacks: list[str], elapsed_s: float, **values: Any
) -> Document:
    """The document with another measured part. lacks: what could not be measured of it."""
    left_out = [name for name in document.left_out if name != part] + lacks
    return replace(document, left_out=left_out, elapsed_s=elapsed_s, **values)


def json_text(document: Document) -> str:
    return json.dumps(document.to_json(), indent=1, allow_nan=False) + "\n"


_ADAPTER = TypeAdapter(Document)


def parsed(path: Path, raw: Any) -> Document:
    """raw: what the file holds. Raises DocumentError."""
    return checked(path, raw, _ADAPTER, (FORMAT, VERSION), f"a {FORMAT}, version {VERSION}")
