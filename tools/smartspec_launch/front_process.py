"""Starts and stops the HTTP front as a child process."""

from __future__ import annotations

import subprocess
import sys
from typing import IO

from smartspec_launch.address import Address

MIN_BODY_BYTES = 1 << 20
BYTES_PER_TOKEN = 6 * 64
"""The longest accepted text has 64 bytes per token (serving/intake.py). JSON may encode one byte in
six."""

UNKNOWN_BODY_BYTES = 8 << 20
"""Limit if the models define the context length, which is known only after they are loaded."""

EXIT_S = 5.0


def max_body_bytes(max_context_len: int | None, triton_bears_bytes: int) -> int:
    """The body limit in bytes: room for the longest prompt, at most what this Triton can parse.

    max_context_len: None if it is not set.
    """
    if max_context_len is None:
        return min(UNKNOWN_BODY_BYTES, triton_bears_bytes)
    return min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * max_context_len), triton_bears_bytes)


class Front:
    """The front process. The constructor starts it. It ends on `stop` or with this process."""

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
        """The exit code, or None while the front runs."""
        return self._process.poll()

    def stop(self, timeout_s: float = EXIT_S) -> None:
        """Stop the front. Open responses get timeout_s to end, then it is killed. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
