"""One side of the comparison in a process of its own: the protocol, and starting it.

Both sides read a line of JSON for each job and answer with one: seconds from handing the prompts
over to the last token, and how many tokens came. While one works, the other is stopped: a process
that merely waits may keep a core busy, and made steps of the other's two threads twice as long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Settings:
    """k: the peer's drafts per step, 0 for none, the same for all; ours is told by policy."""

    target: str
    draft: str
    dtype: str
    num_threads: int
    max_sequences: int
    max_context_len: int
    k: int = 0


@dataclass(frozen=True)
class Job:
    """Prompts to be answered together, with exactly max_tokens tokens each."""

    prompts: Sequence[str]
    max_tokens: int
    policy: str = "none"


@dataclass(frozen=True)
class Done:
    seconds: float
    num_tokens: int
    texts: Sequence[str]


def serve(start: Callable[[Settings], Callable[[Job], Done]]) -> None:
    """Answer jobs until the input ends. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = start(Settings(**json.loads(sys.argv[1])))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(run(Job(**json.loads(line))))), file=replies, flush=True)


class WorkerEnded(RuntimeError):
    def __init__(self, module: str, status: int) -> None:
        super().__init__(f"{module} ended with {status}; see its log")
        self.module = module


class Worker:
    """The process; use within `with`. module: its program, which python finds on its path."""

    def __init__(
        self, python: str, module: str, settings: Settings, environment: Mapping[str, str], log: Any
    ) -> None:
        self.module = module
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        self._line()
        self._process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, job: Job) -> Done:
        """Raises WorkerEnded where the process has ended."""
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # _line tells why
            print(json.dumps(asdict(job)), file=self._stdin, flush=True)
        done = Done(**json.loads(self._line()))
        self._process.send_signal(signal.SIGSTOP)
        return done

    def _line(self) -> str:
        line = self._stdout.readline()
        if not line:
            raise WorkerEnded(self.module, self._process.wait())
        return line
