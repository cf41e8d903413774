"""One run of a load test: the requests to send, and one output line per ended request.

The loop is closed: a user sends its next request when the last one has ended. `scheduled_s` is
therefore `sent_s`, and a slow server reduces the load. To measure latencies at a fixed rate, use
`smartspec load`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from stages import make_stages, stage_at, users_at

from smartspec_bench.prompts import MIXED, Prompt, generated, read_prompts, repeated
from smartspec_bench.streams import Exchange
from smartspec_bench.workloads import WORKLOADS

OVER = "cancelled: the run ended"


class LoadRun:
    """Chooses the prompts and writes the lines of a run. Times are seconds since `start`."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: the values of `load_options`. Raises ValueError, with the name of the option."""
        self.timeout_s: float = options.request_timeout
        self._seconds: float = options.run_time
        self._max_requests: int = options.max_requests
        self._fields = request_fields(options)
        self._stages = make_stages(options.scenario, options.num_users, options.scale)
        first = repeated(read_prompts(Path(options.prompts))) if options.prompts else None
        self._first = first or _generated("--workload", options.workload)
        self._shifted = _generated("--shift-to", options.shift_to)
        self._path = Path(options.jsonl) if options.jsonl else None
        self._lines: TextIO | None = None
        self._start_s = 0.0
        self._num_sent = 0
        self._is_ended = False

    def start(self) -> None:
        """Open the file and start the clock. Raises OSError if the file cannot be written."""
        if self._path is not None:
            self._lines = self._path.open("w", encoding="utf-8")
        self._start_s = time.monotonic()

    def end(self) -> None:
        """End the run before its time limit."""
        self._is_ended = True

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def has_sent_all(self) -> bool:
        return self._num_sent >= self._max_requests

    @property
    def num_users(self) -> int | None:
        """The number of users now; None after the end of the run."""
        if self._is_ended or self.has_sent_all or self.now_s() >= self._seconds:
            return None
        return users_at(self._stages, self._share)

    @property
    def _share(self) -> float:
        return self.now_s() / self._seconds

    def send(self) -> tuple[Exchange, Mapping[str, Any]]:
        """The next request and its fields. It counts as sent now."""
        prompt = self._next_prompt()
        fields = {**self._fields, **prompt.fields}
        now_s = self.now_s()
        exchange = Exchange(self._num_sent, now_s, prompt.kind, sent_s=now_s)
        self._num_sent += 1
        return exchange, fields

    def _next_prompt(self) -> Prompt:
        is_shifted = stage_at(self._stages, self._share).is_shifted
        return next(self._shifted if is_shifted else self._first)

    def ended(self, exchange: Exchange) -> None:
        """Write the request's line at once, because a run may be stopped at any time."""
        if self._lines is not None:
            self._lines.write(json.dumps(exchange.record()) + "\n")
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def request_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request. Raises ValueError."""
    try:
        more = json.loads(options.fields or "{}")
    except ValueError as error:
        raise ValueError(f"--fields: got {options.fields!r}, must be JSON ({error})") from None
    if not isinstance(more, dict):
        raise ValueError(f"--fields: got {options.fields!r}, must be a JSON object")
    fields = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "return_spec_metrics": "detailed",
        "return_perf_metrics": True,
    }
    if options.policy:
        fields["speculation_policy"] = options.policy
    return fields | more


def _generated(option: str, workload: str) -> Iterator[Prompt]:
    allowed = (*WORKLOADS, MIXED)
    if workload not in allowed:
        raise ValueError(f"{option}: got {workload!r}, must be one of {', '.join(allowed)}")
    return generated(workload)
