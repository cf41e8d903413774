"""Runs one Triton server as a child process: command line, environment, start, readiness, stop.

The gateway is a second child process. It starts and ends with Triton, and writes to the same log.

The server and the stub processes that it forks have their own process group. A stop therefore
reaches all of them, and a Ctrl-C in the terminal reaches only the caller. The launcher watches and
drains the backend through `smartspec_launch.link`. Model control is explicit, because the backend
can unload itself only in this mode. Its HTTP and gRPC endpoints are closed to all clients.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from smartspec_launch.address import (
    ANSWER_S,
    LOOPBACK,
    Address,
    status_of,
    with_internal_ports,
)
from smartspec_launch.answers import Answers
from smartspec_launch.ascii_paths import AsciiPaths
from smartspec_launch.files import (
    PACKAGE_FOLDER,
    Installation,
    find_installation,
    lock_run_dir,
    remove_written,
    usable,
    write_backends,
    write_repository,
)
from smartspec_launch.gateway import Gateway, OpenAi, allow_open_files
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.link import LauncherEnd
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import ServerConfig
from smartspec_py.engines.phases import Phase
from smartspec_py.serving.link import LINK_VARIABLE, remove_shared_memory

MAX_POOLED_RESPONSES = 1024
"""Responses that Triton keeps in memory for a slow gRPC client. Triton's default is unbounded."""

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KERNEL_CACHE_SIZE = "256"
"""On a CPU, oneDNN caches one kernel per number of tokens. In bfloat16 its default of 1,024 kernels
takes up to several hundred MiB. With 256, memory use is constant after seconds and speed is the
same."""

NO_GPU = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0")
"""Options without a GPU, for which Triton would look otherwise, and log errors."""

NO_ALARM = "CudaDriverHelper has not been initialized"
"""Triton logs it as an error on every machine without a GPU."""

GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files of NVIDIA's driver, on Linux and in WSL."""

LOG_TAIL_LINES = 15
LOOK_S = 0.1
DRAIN_MARGIN_S = 5.0
"""Time after `limits.drain_s` in which the backend sends its last responses."""

EXIT_TIMEOUT_S = 8.0
"""Time that Triton waits for idle connections after SIGTERM. Triton's default is 30 s."""

EXPIRED = 1
"""Exit code of Triton if it still holds the model after this time. It may then hold it for ever."""

EXIT_S = 10.0
END_SIGNAL = signal.SIGINT
"""Ends Triton. SIGTERM is blocked in it, because a supervisor may send that to all processes at
once, and Triton would cut the requests that are drained."""

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

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that may raise KeyboardInterrupt in the launcher."""


SECOND_SIGNAL = "A second signal ended the server before its requests."


class TritonServerError(LaunchError):
    """The server did not become ready; the message holds the last lines of its log."""


class ModelRefusedError(TritonServerError):
    """The backend refused engine.json or a checkpoint; the message is the backend's own."""


class State(Enum):
    NEW = auto()  # no process was started
    LOADING = auto()  # the processes run; the model was not ready yet
    READY = auto()  # the model was ready
    DRAINING = auto()  # new requests are refused, and open ones are finished
    ANSWERED = auto()  # every request has its last response, or there was none
    STOPPED = auto()  # no process is left


_MOVES = {
    State.NEW: {State.LOADING},
    State.LOADING: {State.READY, State.DRAINING, State.ANSWERED, State.STOPPED},
    State.READY: {State.DRAINING, State.STOPPED},
    State.DRAINING: {State.ANSWERED, State.STOPPED},
    State.ANSWERED: {State.STOPPED},
    State.STOPPED: set[State](),
}


class End(NamedTuple):
    """A process that has ended. code: 128 + s after signal s."""

    name: str
    code: int

    def __str__(self) -> str:
        return f"{self.name} ended with exit code {self.code}."


