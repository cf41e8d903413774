"""Runs HAProxy with haproxy.cfg before two servers on loopback."""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from smartspec_launch.address import LOOPBACK

CONFIG = Path(__file__).with_name("haproxy.cfg")
STOP_S = 5.0
POLL_S = 0.05
BACKEND = "smartspec"
"""Name of the backend section in haproxy.cfg."""


class HaProxyError(RuntimeError):
    """HAProxy cannot run; the message says why."""


def find_haproxy() -> str | None:
    """The program, or None if it is not installed. Debian installs it in a folder of root."""
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


class HaProxy:
    """One HAProxy process on loopback, in a `with` block."""

    def __init__(self, folder: Path, port: int, servers: Mapping[str, int]) -> None:
        """folder: for the statistics socket. port: to listen on. servers: ports of a and b."""
        self.url = f"http://{LOOPBACK}:{port}"
        self._stats = folder / "haproxy.sock"
        self._environment = {"STATS_SOCKET": str(self._stats), "FRONT_PORT": str(port)}
        self._environment |= {f"PORT_{name.upper()}": str(p) for name, p in servers.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> HaProxy:
        program = find_haproxy()
        if program is None:
            raise HaProxyError("haproxy is not installed: run `apt-get install haproxy`")
        command = [program, "-db", "-q", "-f", str(CONFIG)]
        self._process = subprocess.Popen(command, env=os.environ | self._environment)
        while not self._stats.exists():
            if self._process.poll() is not None:
                raise HaProxyError(f"haproxy ended with exit code {self._process.returncode}")
            time.sleep(POLL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)

    def statistics(self) -> dict[str, dict[str, str]]:
        """HAProxy's counters by server. BACKEND has the sums of all servers."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._stats))
            client.sendall(b"show stat\n")
            text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: row for row in rows if row["pxname"] == BACKEND}

    def is_up(self, server: str) -> bool:
        """Whether the server takes new requests."""
        return self.statistics()[server]["status"] == "UP"
