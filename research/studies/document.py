"""How a study is written down: a page of Markdown to read, and the same figures as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats are shown with three decimals."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def publish(
    folder: Path, name: str, title: str, sections: Sequence[str], figures: Mapping[str, Any]
) -> None:
    """Write NAME.md and NAME.json into the folder.

    sections: paragraphs and tables in order. figures: what the tables were made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = f"`scripts/study {name}`, {datetime.now(UTC):%Y-%m-%d}, {machine()}."
    text = "\n\n".join([f"# {title}", made, *sections]) + "\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    document = {"study": name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine()}
    (folder / f"{name}.json").write_text(
        json.dumps(document | dict(figures), indent=1) + "\n", encoding="utf-8"
    )


def machine() -> str:
    """Processor and number of cores of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{os.cpu_count()} cores of {model}"


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
