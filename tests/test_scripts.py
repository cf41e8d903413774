"""--help of every script prints a text, exits with 0, and sets up, starts and writes nothing."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELL = [
    *(path for path in (ROOT / "scripts").iterdir() if path.suffix != ".sh"),
    *(ROOT / "engines_build").rglob("*.sh"),
]
PYTHON = [
    path
    for folder in ("clients", "deploy", "loadtest")
    for path in (ROOT / folder).rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
]
PYTHON.append(ROOT / "engines_build" / "check_models.py")
COMMANDS = [*(["bash", str(path), "folder", "-h"] for path in SHELL)]
COMMANDS += [[sys.executable, str(path), "--help"] for path in PYTHON]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[1]).name)
def test_help(command: list[str], tmp_path: Path) -> None:
    """The option may be last. There is no environment, and none may be made."""
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "something was written"
    assert len(done.stdout.split()) > 5
    assert "set -euo" not in done.stdout


SETUP = ROOT / "scripts" / "setup.sh"
RECORDER = """#!/usr/bin/env bash
[ "$2" = pip ] || echo "ran: $*"
"""


@pytest.mark.parametrize("name", ["quickstart", "loadtest"])
def test_after_the_installation_the_program_shows_its_options(name: str, tmp_path: Path) -> None:
    """The first call installs, with a Python that records its arguments."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(RECORDER)
    python.chmod(0o755)
    for options in ([], ["--help"]):
        done = subprocess.run(
            ["bash", str(ROOT / "scripts" / name), *options],
            env=os.environ | {"VENV": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("ran: ")


@pytest.mark.parametrize(
    "handler", ["", "trap 'exit 2' INT"], ids=["killed by it", "ends by itself, as pip does"]
)
def test_ctrl_c_ends_an_installation(handler: str, tmp_path: Path) -> None:
    """A terminal sends SIGINT to all processes of the group. The pipe, which the child has too,
    is at its end when all have ended."""
    read, write = os.pipe()
    child = tmp_path / "pip"
    child.write_text(
        f"{handler}\necho installing >&{write}\nfor _ in $(seq 600); do sleep 0.1; done\n"
    )
    script = (
        f"set -e; source {SETUP}; VENV={tmp_path}; quietly bash {child}; echo went on >&{write}"
    )
    installing = subprocess.Popen(
        ["bash", "-c", script],
        pass_fds=[write],
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's background processes ignore it, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(write)
    try:
        with open(read) as pipe, installing:
            assert pipe.readline() == "installing\n"
            os.killpg(installing.pid, signal.SIGINT)
            installing.wait(60.0)  # the process that prints dots looks for it
            assert pipe.read() == ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(installing.pid, signal.SIGKILL)
    assert installing.returncode != 0


SLOW_PYTHON = """#!/usr/bin/env bash
[ "$1" = -m ] || { echo Python 3.11; exit; }
for _ in $(seq 600); do
    if grep -q '[.][.]$' "$SHOWN"; then exit 3; fi
    sleep 0.05
done
"""
"""Creates no environment, and ends when two dots have been shown, or after 30 s."""


def test_a_slow_environment_shows_dots(tmp_path: Path) -> None:
    python, shown = tmp_path / "python", tmp_path / "shown"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    script = (
        f"source {SETUP}; find_python() {{ echo {python}; }}; sleep() {{ command sleep 0.01; }}"
    )
    with shown.open("w") as file:
        done = subprocess.run(
            ["bash", "-c", f"{script}; set_up x"],
            env=os.environ | {"VENV": str(tmp_path / "venv"), "SHOWN": str(shown)},
            stderr=file,
            timeout=60,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"Creating .*/venv with Python 3\.11 \.\.+ \d+ s\n", shown.read_text())


def test_a_python_that_is_absent_is_named(tmp_path: Path) -> None:
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": "python9"}
    command = ["bash", str(ROOT / "scripts" / "quickstart")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("PYTHON: got python9, which is no Python that runs")


def test_a_folder_with_other_files_is_not_made_an_environment(tmp_path: Path) -> None:
    """`VENV` is the folder of an environment, and not the one where many of them are."""
    (tmp_path / "others").mkdir()
    environment = os.environ | {"VENV": str(tmp_path)}
    command = ["bash", "-c", f"source {SETUP}; set_up x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"VENV: got {tmp_path}, which has files and is no virtual env")
    assert (tmp_path / "others").is_dir()


def test_the_load_test_shows_its_own_options() -> None:
    command = [sys.executable, str(ROOT / "loadtest" / "locustfile.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in ("--scenario", "--jsonl", "--users"))
    assert len(done.stdout.splitlines()) < 60
