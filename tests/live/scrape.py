"""Reads the metrics port of a live server, strictly."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

from smartspec_launch.triton_server import TritonServer

MODEL = 'model="smartspec",version="1"'
SETTLE_S = 5.0

_TYPE = re.compile(r"# TYPE (\w+) (counter|gauge|histogram)")
_HELP = re.compile(r"# HELP (\w+) \S.*")
_LABELS = r'(?:\w+="[^"\\]*")(?:,\w+="[^"\\]*")*'
_SAMPLE = re.compile(rf"(\w+)\{{({_LABELS})\}} (\S+)")


class Scrape:
    """What one GET of the metrics port says of this backend; every line of it must be well-formed.

    kinds: by family. values: by name and labels as written, those but `le` in Triton's order.
    """

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.helps: set[str] = set()
        self.values: dict[str, dict[str, float]] = {}
        for line in text.splitlines():
            if "smartspec_" in line:
                self._take(line)

    def _take(self, line: str) -> None:
        if found := _TYPE.fullmatch(line):
            assert found[1] not in self.kinds, f"declared twice: {line}"
            self.kinds[found[1]] = found[2]
        elif found := _HELP.fullmatch(line):
            self.helps.add(found[1])
        else:
            found = _SAMPLE.fullmatch(line)
            assert found, line
            self.values.setdefault(found[1], {})[found[2]] = float(found[3])

    def get(self, name: str, label: str = "") -> float:
        """The value of the series that has this label; 0 where it is not there yet."""
        found = [v for labels, v in self.values.get(name, {}).items() if label in labels]
        assert len(found) <= 1, f"{name} needs a label"
        return found[0] if found else 0.0


def read(server: TritonServer) -> str:
    with urllib.request.urlopen(server.address.metrics_url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def scrape_when(server: TritonServer, is_settled: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape for which it holds; after SETTLE_S the last, for the caller to look at."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        scrape = Scrape(read(server))
        if is_settled(scrape) or time.monotonic() > deadline:
            return scrape
        time.sleep(0.05)
