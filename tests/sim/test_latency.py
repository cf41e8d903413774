"""Latency summaries worked by hand."""

from __future__ import annotations

import pytest

from smartspec_sim.latency import RequestTiming, parse_slo, summarise

FAST = RequestTiming(0.0, first_s=1.0, last_s=3.0, num_tokens=5)
"""ttft 1 s; e2e 3 s; tpot 2 / 4 = 0.5 s."""
SLOW = RequestTiming(1.0, first_s=4.0, last_s=5.0, num_tokens=2)
"""ttft 3 s; e2e 4 s; tpot 1 s."""
SHORT = RequestTiming(2.0, first_s=3.0, last_s=3.0, num_tokens=1)
FAILED = RequestTiming(2.0, error="refused")


def test_summary() -> None:
    """8 tokens and 3 requests in the 5 s from the first due request to the last token. FAST meets
    both targets exactly; SHORT has no tpot; SLOW misses; FAILED cannot meet any."""
    found = summarise([FAST, SLOW, SHORT, FAILED], {"ttft": 1000, "tpot": 500})
    assert (found["num_requests"], found["num_finished"], found["num_failed"]) == (4, 3, 1)
    assert found["elapsed_s"] == 5.0
    assert found["token_goodput_tps"] == pytest.approx(8 / 5)
    assert found["ttft_ms"]["mean"] == pytest.approx(5000 / 3)
    assert found["ttft_ms"]["p50"] == pytest.approx(1000)
    assert found["tpot_ms"]["mean"] == pytest.approx(750)
    assert found["e2e_ms"]["mean"] == pytest.approx((3 + 4 + 1) / 3 * 1000)
    assert found["num_slo_met"] == 2
    assert found["slo_goodput_rps"] == pytest.approx(2 / 5)


def test_without_finished_requests_there_is_no_latency() -> None:
    found = summarise([FAILED])
    assert found["token_goodput_tps"] == 0.0
    assert found["e2e_ms"] == dict.fromkeys(["mean", "p50", "p90", "p95", "p99"])
    assert summarise([])["num_requests"] == 0
    assert "slo_goodput_rps" not in found


def test_targets_are_read() -> None:
    assert parse_slo("e2e:5000 tpot:20.5") == {"tpot": 20.5, "e2e": 5000}
    for text in ("", "ttft", "ttft:x", "itl:3", "ttft:1 ttft:2", "tpot:0"):
        with pytest.raises(ValueError, match="ttft:"):
            parse_slo(text)
