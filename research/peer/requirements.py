"""Prints what installed packages ask for here, less what a text model on a CPU does not need."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
"""torch and intel-openmp are installed by version; the others have no CPU build beside it."""


def wanted(package: str) -> list[str]:
    found = [Requirement(text) for text in requires(package) or []]
    return [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in found
        if one.name.lower() not in LEFT_OUT and (one.marker is None or one.marker.evaluate())
    ]


if __name__ == "__main__":
    print("\n".join(one for package in sys.argv[1:] for one in wanted(package)))
