"""The unit of systemd: what it says agrees with the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smartspec_launch import gateway, triton_server
from smartspec_py.config import LimitsConfig

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "smartspec.service"


def settings() -> dict[str, str]:
    """The assignments of all sections."""
    lines = UNIT.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line[:1] not in ("#", "[", ""))


def test_a_stop_has_as_long_as_the_launcher_may_take() -> None:
    launcher_s = LimitsConfig().drain_s + triton_server.DRAIN_MARGIN_S + gateway.EXIT_S
    launcher_s += triton_server.EXIT_TIMEOUT_S + triton_server.EXIT_S + 2 * triton_server.GONE_S
    assert int(settings()["TimeoutStopSec"]) > launcher_s


def test_a_failure_starts_it_again_but_not_a_refused_config(tmp_path: Path) -> None:
    """The exit code of the unit's own command."""
    _, *arguments, path = settings()["ExecStart"].split()
    (tmp_path / Path(path).name).write_text("{}")
    command = [sys.executable, "-m", "smartspec_cli.app", *arguments, Path(path).name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "engine.json: engine" in done.stderr
    assert settings()["RestartPreventExitStatus"] == str(done.returncode)
    assert settings()["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a command that is there; systemd warns of unknown settings."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/smartspec/.venv/bin/smartspec", "/bin/true"))
    command = ["systemd-analyze", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
