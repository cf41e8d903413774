"""Tries to compile grammars in processes that can be ended.

Some grammars compile without end and without limit, in one call of the library. So a helper process
has the tokenizer, and forks a process for each grammar. That one has limits of time and memory. It
ends when it is done, at a limit, or when the caller closes its connection. The server compiles only
what has passed, which takes the same time again. (A matcher cannot be sent to another process. The
server itself cannot fork safely, because it has threads.)

`Trials` is the server's side, `serve` is the helper.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.guides import (
    GrammarError,
    compiled,
    grammar_text,
    look_ahead,
    short,
)
from smartspec_py.engines.structured.token_names import AddedTokens

POLL_S = 0.05
"""Time between checks whether anyone still waits for a grammar."""

WATCH_S = 0.01
"""Time between checks of the limits."""

HANGS_S = 60.0
"""Longest time of a trial, if it gets no computing time or if its helper does not start."""

NICE = 10
"""Lower priority than the passes of the server."""

STACK_BYTES = 2**20
"""Less than the stack of a thread of the server, so that what fits here also fits there. The
library follows a chain of rules or references by recursion: 3,000 of them need 8 MiB."""

STATUS = Path("/proc/self/status")

HELPER = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
setup = json.load(sys.stdin)
sys.path[:] = setup["path"]
spec = spec_from_file_location("smartspec_py", setup["package"])
sys.modules["smartspec_py"] = module_from_spec(spec)
from smartspec_py.engines.structured.trial import serve
serve(setup)
"""
"""As in model.py, the package need not be installed."""


@dataclass(frozen=True)
class CompileLimits:
    """Limits of compiling a grammar, and how many are compiled at once.

    quick_s: computing time after which a grammar waits for one of `num_slow` places, so that others
    need not wait for it. most_s: most computing time. most_bytes: most memory.
    num_quick, num_slow: at most this many grammars are compiled at once.
    """

    quick_s: float = 0.25
    most_s: float = 3.0
    most_bytes: int = 256 * 2**20
    num_quick: int = 3
    num_slow: int = 1


COMPILE_LIMITS = CompileLimits()


class TooSlowError(GrammarError):
    """Compiling took longer than it may in this trial."""


class CrashError(GrammarError):
    """The process of the trial ended without a result."""


class TrialEnded(Exception):
    """There is no result for a reason that is not the grammar."""


class Unwanted(TrialEnded):
    """Nobody waits for the grammar any more."""


class TrialHangs(TrialEnded):
    """There is no result within HANGS_S."""


@dataclass(frozen=True)
class Passed:
    """A grammar in the library's format, and the memory that it takes."""

    text: str
    num_bytes: int


def new_tokenizer(added: AddedTokens, vocab_size: int, end_tokens: Sequence[int]) -> LLTokenizer:
    """Raises ValueError for a tokenizer that the library does not know."""
    slices = LLTokenizer.json_slices()
    text = added.hidden_json
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_tokens), slices=slices)


class Trials:
    """Starts the helper, and again if it has ended. May be used by several threads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int], most_bytes: int
    ) -> None:
        self._setup: dict[str, Any] = {
            "path": sys.path,
            "package": str(Path(__file__).parents[2] / "__init__.py"),
            "tokenizer": tokenizer.to_str(),
            "vocab_size": vocab_size,
            "end_tokens": list(end_tokens),
        }
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def run(
        self, kind: GuideType, guide: str, most_s: float, is_wanted: Callable[[], bool]
    ) -> Passed:
        """Try to compile a grammar. is_wanted: called regularly; the trial ends when it is False.

        Raises GrammarError if it cannot be used, TooSlowError after most_s of computing time, and
        TrialEnded if there is no result.
        """
        asked = {"kind": kind, "guide": guide, "most_s": most_s, "most_bytes": self._most_bytes}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, _file_of(asked) as file:
                helper = self._send([theirs.fileno(), file])
            try:
                answer = _answer(ours, lambda: is_wanted() and not self._is_closed)
            except TrialHangs:
                helper.kill()  # it may hang itself; the next trial starts another
                raise
            return self._result(answer)

    def close(self) -> None:
        """End the helper and all trials, which then raise TrialEnded."""
        with self._lock:
            self._is_closed = True
            self._control.close()
            self._helper.kill()
            self._helper.wait()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, _file_of(self._setup | {"control": theirs.fileno()}) as file:
            self._helper = subprocess.Popen(
                [_python(), "-I", "-S", "-c", HELPER], stdin=file, pass_fds=[theirs.fileno()]
            )

    def _send(self, files: list[int]) -> subprocess.Popen[bytes]:
        """Returns the helper that gets the files."""
        with self._lock:
            if self._is_closed:
                raise TrialEnded("the server is shutting down")
            if self._helper.poll() is not None:
                self._control.close()
                self._start()
            try:
                socket.send_fds(self._control, [b"."], files)
            except OSError as error:
                raise TrialEnded("the process that compiles grammars has ended") from error
            return self._helper

    def _result(self, answer: bytes) -> Passed:
        if answer:
            values = json.loads(answer)
            if refused := values.get("refused"):
                raise (TooSlowError if values.get("is_late") else GrammarError)(refused)
            return Passed(values["text"], values["num_bytes"])
        with self._lock:
            if self._is_closed or self._helper.poll() is not None:
                raise TrialEnded("the process that compiles grammars has ended")
        raise CrashError("its compiler crashed: it may nest too deeply, or need much memory")


def _answer(connection: socket.socket, is_wanted: Callable[[], bool]) -> bytes:
    """What a trial sends until it closes its connection."""
    parts: list[bytes] = []
    end_s = time.monotonic() + HANGS_S
    connection.settimeout(POLL_S)
    while True:
        try:
            part = connection.recv(2**16)
        except TimeoutError:
            if not is_wanted():
                raise Unwanted("nobody waits for this grammar") from None
            if time.monotonic() > end_s:
                raise TrialHangs(f"compiling had no result within {HANGS_S:.0f} s") from None
        except OSError:  # the trial was killed before it had read all
            return b""
        else:
            if not part:
                return b"".join(parts)
            parts.append(part)


@contextlib.contextmanager
def _file_of(values: dict[str, Any]) -> Iterator[int]:
    """A descriptor of a file in memory with this JSON."""
    file = os.memfd_create("smartspec-grammar")
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(json.dumps(values).encode())
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _python() -> str:
    """The interpreter. Triton's Python process has embedded it, and may not know its path."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    paths = [sys.executable or "", f"{sys.exec_prefix}/bin/{name}", f"{sys.base_prefix}/bin/{name}"]
    found = [p for p in paths if Path(p).name.startswith("python") and os.access(p, os.X_OK)]
    return found[0] if found else shutil.which(name) or "python3"


