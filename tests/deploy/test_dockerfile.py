"""The Dockerfile as far as it can be checked without an engine: sources and pins."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
JOINED = DOCKERFILE.replace("\\\n", " ")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_copied_files_exist() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", JOINED, re.MULTILINE)
        for source in line.split()
    ]
    assert "deploy/image/entrypoint.py" in sources
    assert all((REPOSITORY / source).exists() for source in sources)


def test_triton_is_one_whose_known_vulnerabilities_are_fixed() -> None:
    """Release YY.MM; the entry refuses an older one by its version."""
    releases = re.findall(r"^ARG TRITON_\w+=\S+/tritonserver:(\d\d\.\d\d)-", DOCKERFILE, re.M)
    assert len(releases) == 2
    assert min(releases) >= "26.05"


def test_the_cpu_image_installs_what_pyproject_pins() -> None:
    """All packages but torch come from locked.txt, with hashes."""
    cpu = JOINED.split(" AS cpu")[1].split("\nFROM ")[0]
    assert " --no-deps --require-hashes -r deploy/image/locked.txt" in cpu
    script = re.findall(r"^RUN (python3 \S+requirements.py [^>]*)>", cpu, re.MULTILINE)
    assert [line.split()[2:] for line in script] == [["torch"]]

    lines = (REPOSITORY / "deploy/image/locked.txt").read_text().splitlines()
    pins = dict[str, str]()
    for line in lines:
        if not line.startswith("#"):
            found = re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
            assert found, line
            pins[found[1].lower()] = found[2]
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["torch"], *extras["openvino"]]
    names = {re.split(r"[\[=<>~!; ]", each)[0].lower(): each for each in wanted}
    # torch has a build for each kind of machine, and the pin of pyproject fits all of them.
    assert names.keys() - pins.keys() == {"torch"}
    for name, each in names.items():
        if "==" in each and name in pins:
            assert each.split("==")[1] == pins[name]


def test_requirements_that_are_installed_are_left_out() -> None:
    script = REPOSITORY / "deploy/image/requirements.py"
    command = [sys.executable, str(script), "--missing", "project"]
    assert subprocess.check_output(command, text=True) == ""
