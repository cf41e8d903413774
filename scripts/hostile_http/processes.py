"""Reads the resources of the server's processes from /proc and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Held:
    """The resources of a process and all its descendants.

    rss_mib: resident memory. shm_files, shm_mib: shared memory of the whole machine.
    """

    num_processes: int
    rss_mib: float
    num_files: int
    shm_files: int
    shm_mib: float


def held(pid: int) -> Held:
    """The resources held by this process and its descendants. Raises OSError if it has ended."""
    pids = [pid, *_below(pid)]
    regions = [path for path in SHM.iterdir() if path.is_file()]
    return Held(
        len(pids),
        sum(_rss_bytes(each) for each in pids) / 2**20,
        sum(len(os.listdir(f"/proc/{each}/fd")) for each in pids),
        len(regions),
        sum(path.stat().st_size for path in regions) / 2**20,
    )


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _below(child)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
