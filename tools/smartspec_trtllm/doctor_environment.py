"""The environment of `smartspec doctor`: TensorRT-LLM, TensorRT, the GPU and its driver."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_trtllm.contract_data import read_signatures

BACKEND_DIR = Path("/opt/tritonserver/backends/tensorrtllm")
"""The folder of the C++ backend in Triton's containers."""

_QUERY = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")


@dataclass(frozen=True)
class Missing:
    """what: the missing thing and the error. remedy: how to get it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Environment:
    """gpus: name, driver, memory and compute capability, one line per GPU. backend_files: of the
    C++ backend. Versions are None if unknown."""

    python: str
    tensorrt_llm: str | None
    binding_type: str | None
    tensorrt: str | None
    gpus: tuple[str, ...]
    backend_files: tuple[str, ...]
    missing: tuple[Missing, ...]


def find_environment() -> tuple[Environment, Any]:
    """The environment, and the module of the executor's bindings; None if it is missing."""
    missing: list[Missing] = []
    package = _imported("tensorrt_llm", missing)
    bindings = _imported("tensorrt_llm.bindings", missing) if package else None
    executor = getattr(bindings, "executor", None)
    if bindings is not None and executor is None:
        missing.append(Missing("tensorrt_llm.bindings has no executor", _TOO_NEW))
    tensorrt = _imported("tensorrt", [])
    gpus = query_gpus()
    if not gpus:
        missing.append(Missing("nvidia-smi lists no GPU", _NO_GPU))
    environment = Environment(
        python=platform.python_version(),
        tensorrt_llm=_version(package),
        binding_type=getattr(bindings, "binding_type", None),
        tensorrt=_version(tensorrt),
        gpus=gpus,
        backend_files=tuple(sorted(path.name for path in BACKEND_DIR.glob("*.so"))),
        missing=tuple(missing),
    )
    return environment, executor


def query_gpus() -> tuple[str, ...]:
    """The GPUs that nvidia-smi lists; empty if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False)
    return tuple(answer.stdout.splitlines()) if answer.returncode == 0 else ()


def _imported(name: str, missing: list[Missing]) -> Any:
    """Import a package. If it fails, also because of driver libraries, record it as missing."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        missing.append(Missing(f"{name} cannot be imported: {error}", _remedy()))
        return None


def _version(package: Any) -> str | None:
    version = getattr(package, "__version__", None)
    return None if version is None else str(version)


def _remedy() -> str:
    pin = read_signatures()["pin"]
    return (
        f"run inside a Triton container with TensorRT-LLM {pin['trtllm']}, such as "
        f"{pin['containers'][0]}, started with --gpus all"
    )


_TOO_NEW = "use TensorRT-LLM 1.2.1: its bindings were removed after 1.3.0rc20"
_NO_GPU = "start the container with --gpus all on a machine with an installed NVIDIA driver"
