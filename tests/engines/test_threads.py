"""How many threads compute on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from smartspec_py.engines.torch.threads import set_fastest, thread_counts


@pytest.mark.parametrize(
    ("cores", "configured", "counts"),
    [
        (1, 0, (1,)),
        (2, 0, (1, 2)),
        (4, 0, (3, 4)),
        (5, 0, (4,)),
        (2, 1, (1,)),
        (2, 7, (7,)),
        (None, 0, (1,)),
    ],
)
def test_which_numbers_are_tried(
    cores: int | None, configured: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert thread_counts(configured) == counts


@pytest.fixture
def kept_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((1.4, 0.9), 2), ((1.0, 0.95), 1), ((1.0, 1.2), 1), ((1.0, 0.84), 2)]
)
def test_all_cores_are_used_if_they_are_clearly_faster(
    kept_threads: None, seconds: tuple[float, float], chosen: int
) -> None:
    """The first pass behind a change is slow and not counted. The machine becomes 2 % slower with
    each pass."""
    counts = [0]

    def pass_s() -> float:
        count = torch.get_num_threads()
        is_first, _ = count != counts[-1], counts.append(count)
        return 100.0 if is_first else seconds[count - 1] * 1.02 ** len(counts)

    set_fastest((1, 2), pass_s)
    assert torch.get_num_threads() == chosen


def test_one_number_is_not_timed(kept_threads: None) -> None:
    set_fastest((2,), lambda: pytest.fail("no pass is needed"))
    assert torch.get_num_threads() == 2
