"""Compares the load generators of this repository with AIPerf, with equal requests to one server.

    scripts/aiperf [FOLDER]

Starts a real Triton server with the fake engine, which takes STEP_S for each step. Both clients run
each case in alternation. Writes aiperf.md and aiperf.json to FOLDER (default: docs/results). It
takes about six minutes. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from both_clients import (
    MAX_TOKENS,
    TOKENIZER,
    Case,
    ClientError,
    Figures,
    run_aiperf,
    run_ours,
    write_prompts,
)

from smartspec_launch import paths
from smartspec_launch.foreground import signals_interrupt
from smartspec_launch.triton_server import TritonServer, free_address
from smartspec_py.serving.config import LimitsConfig, ServerConfig
from smartspec_py.serving.profile import machine_name
from smartspec_testing.engines import FakeEngineConfig
from studies.document import table, wrapped

CASES = (
    Case("one stream at a time", 30, concurrency=1),
    Case("8 streams at once", 160, concurrency=8),
    Case("a request a second, evenly spaced", 30, rate=1.0),
)
STEP_S = 0.05
WARM_UP = Case("warm-up", 16, concurrency=8)
NUM_ROUNDS = 2
NUM_PROMPTS = 200
BAR = 0.03
ROWS = ("ttft_mean", "ttft_p50", "ttft_p99", "e2e_mean", "e2e_p50", "e2e_p99", "requests_per_s")


@dataclass(frozen=True)
class Found:
    """The figures of a case: one run per client and round.

    Our client runs first in even rounds, AIPerf in odd rounds.
    """

    case: Case
    ours: Sequence[Figures]
    aiperf: Sequence[Figures]

    def ratios(self, row: str) -> list[float]:
        """AIPerf's figure divided by ours, by round."""
        return [b[row] / a[row] for a, b in zip(self.ours, self.aiperf, strict=True)]


def measure(case: Case, url: str, aiperf: Path, folder: Path) -> Found:
    files = write_prompts(folder, NUM_PROMPTS)
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for number in range(NUM_ROUNDS):
        run_folder = folder / f"{case.name.replace(' ', '-').replace('/', '-')}-{number}"
        run_folder.mkdir()
        if number % 2 == 0:
            ours.append(run_ours(case, url, files, run_folder))
        theirs.append(run_aiperf(aiperf, case, url, files, run_folder))
        if number % 2:
            ours.append(run_ours(case, url, files, run_folder))
        print(case.name, number, json.dumps({"ours": ours[-1], "aiperf": theirs[-1]}), flush=True)
    return Found(case, ours, theirs)


def page(found: Sequence[Found], version: str) -> str:
    made = f"`scripts/aiperf`, AIPerf {version}, {datetime.now(UTC):%Y-%m-%d}, {machine_name()}."
    made += " [All figures](aiperf.json)."
    parts = ["# Our load generators compared with AIPerf", made, _answer(found)]
    header = ["case", "figure", "ours", "AIPerf", "AIPerf / ours", "by round"]
    parts.append(table(header, [line for one in found for line in _lines(one)]))
    notes = Path(__file__).with_name("notes.md").read_text(encoding="utf-8").strip()
    return "\n\n".join(map(wrapped, [*parts, notes])) + "\n"


def _answer(found: Sequence[Found]) -> str:
    ratios = {
        (one.case.name, row): statistics.median(one.ratios(row)) for one in found for row in ROWS
    }
    far = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > BAR}
    text = (
        "Do our load generators and AIPerf measure the same? Within "
        f"{100 * BAR:.0f} % in {len(ratios) - len(far)} of {len(ratios)} figures."
    )
    if not far:
        return text
    listed = "; ".join(f"{name}, {row} {100 * (r - 1):+.1f} %" for (name, row), r in far.items())
    return f"{text} Larger difference (AIPerf compared with ours): {listed}."


def _lines(found: Found) -> list[list[object]]:
    """Of the page's table: medians over the rounds."""
    lines: list[list[object]] = []
    for row in ROWS:
        ratios = found.ratios(row)
        lines.append(
            [
                found.case.name,
                row if row == "requests_per_s" else f"{row}, ms",
                statistics.median(run[row] for run in found.ours),
                statistics.median(run[row] for run in found.aiperf),
                statistics.median(ratios),
                f"{min(ratios):.3f} to {max(ratios):.3f}",
            ]
        )
    return lines


def write(folder: Path, found: Sequence[Found], version: str) -> None:
    """Write the page and the JSON document.

    `publish` is not used, because its pages name `scripts/study`, and AIPerf needs a separate
    environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "aiperf.md").write_text(page(found, version), encoding="utf-8")
    document = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine_name(),
        "aiperf": version,
        "max_tokens": MAX_TOKENS,
        "step_s": STEP_S,
        "cases": [asdict(one) for one in found],
    }
    (folder / "aiperf.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def serve() -> TritonServer:
    """A server whose steps take the same time in every run, so that only the clients differ.

    The prefix cache is off, so that a repeated prompt takes the same time.
    """
    engine = FakeEngineConfig(kind="fake", tokenizer=str(TOKENIZER), step_s=STEP_S)
    config = ServerConfig(engine=engine, limits=LimitsConfig(reuse_prefixes=False))
    address = free_address()
    return TritonServer(config, paths.run_dir(address.http_port).resolve(), address)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aiperf", type=Path, help="path of the aiperf program")
    parser.add_argument("version", help="version of AIPerf")
    parser.add_argument("folder", type=Path, help="folder for aiperf.md and aiperf.json")
    arguments = parser.parse_args()
    aiperf, version, folder = arguments.aiperf, arguments.version, arguments.folder
    try:
        with signals_interrupt(), tempfile.TemporaryDirectory() as scratch, serve() as server:
            server.wait_ready()
            url = server.address.http_url
            run_ours(WARM_UP, url, write_prompts(Path(scratch), NUM_PROMPTS), Path(scratch))
            found = [measure(case, url, aiperf, Path(scratch)) for case in CASES]
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    write(folder, found, version)
    print(page(found, version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
