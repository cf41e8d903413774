"""One Triton server as a child process: command line, environment, start, readiness, stop.

Where the address says so, the HTTP front is a second child: it starts and ends with Triton, and
writes to the same log.

The server and the stub processes that it forks are a process group of their own, so that a stop
reaches all of them and a Ctrl-C in the terminal reaches only the caller, who decides. The backend
is watched, and told to drain, by `smartspec_launch.link`. Model control is explicit, because only
then can the backend unload itself; over HTTP and gRPC those endpoints are closed to everybody.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from smartspec_launch.address import DIRECT, Address, free_address, taken_ports
from smartspec_launch.ascii_paths import AsciiPaths
from smartspec_launch.drain import POLL_S, Drained, drain
from smartspec_launch.files import (
    PACKAGE_FOLDER,
    Installation,
    find_installation,
    lock_run_dir,
    usable,
    write_backends,
    write_repository,
)
from smartspec_launch.front_process import Front, max_body_bytes
from smartspec_launch.link import LauncherEnd
from smartspec_launch.start_phases import start_phases
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.config import ServerConfig
from smartspec_py.serving.link import LINK_VARIABLE, remove_shared_memory

__all__ = [
    "Address",
    "ModelRefusedError",
    "TritonServer",
    "TritonServerError",
    "free_address",
    "server_command",
    "server_environment",
    "taken_ports",
]

MAX_POOLED_RESPONSES = 1024
"""Responses that a slow gRPC client may leave in Triton's memory; its own default is unbounded."""

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KERNEL_CACHE_SIZE = "256"
"""On a CPU oneDNN keeps a kernel for every number of tokens that it has met, in bfloat16 up to
several hundred MiB at its own 1,024. With 256 memory is flat after seconds, and no slower
(docs/research/log)."""

LOG_TAIL_LINES = 15
DRAIN_MARGIN_S = 5.0
"""Time beyond `limits.drain_s` that the backend is given to send its last responses."""

EXIT_TIMEOUT_S = 8.0
"""Time that Triton gives idle connections after SIGTERM; its own default is 30 s."""

EXIT_S = 10.0
CLOSED_APIS = "model-repository,shared-memory,trace,logging"
"""Triton's APIs that change or read what is not a client's."""

CLOSED_HEADER = "CLOSED:TO:ALL"
"""Triton opens a restricted API to whoever sends a header, and takes that header on its command
line alone, where every local user can read it. This one nobody can send: the name of an HTTP header
ends at its first colon, and gRPC refuses a name with a colon or capitals. So there is no key."""

GONE_S = 1.0
"""Time that killed processes are waited for."""

LAST_WORDS_S = 0.7
"""Time that responses are given to leave Triton when the backend has failed."""


class TritonServerError(RuntimeError):
    """The server did not become ready; the message holds the last lines of its log."""


class ModelRefusedError(TritonServerError):
    """The backend found engine.json or a checkpoint at fault; the message is its sentence."""


