"""The files that Triton is started on: its own are found, the rest is written.

Everything that is written lies under one run directory, which one server uses at a time:
    lock                     held by the launcher
    backends/python/         Triton's Python backend, with the stub of the running Python
    backends/smartspec_py    a link to this package, which Triton sees as a backend
    models/smartspec/        config.pbtxt and 1/engine.json
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import smartspec_py
from smartspec_launch.aliases import write_aliases
from smartspec_launch.interpreter import check_interpreter
from smartspec_launch.pbtxt import config_pbtxt
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.serving.config import CONFIG_NAME, ServerConfig

BACKEND_NAME = "smartspec_py"
CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")
STUB_NAME = "triton_python_backend_stub"
CONTAINER_VERSION = Path("/opt/tritonserver/TRITON_VERSION")
WHEEL_VERSION = (2, 51)
"""Of nvidia-pytriton 0.7.0; there is no newer one."""

FIXED_VERSION = (2, 69)
"""Of release 26.05."""

WHEEL_MAX_BODY_BYTES = 2 << 20
MAX_BODY_BYTES = 64 << 20
"""Triton's own limit."""

PACKAGE_FOLDER = Path(smartspec_py.__file__).resolve().parent


class InstallationError(RuntimeError):
    """There is no usable Triton here; the message says what to install."""


class RunDirError(InstallationError):
    """The run directory cannot be used; the message names it and what to do."""


@dataclass(frozen=True)
class Installation:
    """A Triton server on this machine.

    binary: tritonserver. python_backend: the folder of Triton's Python backend.
    stub: the stub of the running Python; None where the folder's own is right (NVIDIA's container).
    library_dirs: for LD_LIBRARY_PATH, the first wins. version: of the server; empty: unknown.
    """

    binary: Path
    python_backend: Path
    stub: Path | None = None
    library_dirs: tuple[Path, ...] = ()
    version: tuple[int, ...] = WHEEL_VERSION

    @property
    def is_fit_for_network(self) -> bool:
        """Whether its known remote vulnerabilities are fixed (docs/operate/security.md,
        Security)."""
        return self.version >= FIXED_VERSION

    @property
    def max_body_bytes(self) -> int:
        """The largest request body that it takes without harm."""
        return MAX_BODY_BYTES if self.is_fit_for_network else WHEEL_MAX_BODY_BYTES


def find_installation() -> Installation:
    """The wheel of this environment, else NVIDIA's container.

    Raises InstallationError, or InterpreterError where the wheel cannot run this Python.
    """
    wheel = importlib.util.find_spec("pytriton")
    if wheel is not None and wheel.submodule_search_locations:
        return _wheel_installation(Path(wheel.submodule_search_locations[0]))
    binary = shutil.which("tritonserver")
    if binary is not None and (CONTAINER_BACKENDS / "python").is_dir():
        return Installation(
            Path(binary), CONTAINER_BACKENDS / "python", version=_container_version()
        )
    raise InstallationError(
        "no tritonserver found: run `pip install 'smartspec-py[triton]'`, "
        "or work in NVIDIA's Triton container"
    )


def exposure(host: str, version: tuple[int, ...]) -> str:
    """Why a server of this version must not listen there."""
    number = ".".join(map(str, version)) or "unknown"
    return (
        f"Triton {number} listening on {host}: its known remote vulnerabilities (CVE-2025-23310, "
        "-23311, -23319, -23320, -23334, CVE-2026-24207 and others) are fixed in "
        f"{'.'.join(map(str, FIXED_VERSION))} (release 26.05); its gRPC and metrics "
        "ports would be open to them"
    )


def _container_version(path: Path = CONTAINER_VERSION) -> tuple[int, ...]:
    """As NVIDIA's image has it in a file; empty where that is missing or not a version."""
    try:
        return tuple(int(part) for part in path.read_text().strip().split(".")[:3])
    except (OSError, ValueError):
        return ()


def _wheel_installation(package: Path) -> Installation:
    for folder in (Path(sys.prefix), PACKAGE_FOLDER):
        if not str(folder).isascii():
            raise InstallationError(
                f"{folder} is not ASCII, and the Python in Triton's stub cannot import from such a "
                "folder: move the checkout and its environment to an ASCII path"
            )
    libpython_dir = check_interpreter()
    server = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / STUB_NAME
    binary = server / "bin" / "tritonserver"
    for needed in (binary, stub):
        if not needed.is_file():
            raise InstallationError(
                f"nvidia-pytriton is incomplete, {needed} is missing: "
                "run `pip install --force-reinstall nvidia-pytriton==0.7.0`"
            )
    # libpython's folder comes first: the stub must not pick up another build of the same version,
    # whose extension modules (ssl) would not fit.
    library_dirs = (libpython_dir, package.parent / "nvidia_pytriton.libs")
    return Installation(binary, server / "backends" / "python", stub, library_dirs)


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """Within, what goes wrong with files of the run directory raises RunDirError."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"the run directory {run_dir} cannot be used: {error.strerror} "
            f"({error.filename or run_dir}); name one that can be written and has 10 MiB free"
        ) from error


def lock_run_dir(run_dir: Path) -> int:
    """Make the directory, and keep other servers out of it until the descriptor is closed.

    No child inherits the descriptor, so that the kernel gives the lock back when this process ends,
    however it does. Raises RunDirError where another server has it, OSError for the rest.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RunDirError(
            f"another server uses the run directory {run_dir}: stop it, or name another directory"
        ) from None
    return fd


def write_backends(
    run_dir: Path, installation: Installation, backend_folder: Path = PACKAGE_FOLDER
) -> Path:
    """Make the directory for --backend-directory; what stood there is replaced."""
    backends = run_dir / "backends"
    shutil.rmtree(backends, ignore_errors=True)
    python = backends / "python"
    python.mkdir(parents=True)
    # Copies: Triton refuses a library that a link leads out of the backend directory.
    for source in installation.python_backend.iterdir():
        if source.is_file():
            shutil.copy2(source, python / source.name)
    if installation.stub is not None:
        shutil.copyfile(installation.stub, python / STUB_NAME)
        (python / STUB_NAME).chmod(0o755)
    (backends / BACKEND_NAME).symlink_to(backend_folder, target_is_directory=True)
    return backends


def write_repository(run_dir: Path, config: ServerConfig, aliases: Sequence[str] = ()) -> Path:
    """Make the model repository with this config as engine.json; what stood there is replaced."""
    models = run_dir / "models"
    shutil.rmtree(models, ignore_errors=True)
    version = models / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config_pbtxt(), encoding="utf-8")
    text = config.model_dump_json(indent=2, exclude_none=True)
    (version / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
    write_aliases(models, aliases)
    return models
