"""Checks whether a Python interpreter can run Triton's Python backend.

If not, the message has the one command that fixes it. This file uses only the standard library,
because `scripts/setup.sh` runs it with each Python before anything is installed. Exit status 0:
usable. 1: not usable, and the reason is printed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

OLDEST = (3, 11)
NEWEST = (3, 12)
"""The wheel's stub crashes on text with NumPy 2, and NumPy 1.26 has no build for Python 3.13."""


class InterpreterError(RuntimeError):
    """This Python cannot run the backend; the message ends with the command that fixes it."""


class Interpreter(NamedTuple):
    """Facts about a Python interpreter.

    libpython: the shared library that Triton's stub links to; None if missing.
    """

    version: tuple[int, int]
    base_prefix: str
    libpython: Path | None
    has_venv: bool


def this_interpreter() -> Interpreter:
    """Inspect the Python that runs this code."""
    return Interpreter(
        version=(sys.version_info.major, sys.version_info.minor),
        base_prefix=sys.base_prefix,
        libpython=_find_libpython(),
        has_venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    )


def check_interpreter(found: Interpreter | None = None, needs_venv: bool = False) -> Path:
    """Return the directory of the shared libpython. Raises InterpreterError."""
    found = found or this_interpreter()
    name = "Python {}.{}".format(*found.version)
    if not OLDEST <= found.version <= NEWEST:
        raise InterpreterError(f"{name} cannot run Triton's stub; {_command('3.11')}")
    missing = []
    if needs_venv and not found.has_venv:
        missing.append("the venv module")
    if found.libpython is None:
        missing.append("its shared library libpython")
    if missing:
        raise InterpreterError(f"{name} lacks {' and '.join(missing)}; {_remedy(found)}")
    assert found.libpython is not None
    return found.libpython.parent


def _find_libpython() -> Path | None:
    version = "{}.{}".format(*sys.version_info)
    libdir = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    # Linux distributions keep it in a subfolder named after the architecture.
    for folder in (Path(libdir), Path(libdir, sysconfig.get_config_var("MULTIARCH") or "")):
        library = folder / f"libpython{version}.so.1.0"
        if library.exists():
            return library
    return None


def _remedy(found: Interpreter) -> str:
    version = "{}.{}".format(*found.version)
    if found.base_prefix == "/usr":
        return _command(version)
    if f"{os.sep}.pyenv{os.sep}" in found.base_prefix:
        release = Path(found.base_prefix).name
        return f"run: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {release}"
    return _command(version)


def _command(version: str) -> str:
    """How to install this Python version from the distribution's packages."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    packages = f"python{version} python{version}-venv libpython{version}"
    if shutil.which("apt-get"):
        return f"run: {sudo}apt-get install -y {packages}"
    return f"install {packages.replace(' ', ', ')} with your distribution's package manager"


if __name__ == "__main__":
    try:
        check_interpreter(needs_venv=True)
    except InterpreterError as error:
        sys.exit(str(error))
