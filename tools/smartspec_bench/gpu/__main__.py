"""`python -m smartspec_bench.gpu [--dry-run] [FOLDER]`; the last line is one JSON document."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "pydantic")
"""Packages that this command imports. Those of the command line are not among them."""

FAILED, USAGE_ERROR = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 for a fault in the texts, 2 if it cannot run here."""
    started_s = time.monotonic()  # before the imports below, which take seconds
    options = _parser().parse_args(arguments)
    if missing := missing_packages(NEEDED):
        _say(f"missing here: {', '.join(missing)}; run: {install_command(missing)}")
        return USAGE_ERROR
    from smartspec_bench.gpu.device import DeviceError, choose_device
    from smartspec_bench.gpu.page import report
    from smartspec_bench.gpu.plan import DRY_RUN, FULL
    from smartspec_bench.gpu.run import run
    from smartspec_bench.report.blocks import markdown

    plan = DRY_RUN if options.dry_run else FULL
    try:
        document = run(plan, choose_device(plan), options.folder, started_s, _say)
    except DeviceError as error:
        _say(str(error))
        return USAGE_ERROR
    _say(markdown(report(document)))
    print(json.dumps(document.to_json()))
    return FAILED if document.num_faults else 0


def missing_packages(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def install_command(names: Sequence[str]) -> str:
    return f"{sys.executable} -m pip install {' '.join(names)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    # Not typer, as in the other commands: an image for CUDA need not have it.
    parser = argparse.ArgumentParser(
        prog="scripts/bench --gpu",
        description="Measure speculation on a CUDA device, in eight minutes at most.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU with small models; figures mean nothing"
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(".smartspec/results"),
        help="gets gpu.json and gpu.md, written again after every part (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
