"""Locust beside pytest: always as a process of its own, since it patches the standard library."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADTEST = Path(__file__).parents[2] / "loadtest"
TIMEOUT_S = 60
STEP_S = 0.005
"""Of the fake engine's steps."""


@dataclass
class LocustRun:
    """Its process, and what it left in its folder."""

    process: subprocess.Popen[str]
    folder: Path
    output: str = ""

    def wait(self) -> int:
        """Exit code; what it printed is in `output`."""
        self.output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    def wait_for(self, words: str) -> None:
        """Until it prints them, or ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return

    def close(self) -> None:
        """Whatever is left of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "r.jsonl").read_text().splitlines()]

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Requests and failures by row."""
        with (self.folder / "l_stats.csv").open() as file:
            return {
                f"{row['Type']} {row['Name']}".strip(): (
                    int(row["Request Count"]),
                    int(row["Failure Count"]),
                )
                for row in csv.DictReader(file)
            }


def start(folder: Path, *arguments: str) -> LocustRun:
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST / "locustfile.py"), "--headless"]
    command += ["--only-summary", f"--csv={folder / 'l'}", f"--jsonl={folder / 'r.jsonl'}"]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return LocustRun(process, folder)
