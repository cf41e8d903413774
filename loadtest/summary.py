"""What a run's lines say: latencies by smartspec_sim/latency.py, and how requests failed.

    python loadtest/summary.py requests.jsonl

These are the percentiles of record: Locust rounds its own to two digits. Reads the lines of
`smartspec load --jsonl` as well. The last line of the output is one JSON document; the exit code is
1 where no request finished.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from smartspec_sim.latency import RequestTiming, summarise
from smartspec_sim.report import load_lines, load_table


def read_timings(path: Path) -> list[RequestTiming]:
    """Raises ValueError, naming the line; OSError."""
    timings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            timings.append(_timing(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            kind = type(error).__name__
            raise ValueError(f"{path.name}, line {number}: {kind}: {error}") from error
    return timings


def _timing(record: Mapping[str, Any]) -> RequestTiming:
    chunk_s, scheduled_s = record["chunk_s"], float(record["scheduled_s"])
    return RequestTiming(
        scheduled_s=scheduled_s,
        sent_s=scheduled_s if record["sent_s"] is None else record["sent_s"],
        first_s=chunk_s[0] if chunk_s else None,
        last_s=chunk_s[-1] if chunk_s else None,
        num_tokens=sum(record["chunk_tokens"]),
        error=record["error"],
    )


def summarise_lines(timings: Iterable[RequestTiming]) -> dict[str, Any]:
    found = list(timings)
    summary = summarise(found)
    errors = Counter(timing.error for timing in found if timing.error is not None)
    summary["errors"] = dict(errors.most_common())
    return summary


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return 0
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        summary = summarise_lines(read_timings(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    console.print(load_table(summary))
    for line in [*load_lines(summary), *(f"{n} x {text}" for text, n in summary["errors"].items())]:
        console.print(line, highlight=False, markup=False)
    print(json.dumps(summary))
    return 0 if summary["num_finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
