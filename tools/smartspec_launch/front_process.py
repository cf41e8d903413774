"""The front as a child process: command line, start, end."""

from __future__ import annotations

import subprocess
import sys
from typing import IO

from smartspec_launch.address import Address

MIN_BODY_BYTES = 1 << 20
BYTES_PER_TOKEN = 6 * 64
"""The longest text that is taken has 64 bytes a token (serving/intake.py), and JSON may write one
byte as six."""

UNKNOWN_BODY_BYTES = 8 << 20
"""Where the models say how long a context is, which is known when they are loaded."""

EXIT_S = 5.0


def max_body_bytes(max_context_len: int | None, triton_bears_bytes: int) -> int:
    """Room for the longest prompt, as far as this Triton survives it. max_context_len: None where
    it is not set."""
    if max_context_len is None:
        return min(UNKNOWN_BODY_BYTES, triton_bears_bytes)
    return min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * max_context_len), triton_bears_bytes)


class Front:
    """Started with its creation. It ends when `stop` is called, or when this process ends."""

    def __init__(self, address: Address, max_body: int, log: IO[bytes]) -> None:
        command = [sys.executable, "-m", "smartspec_launch.front"]
        command += [f"--host={address.host}", f"--port={address.http_port}"]
        command += [f"--triton={address.triton_url}", f"--max-body-bytes={max_body}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float = EXIT_S) -> None:
        """Let responses end, timeout_s at most. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
