"""Writes locked.txt again: the same packages and versions, with the hashes of their wheels.

Run it after a version in locked.txt was changed or a line was added. pip selects the wheels that
the CPU image installs, whatever this machine is. The image is built with --require-hashes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

FILE = Path(__file__).with_name("locked.txt")
NEWEST_GLIBC = 39
"""Of Ubuntu 24.04, on which the image is based: 2.39."""

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
PYTHON = ["--implementation=cp", "--python-version=3.12", "--abi=cp312", "--abi=abi3", "--abi=none"]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    lines = FILE.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    pins = [line.split()[0] for line in lines if "==" in line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--ignore-requires-python", "--no-deps"]
        options += ["--only-binary=:all:", "--quiet"]
        platforms = [f"--platform={one}" for one in PLATFORMS]
        command = [sys.executable, "-m", "pip", "install", *options, *PYTHON, *platforms]
        command += ["--target", folder, "--report", str(report), *pins]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    hashes = {
        _normal(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"]["sha256"]
        for one in found
    }
    locked = [f"{pin} --hash=sha256:{hashes[_normal(pin.split('==')[0])]}" for pin in pins]
    FILE.write_text("\n".join([*comments, *locked]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
