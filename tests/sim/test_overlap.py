"""The model of two-batch overlap: its estimates, and periods that can be worked out by hand."""

import pytest

from studies.overlap import (
    CASES,
    Case,
    Half,
    Phase,
    all_rates,
    phases,
    rate_of_none,
    step_s,
)


def test_the_estimates_are_reproduced() -> None:
    """32 requests and 4 drafts: Python 1.5 ms, draft 11, verification 15; no drafts 9 ms. With one
    request 4 drafts reach 1.3 times the speed of none."""
    seconds = [phase.total_s for phase in phases(32, 4, Case())]
    assert seconds == pytest.approx([1.5e-3, 11e-3, 15e-3], rel=0.01)
    assert 32 / rate_of_none(32, Case()) == pytest.approx(9e-3)
    with_four = Case().expected(4) / sum(phase.total_s for phase in phases(1, 4, Case()))
    assert with_four / rate_of_none(1, Case()) == pytest.approx(1.3, abs=0.01)


@pytest.mark.parametrize(
    ("host_s", "draft_s", "target_s", "expected_s"),
    [
        # The target is always busy: 4 s for each half.
        (1.0, 2.0, 4.0, 4.0),
        # The draft engine is.
        (1.0, 5.0, 2.0, 5.0),
        # No engine is; each half does one step in 9 s.
        (3.0, 3.0, 3.0, 4.5),
    ],
)
def test_a_gpu_for_each_engine(
    host_s: float, draft_s: float, target_s: float, expected_s: float
) -> None:
    every = (Phase(0.0, host_s), Phase(draft_s, 0.0), Phase(target_s, 0.0))
    halves = [Half(every), Half(every)]
    assert step_s(halves, 0.0, shares_gpu=False) == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize(
    ("idle", "expected_s"),
    [
        # All 7 s of a half's engines need the whole GPU; the host works meanwhile.
        (0.0, 7.0),
        # 3.5 s of them need the GPU; a step of a half takes 8 s.
        (1.0, 4.0),
    ],
)
def test_engines_that_share_a_gpu(idle: float, expected_s: float) -> None:
    every = (Phase(0.0, 1.0), Phase(1.5, 1.5), Phase(2.0, 2.0))
    halves = [Half(every), Half(every)]
    assert step_s(halves, idle, shares_gpu=True) == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_what_the_page_says(case: Case) -> None:
    """No gain on a GPU that is idle in half of the overhead; replicas are never worse."""
    for one in all_rates(case):
        assert one.two_busy <= one.two_half <= one.two_idle
        assert one.two_half < 1.005 * one.best
        assert one.own_gpu < 1.005 * one.replicas
