"""Reads recorded requests, to simulate them at their recorded times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from smartspec_py.constants import DRAFT_MODEL
from smartspec_sim.acceptance import draw_runs
from smartspec_sim.workload import REQUEST_STREAM, SimRequest, WorkloadError


def read_record(path: Path, *, accept: float) -> list[SimRequest]:
    """Read a JSONL record, such as `scripts/loadtest --jsonl` writes. Each line is one request:

    - scheduled_s: arrival time in seconds, from any origin.
    - num_input_tokens, num_output_tokens: prompt tokens, generated tokens.
    - accept_prob: the probability from which acceptance is drawn. Without it, the argument `accept`
      is used.
    - kind, priority, deadline_s: optional, as in a spec.

    Requests without prompt or generated tokens are skipped. Raises WorkloadError.
    """
    requests = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                requests.append(_read_line(json.loads(line), number, accept))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise WorkloadError(f"{path.name}: line {number}: {kind}: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    requests = [one for one in requests if min(one.prompt_len, one.output_len) > 0]
    if not requests:
        raise WorkloadError(f"{path.name}: contains no request with generated tokens")
    first = min(request.arrival_s for request in requests)
    shifted = [replace(request, arrival_s=request.arrival_s - first) for request in requests]
    return sorted(shifted, key=lambda request: (request.arrival_s, request.sequence))


def _read_line(raw: Mapping[str, Any], number: int, accept: float) -> SimRequest:
    output_len, prob = int(raw["num_output_tokens"]), raw.get("accept_prob")
    rng = np.random.default_rng([1, REQUEST_STREAM, number])
    runs = draw_runs(rng, output_len, accept if prob is None else float(prob), 0.0)
    return SimRequest(
        sequence=number,
        arrival_s=float(raw["scheduled_s"]),
        prompt_len=int(raw["num_input_tokens"]),
        output_len=output_len,
        runs={DRAFT_MODEL: runs},
        acceptance_group=str(raw.get("kind", "")),
        priority=int(raw.get("priority", 0)),
        deadline_s=raw.get("deadline_s"),
    )
