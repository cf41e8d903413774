"""The files that a Triton start needs. Finds the installation and writes the run directory.

All written files are in one run directory, which one server uses at a time:
    lock                     held by the launcher
    backends/python/         Triton's Python backend, with the stub for the running Python
    backends/smartspec_py    a link to this package, which Triton sees as a backend
    models/smartspec/        config.pbtxt and 1/engine.json
Both folders are removed when the server ends.
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
from smartspec_launch.address import Address
from smartspec_launch.interpreter import LaunchError, check_interpreter
from smartspec_launch.pbtxt import alias_pbtxt, config_pbtxt
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import CONFIG_NAME, ServerConfig

BACKENDS, MODELS = "backends", "models"
BACKEND_NAME = "smartspec_py"
CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")
STUB_NAME = "triton_python_backend_stub"
CONTAINER_VERSION = Path("/opt/tritonserver/TRITON_VERSION")
WHEEL_VERSION = (2, 51)
"""The version in nvidia-pytriton 0.7.0, which is the newest release of that wheel."""

FIXED_VERSION = (2, 69)
"""The version in release 26.05."""

PACKAGE_FOLDER = Path(smartspec_py.__file__).resolve().parent


@dataclass(frozen=True)
class Installation:
    """A Triton server on this machine.

    binary: path of tritonserver. python_backend: the folder of Triton's Python backend.
    stub: the stub for the running Python; None if the folder already has the right one (NVIDIA's
    container). library_dirs: for LD_LIBRARY_PATH, in search order.
    version: the server's version; empty if unknown.
    """

    binary: Path
    python_backend: Path
    stub: Path | None = None
    library_dirs: tuple[Path, ...] = ()
    version: tuple[int, ...] = WHEEL_VERSION

    @property
    def is_fit_for_network(self) -> bool:
        """Whether this version fixes the known remote vulnerabilities
        (docs/operate/security.md)."""
        return self.version >= FIXED_VERSION


def find_installation() -> Installation:
    """Find the wheel in this environment, else Triton in NVIDIA's container.

    Raises LaunchError, also if the wheel's stub cannot run this Python.
    """
    wheel = importlib.util.find_spec("pytriton")
    if wheel is not None and wheel.submodule_search_locations:
        return _wheel_installation(Path(wheel.submodule_search_locations[0]))
    binary = shutil.which("tritonserver")
    if binary is not None and (CONTAINER_BACKENDS / "python").is_dir():
        return Installation(
            Path(binary), CONTAINER_BACKENDS / "python", version=_container_version()
        )
    raise LaunchError(
        "no tritonserver found: run `pip install 'smartspec-py[triton]'`, "
        "or use NVIDIA's Triton container"
    )


def exposure(address: Address, installation: Installation | None = None) -> str:
    """The reason why this Triton must not listen on this address; empty if it may.

    installation: default: that of this machine, with the errors of `find_installation`.
    """
    if address.is_loopback:
        return ""
    found = installation or find_installation()
    if found.is_fit_for_network:
        return ""
    number = ".".join(map(str, found.version)) or "unknown"
    return (
        f"Triton {number} listening on {address.host}: its known remote vulnerabilities "
        "(CVE-2025-23310, -23311, -23319, -23320, -23334, CVE-2026-24207 and others) are fixed in "
        f"{'.'.join(map(str, FIXED_VERSION))} (release 26.05); the gateway may not "
        "hold off every attack"
    )


def _container_version(path: Path = CONTAINER_VERSION) -> tuple[int, ...]:
    """Read the version file of NVIDIA's image. Empty if it is missing or not a version."""
    try:
        return tuple(int(part) for part in path.read_text().strip().split(".")[:3])
    except (OSError, ValueError):
        return ()


def _wheel_installation(package: Path) -> Installation:
    check_ascii(Path(sys.prefix), PACKAGE_FOLDER)
    libpython_dir = check_interpreter()
    server = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / STUB_NAME
    binary = server / "bin" / "tritonserver"
    for needed in (binary, stub):
        if not needed.is_file():
            raise LaunchError(
                f"nvidia-pytriton is incomplete: {needed} is missing; "
                "run `pip install --force-reinstall nvidia-pytriton==0.7.0`"
            )
    # libpython's folder comes first. Otherwise the stub may load another build of the same version,
    # and the extension modules (ssl) do not match that build.
    library_dirs = (libpython_dir, package.parent / "nvidia_pytriton.libs")
    return Installation(binary, server / "backends" / "python", stub, library_dirs)


def check_ascii(*paths: Path) -> None:
    """Raises LaunchError for a folder that the wheel's stub cannot import from.

    The stub starts Python with an isolated configuration, which ignores LC_ALL and PYTHONUTF8.
    """
    for path in paths:
        if not str(path).isascii():
            raise LaunchError(
                f"{path} is not ASCII, and the Python in Triton's stub cannot import from such a "
                "folder: move it to a path with ASCII letters only"
            )


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """Convert each OSError in the `with` block to a LaunchError."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the run directory {run_dir} cannot be used: {error.strerror} "
            f"({error.filename or run_dir}); name a writable directory with 10 MiB free"
        ) from error


def lock_run_dir(run_dir: Path) -> int:
    """Create the directory and lock it. Closing the returned descriptor releases the lock.

    No child process inherits the descriptor, so the kernel releases the lock when this process
    ends, even after a crash. Raises LaunchError if another server holds the lock, or if folders
    that a start replaces are not of a server; else OSError.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = run_dir / "lock"
    for name in (BACKENDS, MODELS):
        if (run_dir / name).exists() and not lock.exists():
            raise LaunchError(
                f"the run directory {run_dir} has a folder {name} that no server has "
                "written, and that a start would replace: name an empty directory"
            )
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LaunchError(
            f"another server uses the run directory {run_dir}: stop it, or name another directory"
        ) from None
    return fd


def remove_written(run_dir: Path) -> None:
    """Remove what a start writes again. The log stays, for whoever looks for a reason."""
    for name in (BACKENDS, MODELS):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def write_backends(
    run_dir: Path, installation: Installation, backend_folder: Path = PACKAGE_FOLDER
) -> Path:
    """Create the directory for --backend-directory. An existing one is replaced."""
    backends = run_dir / BACKENDS
    shutil.rmtree(backends, ignore_errors=True)
    python = backends / "python"
    python.mkdir(parents=True)
    # Copied, not linked: Triton refuses a library that links to a file outside this directory.
    for source in installation.python_backend.iterdir():
        if source.is_file():
            shutil.copy2(source, python / source.name)
    if installation.stub is not None:
        shutil.copyfile(installation.stub, python / STUB_NAME)
        (python / STUB_NAME).chmod(0o755)
    (backends / BACKEND_NAME).symlink_to(backend_folder, target_is_directory=True)
    return backends


def write_repository(run_dir: Path, config: ServerConfig, aliases: Sequence[str] = ()) -> Path:
    """Create the model repository with this config as engine.json. An existing one is replaced."""
    models = run_dir / MODELS
    shutil.rmtree(models, ignore_errors=True)
    version = models / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config_pbtxt(), encoding="utf-8")
    text = config.model_dump_json(indent=2, exclude_none=True)
    (version / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
    for alias in aliases:  # Triton requires a version directory; here it is empty
        (models / alias / "1").mkdir(parents=True)
        (models / alias / "config.pbtxt").write_text(alias_pbtxt(alias), encoding="utf-8")
    return models
