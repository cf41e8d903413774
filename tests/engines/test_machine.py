"""How many threads compute on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartspec_py.engines.runtimes import machine
from smartspec_py.engines.runtimes.machine import thread_count, usable_cores


@pytest.mark.parametrize(
    ("cores", "configured", "count"),
    [(1, 0, 1), (2, 0, 2), (4, 0, 4), (5, 0, 4), (2, 1, 1), (2, 7, 7)],
)
def test_one_core_is_left_to_others_if_there_are_many(
    cores: int, configured: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    assert thread_count(configured) == count


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_quota_of_the_container_counts(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores
