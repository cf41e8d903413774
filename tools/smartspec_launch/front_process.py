"""Processes beside Triton: the HTTP front, and the OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smartspec_launch.address import DIRECT, Address
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.config import ServerConfig

MIN_BODY_BYTES = 1 << 20
BYTES_PER_TOKEN = 6 * 64
"""The longest accepted text has 64 bytes per token (serving/intake.py). JSON may encode one byte in
six."""

UNKNOWN_BODY_BYTES = 8 << 20
"""Limit if the models define the context length, which is known only after they are loaded."""

OPENAI_PORT = 9000
"""Default port of the OpenAI-compatible endpoint."""

EXIT_S = 5.0
START_S = 20.0
POLL_S = 0.1


def max_body_bytes(max_context_len: int | None, triton_bears_bytes: int) -> int:
    """The body limit in bytes: room for the longest prompt, at most what this Triton can parse.

    max_context_len: None if it is not set.
    """
    if max_context_len is None:
        return min(UNKNOWN_BODY_BYTES, triton_bears_bytes)
    return min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * max_context_len), triton_bears_bytes)


class Companion:
    """A process beside Triton. It starts at once, and ends on `stop` or with this process."""

    def __init__(self, name: str, command: Sequence[str], log: IO[bytes]) -> None:
        """name: for messages, such as "The HTTP front". command: arguments of Python."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def drain(self) -> None:
        """Tell it that the server drains: it refuses new requests with 503. Only for the front."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(b"drain\n")
            self._process.stdin.flush()

    def stop(self, timeout_s: float = EXIT_S) -> None:
        """Stop it. Open responses get timeout_s to end, then it is killed. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_front(address: Address, max_body: int, log: IO[bytes]) -> Companion:
    """Start the HTTP front of this address."""
    command = ["-m", "smartspec_launch.front"]
    command += [f"--host={address.host}", f"--port={address.http_port}"]
    command += [f"--triton={address.triton_url}", f"--max-body-bytes={max_body}"]
    return Companion("The HTTP front", command, log)


def tokenizer_dir(config: ServerConfig) -> Path | None:
    """The directory with the tokenizer of the served model; None if its engine has none."""
    given = getattr(config.engine, "tokenizer", None) or getattr(config.engine, "model", None)
    return Path(given) if given is not None and Path(given).is_dir() else None


@dataclass(frozen=True)
class OpenAi:
    """How to start the OpenAI-compatible endpoint. model_dir: of the target, with its tokenizer.
    chat_template: None uses that of the model. api_key_file: None uses the environment."""

    port: int
    model_dir: Path
    chat_template: Path | None = None
    api_key_file: Path | None = None

    def start(self, address: Address, context_len: int, log: IO[bytes]) -> Companion:
        """context_len: of the served model."""
        command = ["-m", "smartspec_openai", "--ends-with-stdin"]
        command += [f"--host={address.host}", f"--port={self.port}", f"--name={MODEL_NAME}"]
        command += [f"--triton={address.grpc_url}", f"--metrics-url={address.metrics_url}"]
        command += [f"--model-dir={self.model_dir}", f"--context-len={context_len}"]
        for option, path in (
            ("chat-template", self.chat_template),
            ("api-key-file", self.api_key_file),
        ):
            command += [] if path is None else [f"--{option}={path}"]
        return Companion("The OpenAI-compatible endpoint", command, log)

    def url(self, address: Address) -> str:
        return f"http://{address.reach}:{self.port}/v1"

    def announcement(self, address: Address) -> str:
        page = self.url(address).removesuffix("v1")
        return f"OpenAI-compatible endpoint: {self.url(address)}; in a browser: {page}"

    def is_up(self, address: Address, companion: Companion) -> bool:
        """Wait until it answers, whatever Triton does. False if it ends first."""
        deadline = time.monotonic() + START_S
        while companion.poll() is None and time.monotonic() < deadline:
            try:
                with DIRECT.open(f"{self.url(address)}/models", timeout=1.0):
                    return True
            except urllib.error.HTTPError:
                return True  # it asks for an API key
            except OSError:
                time.sleep(POLL_S)
        return False
