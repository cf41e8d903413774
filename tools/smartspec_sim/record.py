"""Reads recorded requests, to simulate them at their recorded rate or faster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from smartspec_py.serving.config import DRAFT_MODEL, HEADS
from smartspec_sim.acceptance import Acceptance, DraftRuns, draw_ranks, draw_runs
from smartspec_sim.engine import PROPOSERS
from smartspec_sim.workload import REQUEST_STREAM, SimRequest, WorkloadError, only


def read_record(path: Path, *, accept: float, seed: int = 1) -> list[SimRequest]:
    """Read a JSONL record, such as `smartspec load --jsonl` writes. Each line is one request:

    - scheduled_s or arrival_s: arrival time in seconds, from any origin.
    - num_input_tokens or prompt_len: prompt tokens.
    - num_output_tokens or output_len: generated tokens.
    - accepted: the number of correct drafts from each position on. A list, or an object with an
      entry per proposer. An entry is a list, or has `accepted` and `available` of an oracle trace.
    - accept_prob: the probability from which acceptance is drawn, used without `accepted`.
      Without both, the argument `accept` is used.
    - kind, proposer (for a single list), priority, deadline_s: optional, as in a spec.

    Requests without prompt or generated tokens are skipped. Raises WorkloadError.
    """
    requests = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                request = _read_line(json.loads(line), number, accept, seed)
                requests += [] if request is None else [request]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise WorkloadError(f"{path.name}: line {number}: {kind}: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    if not requests:
        raise WorkloadError(f"{path.name}: contains no request with generated tokens")
    first = min(request.arrival_s for request in requests)
    shifted = [replace(r, arrival_s=r.arrival_s - first) for r in requests]
    return sorted(shifted, key=lambda request: (request.arrival_s, request.sequence))


def _read_line(raw: Mapping[str, Any], number: int, accept: float, seed: int) -> SimRequest | None:
    prompt_len = int(_either(raw, "prompt_len", "num_input_tokens"))
    output_len = int(_either(raw, "output_len", "num_output_tokens"))
    if output_len < 1 or prompt_len < 1:
        return None
    proposer = raw.get("proposer", DRAFT_MODEL)
    if proposer not in PROPOSERS:
        raise ValueError(f"proposer: got {proposer!r}, must be one of {', '.join(PROPOSERS)}")
    prob, runs = raw.get("accept_prob"), raw.get("accepted")
    acceptances: tuple[Acceptance | None, ...]
    has_heads = proposer == HEADS or (isinstance(runs, Mapping) and HEADS in runs)
    if runs is not None and has_heads:
        raise ValueError("accepted: not for heads, which have several guesses; give accept_prob")
    if isinstance(runs, Mapping):
        acceptances = tuple(_runs(runs[name]) if name in runs else None for name in PROPOSERS)
    elif runs is not None:
        acceptances = only(proposer, DraftRuns(_numbers(runs)))
    else:
        rng = np.random.default_rng([seed, REQUEST_STREAM, number])
        prob = accept if prob is None else float(prob)
        drawn: Acceptance
        if proposer == HEADS:
            drawn = draw_ranks(rng, output_len, prob)
        else:
            drawn = draw_runs(rng, output_len, prob, 0.0)
        acceptances = only(proposer, drawn)
    return SimRequest(
        sequence=number,
        arrival_s=float(_either(raw, "arrival_s", "scheduled_s")),
        prompt_len=prompt_len,
        output_len=output_len,
        acceptances=acceptances,
        cohort=str(raw.get("kind", "")),
        priority=int(raw.get("priority", 0)),
        deadline_s=raw.get("deadline_s"),
    )


def _runs(raw: Any) -> DraftRuns:
    if not isinstance(raw, Mapping):
        return DraftRuns(_numbers(raw))
    available = raw.get("available")
    return DraftRuns(_numbers(raw["accepted"]), None if available is None else _numbers(available))


def _numbers(raw: Sequence[Any]) -> list[int]:
    return [int(number) for number in raw]


def _either(raw: Mapping[str, Any], name: str, other: str) -> Any:
    if name not in raw and other not in raw:
        raise KeyError(f"{name} or {other} is required")
    return raw[name] if name in raw else raw[other]


def repeat_faster(requests: Sequence[SimRequest], factor: float) -> list[SimRequest]:
    """The record at `factor` times its rate. Only arrival times change; no request is repeated."""
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]
