"""The Dockerfile as far as it can be checked without an engine: sources and pins."""

from __future__ import annotations

import re
import shlex
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
    """Every requirement comes out of pyproject.toml, and the constraints contradict none."""
    cpu = JOINED.split(" AS cpu")[1].split("\nFROM ")[0]
    printed: list[str] = []
    for run in re.findall(r"^RUN (python3 \S+requirements.py [^>]*)>", cpu, re.MULTILINE):
        command = [sys.executable, *shlex.split(run)[1:]]
        printed += subprocess.check_output(command, cwd=REPOSITORY, text=True).split()
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["torch"], *extras["openvino"]]
    assert set(printed) == set(wanted)

    lines = (REPOSITORY / "deploy/image/constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    for package, version in (each.split("==") for each in wanted if "==" in each):
        assert pins.get(package, version) == version, package
    # torch has a build for each kind of machine, and the pin of pyproject fits all of them.
    assert "torch" not in pins


def test_requirements_that_are_installed_are_left_out() -> None:
    script = REPOSITORY / "deploy/image/requirements.py"
    command = [sys.executable, str(script), "--missing", "project"]
    assert subprocess.check_output(command, text=True) == ""
