"""Reads the metrics port of a live server."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

from smartspec_launch.triton_server import TritonServer

MODEL = 'model="smartspec",version="1"'
SETTLE_S = 60.0

_TYPE = re.compile(r"# TYPE (\w+) (counter|gauge|histogram)")
_HELP = re.compile(r"# HELP (\w+) \S.*")
_LABELS = r'(?:\w+="[^"\\]*")(?:,\w+="[^"\\]*")*'
_SAMPLE = re.compile(rf"(\w+)\{{({_LABELS})\}} (\S+)")


class Scrape:
    """The metrics of this backend from one GET. Every line must be well-formed.

    kinds: by family. values: by name and labels as written.
    """

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[str, dict[str, float]] = {}
        for line in text.splitlines():
            if "smartspec_" not in line or _HELP.fullmatch(line):
                continue
            if found := _TYPE.fullmatch(line):
                assert found[1] not in self.kinds, f"declared twice: {line}"
                self.kinds[found[1]] = found[2]
            else:
                found = _SAMPLE.fullmatch(line)
                assert found, line
                self.values.setdefault(found[1], {})[found[2]] = float(found[3])

    def get(self, name: str, label: str = "") -> float:
        """The value of the series that has this label; 0 if it does not exist yet."""
        found = [v for labels, v in self.values.get(name, {}).items() if label in labels]
        assert len(found) <= 1, f"{name} needs a label"
        return found[0] if found else 0.0


def read(server: TritonServer) -> str:
    with urllib.request.urlopen(server.address.metrics_url, timeout=60) as response:
        text: str = response.read().decode()
    return text


def scrape_when(server: TritonServer, is_settled: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape for which the condition holds; after SETTLE_S the last one."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        scrape = Scrape(read(server))
        if is_settled(scrape) or time.monotonic() > deadline:
            return scrape
        time.sleep(0.05)
