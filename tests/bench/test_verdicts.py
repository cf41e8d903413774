"""Verdicts over phases made by hand: losers and ties that were planted must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import phase, phases

from smartspec_bench.document import Comparison, Phase
from smartspec_bench.verdicts import comparisons, faster, summary

NOISE = (1.0, 1.01, 0.99, 1.005)


def around(mean_ms: float) -> list[float]:
    return [mean_ms * noise for noise in NOISE]


def one(found: list[Comparison], role: str, metric: str = "e2e_ms.mean") -> Comparison:
    (match,) = [c for c in found if (c.role, c.metric) == (role, metric)]
    return match


def steady(goodput_ms: float) -> list[Phase]:
    """none 200 ms, fixed:1 150 ms, fixed:3 100 ms; noise is the machine's, common to a repeat."""
    means = {"none": 200.0, "fixed:1": 150.0, "fixed:3": 100.0, "goodput": goodput_ms}
    return phases({policy: around(mean) for policy, mean in means.items()})


@pytest.mark.parametrize(
    ("goodput_ms", "best", "speed_up", "none"),
    [
        (90.0, "met", "met", "met"),
        (102.0, "met", "met", "met"),
        (104.0, "missed", "missed", "met"),
        (203.0, "missed", "missed", "missed"),
    ],
)
def test_steady(goodput_ms: float, best: str, speed_up: str, none: str) -> None:
    found = comparisons(steady(goodput_ms))
    assert one(found, "best fixed").verdict == best
    assert one(found, "best fixed").against == "fixed:3"
    assert one(found, "best fixed").ratio == pytest.approx(goodput_ms / 100)
    assert one(found, "best fixed", "speed_up").verdict == speed_up
    assert one(found, "best fixed", "speed_up").ratio == pytest.approx(100 / goodput_ms)
    assert one(found, "none").verdict == none
    assert one(found, "none").ratio == pytest.approx(goodput_ms / 200)


def test_noise_leaves_it_open() -> None:
    """Faster and slower than the best in turn, by 20 %: neither met nor missed."""
    means = {"none": [100.0] * 4, "fixed:1": [100.0] * 4, "goodput": [80.0, 120.0, 80.0, 120.0]}
    found = comparisons(phases(means))
    assert {c.verdict for c in found} == {"open"}


def test_speed_up_is_asked_at_the_lowest_load_alone() -> None:
    means = {"none": around(200), "fixed:1": around(100), "goodput": around(100)}
    found = comparisons([*phases(means, load=0.05), *phases(means, load=0.9)])
    assert [c.load for c in found if c.metric == "speed_up"] == [0.05]


@pytest.mark.parametrize("shape", ["step", "shift", "mix"])
@pytest.mark.parametrize(
    ("goodput_ms", "verdict"), [(95.0, "met"), (100.0, "open"), (101.0, "missed")]
)
def test_changing_loads_ask_for_less_than_every_fixed(
    shape: str, goodput_ms: float, verdict: str
) -> None:
    """100 ms is a tie with fixed:3: a hair of noise of its own makes its interval hold 1."""
    wobble = [1.0001, 0.9999, 1.0001, 0.9999]
    goodput = [a * b for a, b in zip(around(goodput_ms), wobble, strict=True)]
    means = {"fixed:1": around(150), "fixed:3": around(100), "goodput": goodput}
    found = comparisons(phases(means, shape))
    verdicts = {c.against: c.verdict for c in found if c.role == "fixed"}
    assert verdicts == {"fixed:1": "met", "fixed:3": verdict}
    assert one(found, "best fixed").verdict == verdict
    assert one(found, "best fixed").bound == 1.0


def test_mix_is_compared_with_one_length_for_all() -> None:
    means = {"fixed:1": around(150), "goodput_global": around(99), "goodput": around(100)}
    assert one(comparisons(phases(means, "mix")), "goodput_global").verdict == "missed"


def test_failed_requests_leave_it_open() -> None:
    """Latency of the finished alone would be a clear win."""
    made = [replace(p, num_failed=p.policy == "goodput") for p in steady(90.0)]
    found = comparisons(made)
    assert {c.verdict for c in found} == {"open"}
    assert all("4 requests failed" in c.text for c in found)


def test_one_repeat_proves_nothing() -> None:
    made = [phase(policy, 100.0, 0) for policy in ("none", "fixed:1", "goodput")]
    assert comparisons(made) == []
    assert summary([]) == ["No verdict: no point has two complete repeats."]


def test_a_phase_without_an_answer_is_no_pair() -> None:
    made = [p for p in steady(90.0) if (p.policy, p.repeat) != ("none", 3)]
    found = comparisons([*made, phase("none", None, 3)])
    assert one(found, "none").num_pairs == 3


def test_text_and_summary_tell_the_numbers() -> None:
    found = comparisons(steady(104.0))
    assert one(found, "best fixed").text == (
        "steady at 0.3 of saturation, mixed: goodput's mean latency is 1.040 of that of the best "
        "fixed length (fixed:3) (95 % interval 1.040 to 1.040, 4 pairs); asked: at most 1.03; "
        "missed."
    )
    assert summary(found)[0] == (
        "Steady loads: within 3 % of the best fixed length's mean latency: 1 missed of 1; worst "
        "1.040 (1.040 to 1.040), steady at 0.3, mixed, against fixed:3."
    )


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.87, 0.95, "5 to 13 % faster"),
        (0.87, 0.871, "13 % faster"),
        (1.02, 1.1, "2 to 10 % slower"),
        (0.9, 1.02, "10 % faster to 2 % slower"),
        (1.0, 1.0, "0 % faster"),
    ],
)
def test_people_read_percent(low: float, high: float, said: str) -> None:
    assert faster(low, high) == said