class TritonServer:
    """Serves one model. `with TritonServer(...) as server:` starts it and stops it.

    run_dir: holds all written files (see smartspec_launch/files.py) and tritonserver.log.
    backend_folder: the backend package; tests of the launcher set another one.
    aliases: additional names of the model, see `smartspec_launch.pbtxt`.
    options: additional options of tritonserver, placed last.
    openai: None serves no OpenAI routes.
    """

    def __init__(
        self,
        config: ServerConfig,
        run_dir: Path,
        address: Address,
        backend_folder: Path = PACKAGE_FOLDER,
        aliases: Sequence[str] = (),
        options: Sequence[str] = (),
        *,
        openai: OpenAi | None = None,
    ) -> None:
        self.address = with_internal_ports(address)
        self.openai = openai
        self.log_path = run_dir / "tritonserver.log"
        self._config = config
        self._run_dir = run_dir
        self._backend_folder = backend_folder
        self._aliases, self._options = tuple(aliases), tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._gateway: Gateway
        self._state = State.NEW
        self._exit_code: int | None = None  # once it is stopped
        self.failure: str | None = None
        """Why a stop did not give each request its last response."""

        self._shm_prefix = f"smartspec_{secrets.token_hex(4)}_"
        self._link: LauncherEnd
        self._lock = -1
        self._ascii_paths = AsciiPaths()

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of tritonserver. It is also the process group id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Write the run directory and start the processes.

        Raises LaunchError.
        """
        assert self._state is State.NEW, "a TritonServer is started once"
        allow_open_files()
        installation = find_installation()
        run_dir = self._run_dir.absolute()
        with usable(run_dir):
            self._lock = lock_run_dir(run_dir)
            run_dir = self._ascii_paths.of(run_dir, "run")
            config = self._ascii_paths.of_config(self._config)
            backends = write_backends(run_dir, installation, self._backend_folder)
            models = write_repository(run_dir, config, self._aliases)
            log = self.log_path.open("wb")
        command = server_command(installation, backends, models, self.address)
        command += [f"--load-model={alias}" for alias in self._aliases]
        command.append(f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}")
        command += self._options
        self._link = LauncherEnd(self._config.limits)
        link = {LINK_VARIABLE: f"{self._link.child_fd},{self._shm_prefix}"}
        with log, _deferred():
            with _blocked(signal.SIGTERM):  # Triton inherits this
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=run_dir,  # Triton's stub imports modules from it
                    env=server_environment(installation) | link,
                    pass_fds=[self._link.child_fd],
                    start_new_session=True,
                )
            self._move_to(State.LOADING)
            names = [name for name in self._config.served_model_name if name not in self._aliases]
            self._gateway = Gateway(self.address, self.openai, names, log)
            self._link.hand_over()

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a server that is ready serves; see `Beat.facts`."""
        return {} if self._link.beat is None else self._link.beat.facts

    @property
    def notices(self) -> Sequence[str]:
        """Warnings of the start, for people."""
        return self._link.notices

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens of one request, of a server that is ready."""
        return int(self.facts.get("context_len", self._config.limits.context_len))

    def ended(self) -> End | None:
        """The process that has ended; None while Triton and the gateway run."""
        assert self._process is not None, "not started"
        for name, process in (("Triton", self._process), (Gateway.name, self._gateway)):
            if (code := process.poll()) is not None:
                return End(name, _shell_code(code))
        return None

    def look(self, timeout_s: float) -> str | None:
        """Wait up to timeout_s. Return one sentence that says why the server cannot serve, or
        None."""
        self._link.look(timeout_s)
        if end := self.ended():
            return str(end)
        if self._link.beat is not None and self._link.beat.failure:
            time.sleep(LAST_WORDS_S)
        return self._link.trouble

    def wait_ready(self, show: Callable[[Phase], None] | None = None) -> None:
        """Wait until the model is ready on all ports. Calls `show` several times a second.

        Raises TritonServerError when a process ends or after limits.start_s, and ModelRefusedError
        if the backend reported the reason.
        """
        self._wait(self.is_model_ready, self._config.limits.start_s, show)
        self._move_to(State.READY)
        self._gateway.open(self.context_len)
        self._wait(self._gateway.is_ready, self._config.limits.start_s, None)

    def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float,
        show: Callable[[Phase], None] | None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            self._link.look(LOOK_S)
            if end := self.ended():
                self._link.look(0.0)
                news = self._link.news
                error = self._ascii_paths.restored(news.error)
                if news.is_refusal:
                    raise ModelRefusedError(error)
                raise TritonServerError(f"{end}\n{self.log_tail()}\n{error}")
            if time.monotonic() > deadline:
                raise TritonServerError(
                    f"Triton was not ready after {timeout_s:g} s, the limit of limits.start_s: "
                    f"raise it if the log shows progress.\n{self.log_tail()}"
                )
            self._gateway.tell_start(self._link.phase)
            if show is not None:
                show(self._link.phase)

    def is_model_ready(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether Triton responds within timeout_s and the model is ready."""
        url = f"{self.address.triton_url}/v2/models/{MODEL_NAME}/ready"
        return status_of(url, timeout_s) == 200

    def answers(self) -> Mapping[str, Answers]:
        """Start to ask Triton and the gateway for answers; by their names. A gateway that refuses
        the request answers."""
        limit_s = self._config.limits.hang_s
        asks = {"Triton": self.is_model_ready, Gateway.name: self._gateway.answers}
        return {name: Answers(ask, limit_s) for name, ask in asks.items()}

    def log_tail(self) -> str:
        """The last lines of Triton's log, without its tables and NO_ALARM."""
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and line[0] not in "+|"]
        lines = [line for line in lines if NO_ALARM not in line]
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def stop(self) -> int | None:
        """Drain, end Triton, then SIGKILL to the remaining processes of the group. Idempotent.

        During the drain the gateway refuses new requests with 503. Requests in flight have
        `limits.drain_s` to finish; the backend then ends each with a last response. There is no
        wait for a backend that has died, hangs or has failed, or whose model is not loaded yet.
        Returns the exit code, or None if the server never started. The code is 0 if Triton had to
        be killed after all requests were answered; if not, `failure` says why.
        """
        process = self._process
        if process is None:
            return None
        if process.poll() is None and self._state in (State.LOADING, State.READY):
            try:
                self._link.look(0.0)
                if self._state is State.LOADING and self._link.beat is None:
                    self._move_to(State.ANSWERED)  # it took no request
                else:
                    self._end_in_order(process)
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:  # a second Ctrl-C ends the wait at once
                self.failure = SECOND_SIGNAL
        self.kill()
        return self._exit_code

    def _end_in_order(self, process: subprocess.Popen[bytes]) -> None:
        self._move_to(State.DRAINING)
        self.failure = self._drain()
        code = self._gateway.stop()  # it passes on the last responses
        if self.failure is None and code:
            self.failure = str(End(Gateway.name, _shell_code(code)))
        if self.failure is None:
            self._move_to(State.ANSWERED)
        if self._link.trouble is None:
            process.send_signal(END_SIGNAL)
            # Triton itself would take seconds more: it looks once a second whether the model is
            # unloaded. It holds nothing that a kill would lose.
            deadline = time.monotonic() + EXIT_S + EXIT_TIMEOUT_S
            while process.poll() is None and not self._link.is_stopped:
                self._link.look(LOOK_S)
                if time.monotonic() > deadline:
                    return

    def _drain(self) -> str | None:
        """Wait until each request has its last response; else return why some have none."""
        self._gateway.drain()
        self._link.ask_to_drain()
        wait_s = self._config.limits.drain_s + DRAIN_MARGIN_S
        deadline = time.monotonic() + wait_s
        while not self._link.is_drained:
            if reason := self.look(LOOK_S):
                return reason
            if time.monotonic() > deadline:
                return f"Requests had no last response {wait_s:g} s after the stop began."
        return None

    def kill(self) -> None:
        """Kill the remaining processes of the group at once, and clean up. Idempotent. Signals do
        not interrupt it: each stop would otherwise leave what comes after.

        If the server crashed or was killed, its stub and their shared memory still exist.
        """
        if self._process is None or self._state is State.STOPPED:
            return
        with _uninterrupted():
            was_running = self._process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_S)
            self._gateway.stop(GONE_S / 2)  # it reports broken streams to its clients
            self._link.wait_gone(GONE_S)
            self._link.close()
            remove_shared_memory(self._shm_prefix)
            self._ascii_paths.close()
            remove_written(self._run_dir)
            os.close(self._lock)
            code = self._process.poll()
            is_clean = self._state is State.ANSWERED and (was_running or code in (0, EXPIRED))
            self._exit_code = 0 if is_clean else _shell_code(code or 1)
            self._move_to(State.STOPPED)

    def _move_to(self, state: State) -> None:
        """Raises RuntimeError and changes nothing if the transition is not allowed."""
        if state not in _MOVES[self._state]:
            raise RuntimeError(f"the server: {self._state.name} -> {state.name}")
        self._state = state


