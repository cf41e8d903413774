"""Runs one Triton server as a child process: command line, environment, start, readiness, stop.

If the address has a front, the HTTP front is a second child process. It starts and ends with
Triton, and writes to the same log.

The server and the stub processes that it forks have their own process group. A stop therefore
reaches all of them, and a Ctrl-C in the terminal reaches only the caller. The launcher watches and
drains the backend through `smartspec_launch.link`. Model control is explicit, because the backend
can unload itself only in this mode. Its HTTP and gRPC endpoints are closed to all clients.
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
from smartspec_launch.front_process import Companion, OpenAi, max_body_bytes, start_front
from smartspec_launch.link import LauncherEnd
from smartspec_launch.start_phases import start_phases
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.config import CONTEXT_LINE, ServerConfig
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
"""Responses that Triton keeps in memory for a slow gRPC client. Triton's default is unbounded."""

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KERNEL_CACHE_SIZE = "256"
"""On a CPU, oneDNN caches one kernel per number of tokens. In bfloat16 its default of 1,024 kernels
takes up to several hundred MiB. With 256, memory use is constant after seconds and speed is the
same (docs/research/log)."""

LOG_TAIL_LINES = 15
DRAIN_MARGIN_S = 5.0
"""Time after `limits.drain_s` in which the backend sends its last responses."""

EXIT_TIMEOUT_S = 8.0
"""Time that Triton waits for idle connections after SIGTERM. Triton's default is 30 s."""

EXIT_S = 10.0
CLOSED_APIS = "model-repository,shared-memory,trace,logging"
"""Triton's administrative APIs, which clients must not use."""

CLOSED_HEADER = "CLOSED:TO:ALL"
"""A request to a restricted API must have this header. Triton takes the header only from its
command line, which every local user can read. So this header is one that no client can send: the
name of an HTTP header ends at its first colon, and gRPC refuses names with a colon or capitals."""

GONE_S = 1.0
"""Time to wait for killed processes to end."""

LAST_WORDS_S = 0.7
"""Time for Triton to send the last responses after the backend has failed."""


class TritonServerError(RuntimeError):
    """The server did not become ready; the message holds the last lines of its log."""


class ModelRefusedError(TritonServerError):
    """The backend refused engine.json or a checkpoint; the message is the backend's own."""


