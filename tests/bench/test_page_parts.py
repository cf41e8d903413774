"""Colours, numbers and points of reports, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from page_example import full_document

from smartspec_bench.report.blocks import digits, interval, plural, tick
from smartspec_bench.report.charts import INK, colours
from smartspec_bench.report.points import E2E_MEAN, SLO_GOODPUT, ordered, points_of
from smartspec_bench.report.tables import measure

POLICIES = ("none", *(f"fixed:{k}" for k in range(1, 8)), "goodput", "goodput_global", "mine")


def luminance(colour: str) -> float:
    """Relative, by WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_lines_and_texts_stand_out_from_the_paper() -> None:
    """3:1 for lines, 4.5:1 for texts, by WCAG 2.1; texts stand on shares of time as well."""
    for policy, colour in zip(POLICIES, colours(POLICIES), strict=True):
        assert contrast(colour, "#ffffff") >= 3, policy
    for colour in colours(("draft", "target", "host")):
        assert contrast(INK, colour) >= 4.5


def test_a_policy_looks_the_same_whatever_stands_beside_it() -> None:
    assert colours(["goodput"])[0] == colours(POLICIES)[POLICIES.index("goodput")]
    assert len(set(colours(POLICIES))) == len(POLICIES)


def test_fixed_lengths_are_in_order_and_get_darker() -> None:
    names = ordered(["fixed:10", "fixed:2", "none", "fixed:5", "goodput"])
    assert names == ["goodput", "none", "fixed:2", "fixed:5", "fixed:10"]
    shades = [luminance(colour) for colour in colours(names)[2:]]
    assert shades == sorted(shades, reverse=True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0, "0"),
        (0.0123, "0.0123"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (999.6, "1,000"),
        (12345.6, "12,346"),
    ],
)
def test_three_digits(value: float | None, shown: str) -> None:
    assert digits(value) == shown


def test_words() -> None:
    assert tick(0.2) == "0.2"
    assert tick(1000) == "1,000"
    assert interval(0.98765, 1.2) == "0.988 to 1.200"
    assert interval(0.0001, 673292.161) == "0.000 to 673,292"
    assert plural(1, "policy", "policies") == "1 policy"
    assert plural(1200, "request") == "1,200 requests"
    assert measure("e2e_ms.mean") == "mean end-to-end latency"
    assert measure("speed_up") == "speed-up over none"
    assert measure("slo_goodput_rps") == "slo_goodput_rps"


def test_a_point_is_the_mean_of_the_repeats_that_have_the_number() -> None:
    """Latencies 1 and 3 s, and one repeat in which no request finished: 2 s."""
    first = full_document().phases[0]
    latencies = (1000.0, None, 3000.0)
    phases = [
        replace(first, repeat=at, e2e_ms=replace(first.e2e_ms, mean=mean), slo_goodput_rps=None)
        for at, mean in enumerate(latencies)
    ]
    (point,) = points_of(phases)
    assert point.mean(E2E_MEAN) == 2000
    assert point.mean(SLO_GOODPUT) is None


def test_loads_that_change_are_one_point_though_their_rates_differ() -> None:
    step = next(phase for phase in full_document().phases if phase.shape == "step")
    (point,) = points_of([step, replace(step, repeat=1, rate_rps=step.rate_rps + 1)])
    assert point.rate_rps == step.rate_rps + 0.5