# The helper


def serve(setup: dict[str, Any]) -> None:
    """Fork a trial for each message, until the server closes the connection or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)  # of SIGCHLD: no zombies
    os.nice(NICE)
    control = socket.socket(fileno=setup["control"])
    added = AddedTokens(setup["tokenizer"])
    tokenizer = new_tokenizer(added, setup["vocab_size"], setup["end_tokens"])
    while True:
        _, files, _, _ = socket.recv_fds(control, 1, 2)
        if not files:
            return
        with contextlib.suppress(OSError):  # without a process, the connection closes
            if os.fork() == 0:
                _try(tokenizer, added, *files)
        for file in files:
            os.close(file)


def _try(tokenizer: LLTokenizer, added: AddedTokens, connection_file: int, asked_file: int) -> None:
    """Send a result, or why there is none, and end this process."""
    try:
        connection = socket.socket(fileno=connection_file)
        with open(asked_file, "rb") as file:
            asked = json.load(file)
        before = _used_bytes()
        _limit(asked)
        threading.stack_size(STACK_BYTES)
        result: dict[str, Any] = {}
        work = threading.Thread(
            target=_compile, args=(tokenizer, added, asked, result), daemon=True
        )
        work.start()
        excess: dict[str, Any] = {}
        while work.is_alive() and not excess:
            work.join(WATCH_S)
            excess = _excess(asked, _used_bytes() - before)
            if _is_closed(connection):
                return
        found = {"num_bytes": _used_bytes() - before} | (result or excess)
        connection.sendall(json.dumps(found).encode())
    finally:
        os._exit(0)


def _compile(
    tokenizer: LLTokenizer, added: AddedTokens, asked: dict[str, Any], result: dict[str, Any]
) -> None:
    try:
        text = grammar_text(GuideType(asked["kind"]), asked["guide"], added)
        look_ahead(compiled(tokenizer, text), tokenizer)
    except MemoryError:
        result |= _refusal(f"compiling took more than {asked['most_bytes'] >> 20} MiB of memory")
    except BaseException as error:  # the library's parsers raise plain exceptions, and may panic
        result |= {"refused": short(str(error))}
    else:
        result |= {"text": text}


def _excess(asked: dict[str, Any], used_bytes: int) -> dict[str, Any]:
    """A refusal if a limit is reached."""
    if time.process_time() > asked["most_s"]:
        return _refusal(f"compiling took longer than {asked['most_s']:g} s", is_late=True)
    if used_bytes > asked["most_bytes"]:
        return _refusal(f"compiling took more than {asked['most_bytes'] >> 20} MiB of memory")
    return {}


def _refusal(reason: str, is_late: bool = False) -> dict[str, Any]:
    return {"refused": f"{reason}; use a simpler grammar", "is_late": is_late}


def _limit(asked: dict[str, Any]) -> None:
    """Limits of the kernel, for calls of the library that do not let other threads run. They are
    above those of `_excess`, which can say what happened."""
    data_bytes = _status("VmData")
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(2 * asked["most_s"]) + 1),
        (resource.RLIMIT_DATA, data_bytes + 2 * asked["most_bytes"]),
    ):
        _, allowed = resource.getrlimit(kind)  # the server may have got a lower limit itself
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before the server


def _used_bytes() -> int:
    """Memory of this process that no file backs, if the kernel counts it apart."""
    return _status("RssAnon", "VmRSS")


def _status(*names: str) -> int:
    """The first of these sizes that the kernel reports of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return next(int(lines[name].split()[0]) << 10 for name in names if name in lines)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
