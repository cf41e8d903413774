"""Summarises the lines of a run: latencies by smartspec_sim/latency.py, and errors.

    python loadtest/summary.py requests.jsonl

Use these percentiles, because Locust rounds its own to two digits. The lines of `smartspec load
--jsonl` have the same format. The last line of the output is one JSON document. Exit code 1 means
that no request finished.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from smartspec_bench.streams import Exchange
from smartspec_sim.latency import RequestTiming, with_errors
from smartspec_sim.report import print_load


def read_timings(path: Path) -> list[RequestTiming]:
    """The timings of all lines. Raises ValueError, with the line number, and OSError."""
    timings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            timings.append(Exchange.of_record(json.loads(line)).timing)
        except (ValueError, KeyError, TypeError) as error:
            kind = type(error).__name__
            raise ValueError(f"{path.name}, line {number}: {kind}: {error}") from error
    return timings


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return 0
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        summary = with_errors(read_timings(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_load(Console(stderr=True), summary)
    print(json.dumps(summary))
    return 0 if summary["num_finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
