"""The gateway process, which serves all ports in front of Triton."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from smartspec_launch.address import Address, responds, status_of
from smartspec_launch.interpreter import LaunchError
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import ServerConfig
from smartspec_py.engines.phases import Phase

OPENAI_PORT = 9000
"""Default port of the OpenAI routes."""

KEY_VARIABLE = "SMARTSPEC_API_KEY"
"""Their API key, if there is no file with keys."""

EXIT_S = 10.0
"""Time for open responses and for the end of the process, on a busy machine too."""

LEAST_FILES = 256
"""Files that a process of the server must be able to open."""


def allow_open_files() -> None:
    """Let this process, and so its children, open as many files as the system allows. Without one
    for a connection, Triton tries again for ever and fills its log.

    Raises LaunchError if that is too few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < LEAST_FILES:
        raise LaunchError(
            f"A process may open {most} files here, and the server needs {LEAST_FILES}: raise the "
            f"limit with ulimit -Hn {LEAST_FILES}, or more for more clients."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def tokenizer_dir(config: ServerConfig) -> Path | None:
    """The directory with the tokenizer of the served model; None if its engine has none."""
    given = getattr(config.engine, "tokenizer", None) or getattr(config.engine, "model", None)
    return Path(given) if given is not None and Path(given).is_dir() else None


def adapter_names(config: ServerConfig) -> tuple[str, ...]:
    """The names of the LoRA adapters of the served model."""
    return tuple(getattr(config.engine, "lora", ()))


@dataclass(frozen=True)
class OpenAi:
    """How to serve the OpenAI routes. model_dir: of the target, with its tokenizer.
    chat_template: None uses that of the model. api_key_file: None uses the environment.
    cors: origins whose pages may use them. adapters: names of LoRA adapters. names: of the model;
    the first is in answers."""

    port: int
    model_dir: Path
    chat_template: Path | None = None
    api_key_file: Path | None = None
    cors: Sequence[str] = ()
    adapters: Sequence[str] = ()
    names: Sequence[str] = ()

    def url(self, address: Address) -> str:
        return f"http://{address.reach}:{self.port}/v1"

    @property
    def has_chats(self) -> bool:
        """Whether there is a chat template: given, in its own file, or in the tokenizer's."""
        if self.chat_template is not None or (self.model_dir / "chat_template.jinja").is_file():
            return True
        settings = self.model_dir / "tokenizer_config.json"
        return settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")

    @property
    def needs_key(self) -> bool:
        return self.api_key_file is not None or bool(os.environ.get(KEY_VARIABLE))


def as_json(address: Address, openai: OpenAi | None, names: Sequence[str] = ()) -> str:
    """The argument of the process. names: of the model, beside MODEL_NAME."""
    given = {"address": asdict(address), "openai": openai and asdict(openai), "names": names}
    return json.dumps(given, default=str)


def from_json(text: str) -> tuple[Address, OpenAi | None, Sequence[str]]:
    """The values of `as_json`."""
    given = json.loads(text)
    openai = given["openai"]
    for name in ("model_dir", "chat_template", "api_key_file") if openai else ():
        openai[name] = openai[name] and Path(openai[name])
    return Address(**given["address"]), openai and OpenAi(**openai), given["names"]


class Gateway:
    """The process. It starts at once, and ends on `stop` or with this process."""

    name = "The gateway"

    def __init__(
        self, address: Address, openai: OpenAi | None, names: Sequence[str], log: IO[bytes]
    ) -> None:
        self._address, self._openai = address, openai
        self._phase: Phase | None = None
        self._process = subprocess.Popen(
            # -P: no module is imported from the working directory.
            [sys.executable, "-P", "-m", "smartspec_gateway", as_json(address, openai, names)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers in time, whatever it answers. With too many connections, it closes
        new ones. The path is none of its routes, so it does not ask Triton."""
        return responds(f"{self._address.http_url}/", timeout_s)

    def is_ready(self) -> bool:
        """Whether all its ports serve the model."""
        address = self._address
        urls = [f"{address.http_url}/v2/models/{MODEL_NAME}/ready", address.metrics_url]
        if self._openai is not None:
            urls.append(self._openai.url(address).removesuffix("v1") + "health")
        return all(status_of(url) == 200 for url in urls)

    def open(self, context_len: int) -> None:
        """Tell it that the model is ready. context_len: most tokens of a request."""
        self._tell({"context_len": context_len})

    def tell_start(self, phase: Phase) -> None:
        """Tell it how far the start is, for requests that come too early."""
        if phase != self._phase:
            self._phase = phase
            self._tell({"start": ", ".join(filter(None, (phase.name, phase.amount)))})

    def drain(self) -> None:
        """Tell it that the server drains: it refuses new requests with 503."""
        self._tell({"is_draining": True})

    def stop(self, timeout_s: float = EXIT_S) -> int:
        """Stop it, and return the exit code. Open responses get timeout_s to end, then it is
        killed. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _tell(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
