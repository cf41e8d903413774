"""--help of every script: a text and exit status 0, and nothing set up, started or written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELL = [
    *(path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix != ".sh"),
    *(ROOT / "engines_build").rglob("*.sh"),
]
PYTHON = [
    path
    for folder in ("clients", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def help_of(command: list[str], folder: Path) -> str:
    """Its output. There is no environment, and none may be made."""
    environment = os.environ | {"VENV": str(folder / "venv"), "HOME": str(folder)}
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "something was written"
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["folder", "-h"]], ids=["first", "last"])
@pytest.mark.parametrize("script", SHELL, ids=named)
def test_a_script_says_what_it_is_for(script: Path, arguments: list[str], tmp_path: Path) -> None:
    """Wherever it stands among the arguments."""
    shown = help_of(["bash", str(script), *arguments], tmp_path)
    assert len(shown.split()) > 5
    assert "set -euo" not in shown


@pytest.mark.parametrize("script", PYTHON, ids=named)
def test_a_program_says_what_it_is_for(script: Path, tmp_path: Path) -> None:
    assert len(help_of([sys.executable, str(script), "--help"], tmp_path).split()) > 10


def test_there_are_scripts() -> None:
    names = {named(path) for path in (*SHELL, *PYTHON)}
    assert {"scripts/bench", "engines_build/build_engines.sh", "scripts/loadtest"} <= names