class TritonServer:
    """Serves one model. `with TritonServer(...) as server:` starts it and stops it.

    run_dir: holds all that is written: see smartspec_launch/files.py; and tritonserver.log.
    backend_folder: another one than this package, for tests of the launcher itself. aliases: names
    beside the model's own, see `serving.aliases`. options: of tritonserver, after all others.
    keeps_files: if not, run_dir is removed behind a `with` in which nothing failed.
    """

    def __init__(
        self,
        config: ServerConfig,
        run_dir: Path,
        address: Address,
        installation: Installation | None = None,
        backend_folder: Path = PACKAGE_FOLDER,
        aliases: Sequence[str] = (),
        options: Sequence[str] = (),
        *,
        keeps_files: bool = True,
    ) -> None:
        self.address = address
        self.log_path = run_dir / "tritonserver.log"
        self._config = config
        self._run_dir = run_dir
        self._installation = installation
        self._backend_folder = backend_folder
        self._aliases, self._options = tuple(aliases), tuple(options)
        self._keeps_files = keeps_files
        self._process: subprocess.Popen[bytes] | None = None
        self._front: Front | None = None
        self._is_stopped = False
        self._is_kept = False
        self._shm_prefix = f"smartspec_{secrets.token_hex(4)}_"
        self._link: LauncherEnd
        self._begin_s: float
        self._ascii_paths = AsciiPaths()
        self._lock: int | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        code = self.stop()
        if kind is None and code == 0 and not self._keeps_files:
            # What was measured is not lost for a folder that stays.
            shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Process id of tritonserver, which is also its process group."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def front_pid(self) -> int:
        """Process id of the HTTP front."""
        assert self._front is not None, "there is no front"
        return self._front.pid

    def start(self) -> None:
        """Write the run directory, start the process.

        Raises InstallationError or InterpreterError.
        """
        assert self._process is None, "a TritonServer is started once"
        installation = self._installation or find_installation()
        with contextlib.ExitStack() as undo:
            undo.callback(self._unlock)
            self._launch(installation)
            undo.pop_all()

    def _launch(self, installation: Installation) -> None:
        with usable(self._run_dir):
            self._lock = lock_run_dir(self._run_dir)
            run_dir = self._ascii_paths.of(self._run_dir, "run")
            config = self._ascii_paths.of_config(self._config)
            backends = write_backends(run_dir, installation, self._backend_folder)
            models = write_repository(run_dir, config, self._aliases)
            log = self.log_path.open("wb")
        environment = server_environment(installation)
        command = server_command(installation, environment, backends, models, self.address)
        command += [f"--load-model={alias}" for alias in self._aliases]
        command.append(f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}")
        command += self._options
        self._link = LauncherEnd()
        self._begin_s = time.time()
        with log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | {LINK_VARIABLE: f"{self._link.child_fd},{self._shm_prefix}"},
                pass_fds=[self._link.child_fd],
                start_new_session=True,
            )
            if self.address.triton_http_port is not None:
                limits = self._config.limits
                most = max_body_bytes(limits.max_context_len, installation.max_body_bytes)
                self._front = Front(self.address, most, log)
        self._link.hand_over()

    def poll(self) -> int | None:
        """Exit code of tritonserver, or of the front where that has ended alone; None while both
        run. A death by signal s is 128 + s."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is None and self._front is not None and not self._is_stopped:
            code = self._front.poll()
        if self._is_kept and code == -signal.SIGKILL:
            return 0
        return 128 - code if code is not None and code < 0 else code

    def look(self, timeout_s: float) -> str | None:
        """Wait up to timeout_s; then say, in a sentence, why it cannot serve, or None."""
        self._link.look(timeout_s)
        code = self.poll()
        if code is not None:
            return self.end_message(code)
        if self._link.beat is not None and self._link.beat.failure:
            time.sleep(LAST_WORDS_S)
            return f"The model has left service: {self._link.beat.failure}"
        return self._link.trouble

    def end_message(self, code: int) -> str:
        """Which process ended with the code that `poll` has returned."""
        assert self._process is not None, "not started"
        what = "The HTTP front" if self._process.poll() is None else "Triton"
        return f"{what} ended with exit code {code}."

    def wait_ready(
        self, progress: Callable[[str], None] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait until the model serves; `progress` is called with the newest line of the log.

        timeout_s: None is limits.start_s. Raises TritonServerError as soon as the process ends, or
        after timeout_s; ModelRefusedError where the backend said what is wrong.
        """
        timeout_s = self._config.limits.start_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.is_model_ready():
            code = self.poll()
            if code is not None:
                if refusal := self._refusal():
                    raise ModelRefusedError(self._ascii_paths.restored(refusal))
                raise TritonServerError(f"{self.end_message(code)}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TritonServerError(
                    f"Triton was not ready after {timeout_s:g} s, which limits.start_s (--start-s) "
                    f"allows: raise it if the log shows progress.\n{self.log_tail()}"
                )
            if progress is not None:
                progress(self.log_tail(1))
            time.sleep(POLL_S)

    def is_model_ready(self) -> bool:
        """Whether the server answers and the model can serve. A server that hangs counts as not."""
        url = f"{self.address.http_url}/v2/models/{MODEL_NAME}/ready"
        try:
            with DIRECT.open(url, timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def start_phases(self) -> dict[str, float]:
        """Seconds of each phase of the start so far, from Triton's own start on."""
        return start_phases(self._log_text(), self._begin_s)

    def logged(self, beginning: str) -> str | None:
        """The first message of Triton's log that begins so; None where there is none."""
        found = re.search(rf'{re.escape(beginning)}[^"\n]+', self._log_text())
        return found and found[0]

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of Triton's log, without the tables that it draws."""
        lines = self._log_text().splitlines()
        lines = [line for line in lines if line.strip() and line[0] not in "+|"]
        return "\n".join(lines[-num_lines:])

    def _log_text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _refusal(self) -> str | None:
        """The sentence of a backend that found its engine.json or models at fault, if it did."""
        found = re.search(r"Internal: TritonModelException: (.+)", self.log_tail())
        return found and found[1]

    def stop(self) -> int | None:
        """Drain, then SIGTERM, then SIGKILL, then whatever is left of the group. Idempotent.

        Draining refuses new requests and lets those in flight finish for `limits.drain_s`; the
        backend then ends each with its last response. A backend that has died, stands still or has
        failed is not waited for. Returns the exit code; None if it never started. A Triton that was
        killed because it kept a model whose requests were all answered has ended well: 0.
        """
        if self._process is None:
            self._ascii_paths.close()
            return None
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                # A second Ctrl-C is for now.
                wait_s = self._config.limits.drain_s + DRAIN_MARGIN_S
                end = drain(self._link, time.monotonic() + wait_s)
                self._is_kept = end is Drained.KEPT
                if self._front is not None:
                    self._front.stop()  # Triton waits for its idle connections
                if end not in (Drained.KEPT, Drained.DEAD):
                    self._process.send_signal(signal.SIGTERM)
                    self._process.wait(EXIT_S + EXIT_TIMEOUT_S)
        self.kill()
        return self.poll()

    def kill(self) -> None:
        """End whatever is left of the group at once, and remove what it leaves. Idempotent.

        A stub outlives a server that crashed or was killed, and so does their shared memory.
        """
        if self._process is None or self._is_stopped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)
        if self._front is not None:
            self._front.stop(GONE_S / 2)  # it tells its clients that their streams have broken off
        self._link.wait_gone(GONE_S)
        self._link.close()
        remove_shared_memory(self._shm_prefix)
        self._ascii_paths.close()
        self._unlock()
        self._is_stopped = True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def server_environment(installation: Installation) -> dict[str, str]:
    """The caller's environment, with the running Python's own packages for the stub to find."""
    environment = dict(os.environ)
    # The stub looks for `python3` on PATH and takes that interpreter's site-packages; it ignores
    # PYTHONPATH.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    for name in KERNEL_CACHES:
        environment.setdefault(name, KERNEL_CACHE_SIZE)
    if installation.library_dirs:
        inherited = environment.get("LD_LIBRARY_PATH")
        folders = [str(folder) for folder in installation.library_dirs]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*folders, inherited] if inherited else folders
        )
    return environment


def server_command(
    installation: Installation,
    environment: dict[str, str],
    backends: Path,
    models: Path,
    address: Address,
) -> list[str]:
    """Triton's command line."""
    guard = f"{CLOSED_APIS}:{CLOSED_HEADER}=none"
    command = [
        str(installation.binary),
        f"--model-repository={models}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        f"--load-model={MODEL_NAME}",
        "--disable-auto-complete-config",
        "--exit-on-error=true",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S:.0f}",
        f"--http-address={address.triton_host}",
        f"--http-port={address.triton_http_port or address.http_port}",
        f"--grpc-address={address.host}",
        f"--grpc-port={address.grpc_port}",
        f"--metrics-address={address.host}",
        f"--metrics-port={address.metrics_port}",
        f"--http-restricted-api={guard}",
        f"--grpc-restricted-protocol={guard}",
    ]
    pooled = "--grpc-max-response-pool-size"
    if pooled in _help_text(installation.binary, environment):
        command.append(f"{pooled}={MAX_POOLED_RESPONSES}")
    return command


def _help_text(binary: Path, environment: dict[str, str]) -> str:
    """Triton's options differ by version, and an unknown one ends it."""
    result = subprocess.run(
        [str(binary), "--help"], env=environment, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr
