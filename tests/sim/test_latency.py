"""Summaries by hand."""

from __future__ import annotations

import pytest

from smartspec_sim.latency import RequestTiming, Slo, parse_slo, statistics_ms, summarise

FAST = RequestTiming(0.0, 0.5, first_s=1.0, last_s=3.0, num_tokens=5)
"""ttft 1 s, 0.5 from sent; e2e 3 s, 2.5 from sent; tpot 2 / 4 = 0.5 s."""
SLOW = RequestTiming(1.0, 1.0, first_s=4.0, last_s=5.0, num_tokens=2)
"""ttft 3 s; e2e 4 s; tpot 1 s."""
SHORT = RequestTiming(2.0, 2.0, first_s=3.0, last_s=3.0, num_tokens=1)
FAILED = RequestTiming(2.0, 2.0, error="refused")


def test_summary_by_hand() -> None:
    """8 tokens and 3 requests in the 5 s from the first request's time to the last token."""
    found = summarise([FAST, SLOW, SHORT, FAILED], Slo(ttft_ms=1000, tpot_ms=500))
    assert (found["num_requests"], found["num_finished"], found["num_failed"]) == (4, 3, 1)
    assert found["elapsed_s"] == 5.0
    assert found["token_goodput_tps"] == pytest.approx(8 / 5)
    assert found["ttft_ms"]["mean"] == pytest.approx(5000 / 3)
    assert found["ttft_ms"]["p50"] == pytest.approx(1000)
    assert found["tpot_ms"]["mean"] == pytest.approx(750)
    assert found["e2e_ms"]["mean"] == pytest.approx((3 + 4 + 1) / 3 * 1000)
    assert found["from_sent"]["ttft_ms"]["mean"] == pytest.approx(4500 / 3)
    assert found["send_lag_ms"]["mean"] == pytest.approx(500 / 4)
    # FAST meets both exactly; SHORT has no tpot to miss; SLOW misses; FAILED cannot meet any.
    assert found["num_slo_met"] == 2
    assert found["slo_goodput_rps"] == pytest.approx(2 / 5)


def test_nothing_has_no_latency_and_no_rate() -> None:
    found = summarise([FAILED])
    assert found["token_goodput_tps"] == 0.0
    assert found["e2e_ms"] == dict.fromkeys(["mean", "p50", "p90", "p95", "p99"])
    assert summarise([])["num_requests"] == 0
    assert "slo_goodput_rps" not in found


def test_percentiles_are_linear_between_ranks() -> None:
    """0..100 ms: the p-th percentile is p ms."""
    found = statistics_ms([i / 1000 for i in range(101)])
    assert found == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99})


def test_the_bare_word_goodput_is_in_no_output() -> None:
    found = summarise([FAST], Slo(e2e_ms=1.0))
    assert "goodput" not in found
    assert {name for name in found if "goodput" in name} == {"token_goodput_tps", "slo_goodput_rps"}


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:200", Slo(ttft_ms=200)),
        ("e2e:5000 tpot:20.5", Slo(tpot_ms=20.5, e2e_ms=5000)),
        ("e2el:5000", Slo(e2e_ms=5000)),
    ],
)
def test_targets_are_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "itl:3", "ttft:1 ttft:2", "tpot:0"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_slo(text)
