"""The Dockerfile as far as it can be checked without an engine: context, pins, commands, users."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from containerfile import Stage, read_stages

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = read_stages(REPOSITORY / "Dockerfile")
FINAL = ("cpu", "gpu")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file into the build context; the last rule that fits decides."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    is_ignored = False
    for line in lines:
        rule = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if "**/" in line else heads
        if line and not line.startswith("#") and any(fnmatch(name, rule) for name in names):
            is_ignored = not line.startswith("!")
    return not is_ignored


def final(stage: Stage, word: str) -> str:
    return stage.all(word)[-1]


def test_ignore_rules_as_docker_reads_them() -> None:
    assert is_sent("backend/smartspec_py/model.py")
    assert not is_sent("backend/smartspec_py/__pycache__/model.cpython-311.pyc")
    assert not is_sent("backend/smartspec_py.egg-info/PKG-INFO")
    assert not is_sent("tests/conftest.py")
    assert not is_sent(".git/config")


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_what_is_copied_exists_and_is_sent_to_the_builder(stage: Stage) -> None:
    earlier = list(STAGES)[: list(STAGES).index(stage.name)]
    for copy in stage.copies:
        if copy.source_stage is not None:
            assert copy.source_stage in earlier
            continue
        for source in copy.sources:
            path = REPOSITORY / source
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            assert files, f"{source} does not exist or is empty"
            sent = [p for p in files if is_sent(p.relative_to(REPOSITORY).as_posix())]
            assert sent, f"{source} is kept out by .dockerignore"


def test_every_module_of_the_package_reaches_the_builder() -> None:
    modules = [path for name in ("backend", "tools") for path in (REPOSITORY / name).rglob("*.py")]
    assert all(is_sent(p.relative_to(REPOSITORY).as_posix()) for p in modules)


def test_base_images_are_pinned() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    bases = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))
    for image in bases.values():
        assert re.search(r":\d+\.\d+", image), image
    assert {stage.image for stage in STAGES.values()} <= {f"${{{name}}}" for name in bases}


@pytest.mark.parametrize("name", FINAL)
def test_final_stages_run_as_a_user_without_network_and_tell_their_health(name: str) -> None:
    stage = STAGES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", final(stage, "USER"))
    assert final(stage, "EXPOSE").split() == ["8000", "8001", "8002", "9000"]
    environment = " ".join(stage.all("ENV"))
    assert "HF_HUB_OFFLINE=1" in environment
    assert "TRANSFORMERS_OFFLINE=1" in environment
    copied = {Path(source).name for copy in stage.copies for source in copy.sources}
    for command in (final(stage, "ENTRYPOINT"), final(stage, "HEALTHCHECK").partition("CMD ")[2]):
        script = Path(json.loads(command)[-1])
        assert script.parent == Path("/opt/smartspec")
        assert script.name in copied


def test_the_cpu_image_installs_what_pyproject_pins() -> None:
    """Every requirement comes out of pyproject.toml, and the constraints contradict none."""
    installs = [run for run in STAGES["cpu"].all("RUN") if "requirements.py" in run]
    printed: list[str] = []
    for run in installs:
        command = shlex.split(run.partition(">")[0])
        output = subprocess.run(
            [sys.executable, *command[1:]], cwd=REPOSITORY, capture_output=True, text=True
        )
        printed += output.stdout.split()
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["torch"], *extras["openvino"]]
    assert set(printed) == set(wanted)

    lines = (REPOSITORY / "deploy/image/constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    exact = dict(each.split("==") for each in wanted if "==" in each)
    for package, version in exact.items():
        assert pins.get(package, version) == version, package
    assert "nvidia-pytriton" not in pins, "Triton is the base image's"
    # torch has a build for each kind of machine, and the pin of pyproject fits all of them.
    assert "torch" not in pins


@pytest.mark.parametrize("name", FINAL)
def test_triton_is_one_whose_known_vulnerabilities_are_fixed(name: str) -> None:
    """Release YY.MM; the entry refuses an older one by its version."""
    text = (REPOSITORY / "Dockerfile").read_text()
    bases = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))
    image = bases[STAGES[name].image.strip("${}")]
    found = re.fullmatch(r"nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-.*py3", image)
    assert found is not None
    assert found[1] >= "26.05"


def test_the_gpu_image_keeps_its_own_torch_and_transformers() -> None:
    runs = " ".join(STAGES["gpu"].all("RUN"))
    assert "pip list --format=freeze > installed.txt" in runs
    assert "requirements.py --missing project" in runs
    assert "-c installed.txt" in runs


def test_requirements_that_are_installed_are_left_out() -> None:
    script = REPOSITORY / "deploy/image/requirements.py"
    command = [sys.executable, str(script), "--missing", "project"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == "", "the tests run where all of them are installed"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
