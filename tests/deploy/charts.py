"""The chart, rendered by helm's own code.

That code is in Go, whose runtime replaces the signal handlers of its process. Other tests send
signals to the process of the tests, so it has a process of its own.
"""

from __future__ import annotations

import atexit
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "helm"
CHART = FOLDER / "smartspec"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in (FOLDER / "examples").iterdir()}

Documents = dict[str, dict[str, Any]]


class ChartError(Exception):
    """Helm refuses the values; the message is helm's."""


def render(values: dict[str, Any]) -> Documents:
    """What the chart makes of these values, by kind; there is one of each. Raises ChartError."""
    texts = _helm().submit(_texts, values).result()
    found = [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]
    kinds = [document["kind"] for document in found]
    assert len(kinds) == len(set(kinds))
    return dict(zip(kinds, found, strict=True))


@cache
def _helm() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def _texts(values: dict[str, Any]) -> dict[str, str]:
    """In helm's process: the texts by the names of the files."""
    import helm_python

    try:
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            return dict(chart.render(values, name="demo", namespace="prod"))
    except helm_python.HelmError as error:
        raise ChartError(str(error)) from None
