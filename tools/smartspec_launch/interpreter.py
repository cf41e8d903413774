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

VERSION = sys.version_info[:2]
OLDEST = (3, 11)
NEWEST = (3, 12)
"""The wheel's stub crashes on text with NumPy 2, and NumPy 1.26 has no build for Python 3.13."""


class LaunchError(RuntimeError):
    """The server cannot be started, or has ended. The message says why, and what to do."""


def check_interpreter(needs_venv: bool = False) -> Path:
    """Return the directory of the shared libpython. Raises LaunchError."""
    version = "{}.{}".format(*VERSION)
    if not OLDEST <= VERSION <= NEWEST:
        raise LaunchError(f"Python {version} cannot run Triton's stub; {_command('3.11')}")
    libpython = find_libpython(version)
    has_venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    missing = ["the venv module"] if needs_venv and not has_venv else []
    if libpython is None:
        missing.append("its shared library libpython")
    if libpython is not None and not missing:
        return libpython.parent
    remedy = _command(version)
    if f"{os.sep}.pyenv{os.sep}" in sys.base_prefix:
        release = Path(sys.base_prefix).name
        remedy = f"run: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {release}"
    raise LaunchError(f"Python {version} lacks {' and '.join(missing)}; {remedy}")


def find_libpython(version: str) -> Path | None:
    """The shared library that Triton's stub links to; None if it is missing."""
    libdir = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    # Linux distributions keep it in a subfolder named after the architecture.
    for folder in (Path(libdir), Path(libdir, sysconfig.get_config_var("MULTIARCH") or "")):
        library = folder / f"libpython{version}.so.1.0"
        if library.exists():
            return library
    return None


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
    except LaunchError as error:
        sys.exit(str(error))
