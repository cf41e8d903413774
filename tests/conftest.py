"""Settings of the whole suite."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: more threads than free cores make small passes many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests of the hub have a stand-in
if not Path("/dev/nvidiactl").exists():
    # Before Triton's language is imported: its kernels run on a CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # collections would take a third of the time of all imports


def pytest_collection_finish() -> None:
    """What is imported lives to the end, so no collection looks at it again."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m NAME`, or `-m "NAME and ..."`, imports only the files that use this marker: imports take
    many seconds, and the Python of a GPU image often lacks packages that other tests import."""
    name, *more = config.option.markexpr.split() or ["not"]
    if name == "not" or "or" in more:
        return None
    is_folder = collection_path.is_dir()
    files = collection_path.rglob("test_*.py") if is_folder else [collection_path]
    mark = f"pytest.mark.{name}"
    return not any(mark in file.read_text(encoding="utf-8") for file in files) or None


@atexit.register
def keep_the_summary_last() -> None:
    """Triton's bindings may report leaks after Python has ended."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph of OpenVINO, which takes half a second to compile one of the tests' models."""
    if runner := sys.modules.get("smartspec_py.engines.runtimes.openvino.runner"):
        monkeypatch.setattr(runner, "MOST_COPIES", 1)


@pytest.fixture(scope="session", autouse=True)
def servers_have_ended() -> Iterator[None]:
    """Those whose stop went on beside other tests, if there were any."""
    yield
    if "servers" in sys.modules:
        sys.modules["servers"].wait_for_stops()
