"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported: more threads than free cores make small passes many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def servers_have_ended() -> Iterator[None]:
    """Those whose stop went on beside other tests, if there were any."""
    yield
    if "servers" in sys.modules:
        sys.modules["servers"].wait_for_stops()
