"""--help of every script prints a text, exits with 0, and sets up, starts and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELL = [
    *(path for path in (ROOT / "scripts").iterdir() if path.suffix != ".sh"),
    *(ROOT / "engines_build").rglob("*.sh"),
]
PYTHON = [
    path
    for folder in ("clients", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
]
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