@contextlib.contextmanager
def _deferred() -> Iterator[None]:
    """In the `with` block, INTERRUPTS that have a handler wait for its end. Children must not
    inherit that a signal is ignored or blocked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {one: found for one in INTERRUPTS if callable(found := signal.getsignal(one))}
    for number in before:
        signal.signal(number, lambda one, _: came.append(one))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _shell_code(code: int) -> int:
    """A process ended by signal s has the code -s in Python, and 128 + s in a shell."""
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """In the `with` block, the signal is blocked in this thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """In the `with` block, INTERRUPTS are ignored. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS]
    try:
        yield
    finally:
        for number, handler in zip(INTERRUPTS, before, strict=True):
            signal.signal(number, handler)


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
        f"--http-address={LOOPBACK}",
        f"--http-port={address.triton_http_port}",
        f"--grpc-address={LOOPBACK}",
        f"--grpc-port={address.triton_grpc_port}",
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={address.triton_metrics_port}",
        f"--http-restricted-api={guard}",
        f"--grpc-restricted-protocol={guard}",
    ]
    if not any(path.exists() for path in GPU_DEVICES):
        command += NO_GPU
    if installation.is_fit_for_network:  # the wheel's version has no such option
        command.append(f"--grpc-max-response-pool-size={MAX_POOLED_RESPONSES}")
    return command