class TritonServer:
    """Serves one model. `with TritonServer(...) as server:` starts it and stops it.

    run_dir: holds all written files (see smartspec_launch/files.py) and tritonserver.log.
    backend_folder: the backend package; tests of the launcher set another one.
    aliases: additional names of the model, see `smartspec_launch.aliases`.
    options: additional options of tritonserver, placed last.
    keeps_files: if false, run_dir is removed after a `with` block without errors.
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
        self._front: Companion | None = None
        self._companions: list[Companion] = []
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
            # An error here must not lose the results of a measurement.
            shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Process id of tritonserver. It is also the process group id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def front_pid(self) -> int:
        """Process id of the HTTP front."""
        assert self._front is not None, "there is no front"
        return self._front.pid

    def start(self) -> None:
        """Write the run directory and start the process.

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
                self._front = start_front(self.address, most, log)
                self._companions.append(self._front)
        self._link.hand_over()

    def start_openai(self, openai: OpenAi) -> Companion:
        """Start the OpenAI-compatible endpoint of a server that is ready. Does not wait."""
        with self.log_path.open("ab") as log:
            companion = openai.start(self.address, self.context_len, log)
        self._companions.append(companion)
        return companion

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens of one request, of a server that is ready."""
        found = re.search(r"\d+", self.logged(CONTEXT_LINE) or "")
        return int(found[0]) if found else self._config.limits.context_len

    def poll(self) -> int | None:
        """Exit code of tritonserver, or of a process beside it if only that has ended.

        None while all run. A process ended by signal s has the code 128 + s.
        """
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is None and not self._is_stopped:
            codes = (companion.poll() for companion in self._companions)
            code = next((one for one in codes if one is not None), None)
        if self._is_kept and code == -signal.SIGKILL:
            return 0
        return 128 - code if code is not None and code < 0 else code

    def look(self, timeout_s: float) -> str | None:
        """Wait up to timeout_s. Return one sentence that says why the server cannot serve, or
        None."""
        self._link.look(timeout_s)
        code = self.poll()
        if code is not None:
            return self.end_message(code)
        if self._link.beat is not None and self._link.beat.failure:
            time.sleep(LAST_WORDS_S)
            return f"The model has stopped: {self._link.beat.failure}"
        return self._link.trouble

    def end_message(self, code: int) -> str:
        """A sentence that names the process that ended with this code of `poll`."""
        assert self._process is not None, "not started"
        what = "Triton"
        if self._process.poll() is None:
            what = next(one.name for one in self._companions if one.poll() is not None)
        return f"{what} ended with exit code {code}."

    def wait_ready(
        self, progress: Callable[[str], None] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait until the model is ready. Calls `progress` with the newest log line.

        timeout_s: None means limits.start_s. Raises TritonServerError when the process ends or
        after timeout_s. Raises ModelRefusedError if the backend reported the reason.
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
                    f"Triton was not ready after {timeout_s:g} s, the limit of limits.start_s: "
                    f"raise it if the log shows progress.\n{self.log_tail()}"
                )
            if progress is not None:
                progress(self.log_tail(1))
            time.sleep(POLL_S)

    def is_model_ready(self) -> bool:
        """Whether the server responds and the model is ready. False if the server hangs."""
        url = f"{self.address.http_url}/v2/models/{MODEL_NAME}/ready"
        try:
            with DIRECT.open(url, timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def start_phases(self) -> dict[str, float]:
        """Seconds of each start phase so far, from the start of the Triton process."""
        return start_phases(self._log_text(), self._begin_s)

    def logged(self, beginning: str) -> str | None:
        """The first message in Triton's log with this beginning, or None."""
        found = re.search(rf'{re.escape(beginning)}[^"\n]+', self._log_text())
        return found and found[0]

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of Triton's log, without its tables."""
        lines = self._log_text().splitlines()
        lines = [line for line in lines if line.strip() and line[0] not in "+|"]
        return "\n".join(lines[-num_lines:])

    def _log_text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _refusal(self) -> str | None:
        """The backend's message if it refused its engine.json or models, else None."""
        found = re.search(r"Internal: TritonModelException: (.+)", self.log_tail())
        return found and found[1]

    def stop(self) -> int | None:
        """Drain, send SIGTERM, then SIGKILL to the remaining processes of the group. Idempotent.

        During the drain the server refuses new requests, the front with 503. Requests in flight
        have `limits.drain_s` to finish; the backend then ends each with a last response. There is
        no wait for a backend that has died, does not respond or has failed. Returns the exit code,
        or None if the server never started. The code is 0 if Triton had to be killed only because
        it kept the model after all requests were answered.
        """
        if self._process is None:
            self._ascii_paths.close()
            return None
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                # A second Ctrl-C ends the wait at once.
                wait_s = self._config.limits.drain_s + DRAIN_MARGIN_S
                if self._front is not None:
                    self._front.drain()
                end = drain(self._link, time.monotonic() + wait_s)
                self._is_kept = end is Drained.KEPT
                for companion in self._companions:
                    companion.stop()  # Triton would wait for their idle connections
                if end not in (Drained.KEPT, Drained.DEAD):
                    self._process.send_signal(signal.SIGTERM)
                    self._process.wait(EXIT_S + EXIT_TIMEOUT_S)
        self.kill()
        return self.poll()

    def kill(self) -> None:
        """Kill the remaining processes of the group at once, and clean up. Idempotent.

        If the server crashed or was killed, its stub and their shared memory still exist.
        """
        if self._process is None or self._is_stopped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)
        for companion in self._companions:
            companion.stop(GONE_S / 2)  # it reports broken streams to its clients
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
    """The caller's environment, changed so that the stub finds the packages of this Python."""
    environment = dict(os.environ)
    # The stub uses the site-packages of the first `python3` on PATH. It ignores PYTHONPATH.
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
    """Triton's help text. Options differ by version, and Triton exits on an unknown option."""
    result = subprocess.run(
        [str(binary), "--help"], env=environment, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr
