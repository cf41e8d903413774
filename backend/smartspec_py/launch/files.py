"""The files that Triton is started on: its own are found, the rest is written.

Everything that is written lies under one run directory:
    backends/python/         Triton's Python backend, with the stub of the running Python
    backends/smartspec_py    a link to this package, which Triton sees as a backend
    models/smartspec/        config.pbtxt and 1/engine.json
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smartspec_py.launch.interpreter import check_interpreter
from smartspec_py.serving.aliases import write_aliases
from smartspec_py.serving.config import CONFIG_NAME, ServerConfig
from smartspec_py.serving.contract import MODEL_NAME, config_pbtxt

BACKEND_NAME = "smartspec_py"
CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")
STUB_NAME = "triton_python_backend_stub"
PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


class InstallationError(RuntimeError):
    """There is no usable Triton here; the message says what to install."""


@dataclass(frozen=True)
class Installation:
    """A Triton server on this machine.

    binary: tritonserver. python_backend: the folder of Triton's Python backend.
    stub: the stub of the running Python; None where the folder's own is right (NVIDIA's container).
    library_dirs: for LD_LIBRARY_PATH, the first wins.
    """

    binary: Path
    python_backend: Path
    stub: Path | None = None
    library_dirs: tuple[Path, ...] = ()


def find_installation() -> Installation:
    """The wheel of this environment, else NVIDIA's container.

    Raises InstallationError, or InterpreterError where the wheel cannot run this Python.
    """
    wheel = importlib.util.find_spec("pytriton")
    if wheel is not None and wheel.submodule_search_locations:
        return _wheel_installation(Path(wheel.submodule_search_locations[0]))
    binary = shutil.which("tritonserver")
    if binary is not None and (CONTAINER_BACKENDS / "python").is_dir():
        return Installation(Path(binary), CONTAINER_BACKENDS / "python")
    raise InstallationError(
        "no tritonserver found: run `pip install 'smartspec-py[triton]'`, "
        "or work in NVIDIA's Triton container"
    )


def _wheel_installation(package: Path) -> Installation:
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
