"""Writes locked.txt again: the same packages and versions, with the hashes of their wheels.

Run it after a version in locked.txt was changed or a line was added. pip selects the wheels that
the CPU image installs on each of its bases, whatever this machine is. The image is built with
--require-hashes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).with_name("locked.txt")
BASES = {"3.11": 36, "3.12": 39}
"""Python and the minor version of glibc 2: of Debian 12, and of NVIDIA's image (Ubuntu 24.04)."""


def hashes_of(pins: list[Requirement], python: str, glibc: int) -> dict[str, str]:
    """The sha256 of each wheel that this base installs, by the normal name of its package."""
    tag = "cp" + python.replace(".", "")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--ignore-requires-python", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--implementation=cp", f"--python-version={python}"]
    command += [f"--abi={abi}" for abi in (tag, "abi3", "none")]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(glibc, 4, -1)]
    command += [f"--platform=manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    wanted = [f"{each.name}{each.specifier}" for each in pins if installs(each, python)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([*command, "--target", folder, "--report", str(report), *wanted], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(each["metadata"]["name"]): each["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for each in found
    }


def installs(pin: Requirement, python: str) -> bool:
    return pin.marker is None or pin.marker.evaluate({"python_version": python})


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    lines = FILE.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    texts = [line.partition(" --hash")[0] for line in lines if not line.startswith("#")]
    pins = [Requirement(text) for text in texts]
    found = {python: hashes_of(pins, python, glibc) for python, glibc in BASES.items()}
    locked = []
    for text, pin in zip(texts, pins, strict=True):
        name = canonicalize_name(pin.name)
        hashes = dict.fromkeys(found[base][name] for base in BASES if installs(pin, base))
        locked.append(" ".join([text, *(f"--hash=sha256:{each}" for each in hashes)]))
    FILE.write_text("\n".join([*comments, *locked]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
