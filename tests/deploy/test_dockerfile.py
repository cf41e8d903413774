"""The Dockerfile as far as it can be checked without an engine: sources and pins."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    releases = re.findall(r"/tritonserver:(\d\d\.\d\d)-", DOCKERFILE)
    assert len(releases) == 2  # the base of `gpu`, and the other one of `cpu`
    assert min(releases) >= "26.05"


def test_the_cpu_image_installs_what_pyproject_pins() -> None:
    """All packages but torch come from locked.txt, with hashes."""
    cpu = JOINED.split(" AS cpu")[1].split("\nFROM ")[0]
    assert " --no-deps --require-hashes -r deploy/image/locked.txt" in cpu
    script = re.findall(r"^RUN (python3 \S+requirements.py [^>]*)>", cpu, re.MULTILINE)
    assert [line.split()[2:] for line in script] == [["torch"]]

    pins = locked("3.11")
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["openvino"], *extras["triton"], *extras["torch"]]
    for requirement in map(Requirement, wanted):
        # torch has a build for each kind of machine, and the pin of pyproject fits all of them.
        if requirement.name != "torch":
            assert pins[requirement.name] in requirement.specifier, requirement
    assert "torch" not in pins


def test_nvidias_image_keeps_its_own_triton() -> None:
    """The launcher prefers the wheel of Triton where it is installed."""
    assert "nvidia-pytriton" in locked("3.11")
    assert "nvidia-pytriton" not in locked("3.12")
    assert locked("3.12").keys() < locked("3.11").keys()


def locked(python: str) -> dict[str, str]:
    """The versions in locked.txt for this Python, by the normal names of the packages."""
    pins = dict[str, str]()
    for line in (REPOSITORY / "deploy/image/locked.txt").read_text().splitlines():
        if not line.startswith("#"):
            found = re.fullmatch(r"([^;]+?(?:; .+?)?)((?: --hash=sha256:[0-9a-f]{64})+)", line)
            assert found, line
            requirement = Requirement(found[1])
            marker = requirement.marker
            if marker is None or marker.evaluate({"python_version": python}):
                [pin] = requirement.specifier
                assert pins.setdefault(canonicalize_name(requirement.name), pin.version)
    return pins


def test_requirements_that_are_installed_are_left_out() -> None:
    script = REPOSITORY / "deploy/image/requirements.py"
    command = [sys.executable, str(script), "--missing", "project"]
    assert subprocess.check_output(command, text=True) == ""
