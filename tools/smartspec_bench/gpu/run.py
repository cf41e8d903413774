"""All parts in turn; the document and its page are written after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from smartspec_bench.gpu.batches import measure_batches
from smartspec_bench.gpu.device import describe
from smartspec_bench.gpu.document import (
    BANDWIDTH,
    BATCHES,
    DEVICE,
    EXACTNESS,
    LOAD,
    PAIR,
    Document,
    json_text,
    with_part,
)
from smartspec_bench.gpu.exact import check_exactness
from smartspec_bench.gpu.load import measure_load
from smartspec_bench.gpu.page import report
from smartspec_bench.gpu.pair import build_pair
from smartspec_bench.gpu.passes import bandwidth
from smartspec_bench.gpu.plan import Plan
from smartspec_bench.report.blocks import markdown
from smartspec_sim.traces.files import write_text

JSON_NAME, PAGE_NAME = "gpu.json", "gpu.md"

Say = Callable[[str], None]


def run(plan: Plan, device: torch.device, folder: Path, started_s: float, say: Say) -> Document:
    """Returns the document that it wrote last. started_s: monotonic, from which total_s counts.
    Raises DeviceError if there is not enough memory. After an error, the files have the measured
    parts and name the others."""
    if plan.is_dry_run:
        torch.set_num_threads(1)  # passes of small models only wait for further threads
    end_s = started_s + plan.total_s
    kept = _Kept(plan, folder, started_s)
    info = describe(device, plan.copy_bytes)
    kept.add(DEVICE, device=info)
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    say(f"{info.name}, {info.memory_gb:.1f} GB of which {info.free_gb:.1f} are free; {versions}")
    say(f"copies within its memory: {info.copy_gb_per_s:.1f} GB/s, read and written")
    pair = build_pair(plan, device, say)
    kept.add(PAIR, pair=pair.info)
    found = bandwidth(pair, info.copy_gb_per_s)
    kept.add(BANDWIDTH, bandwidth=found)
    say(f"a pass over one token: {found.median_ms:.2f} ms, {found.share:.2f} of that bandwidth")
    exactness, lacks = check_exactness(pair, plan, min(time.monotonic() + plan.exact_s, end_s), say)
    kept.add(EXACTNESS, lacks, exactness=exactness)
    batches = measure_batches(pair, plan, min(time.monotonic() + plan.batches_s, end_s), say)
    kept.add(BATCHES, batches.left_out, batches=batches.points, accept_probs=batches.accept_probs)
    saturation_rps, load, lacks = measure_load(pair, plan, end_s, say)
    kept.add(LOAD, lacks, saturation_rps=saturation_rps, load=load)
    return kept.document


class _Kept:
    """The document of all measurements so far, in memory and on disk."""

    def __init__(self, plan: Plan, folder: Path, started_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._started_s = started_s
        self.document = Document(plan.is_dry_run, datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, part: str, lacks: list[str] | None = None, **values: Any) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self.document = with_part(self.document, part, lacks or [], elapsed_s, **values)
        write_text(self._folder / JSON_NAME, json_text(self.document))
        write_text(self._folder / PAGE_NAME, markdown(report(self.document)))
