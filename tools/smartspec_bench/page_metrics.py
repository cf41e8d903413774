"""The numbers of a phase that pictures and tables show, with their names and units."""

from __future__ import annotations

from smartspec_bench.page_points import Metric

E2E_MEAN = Metric("e2e-mean", "mean end-to-end latency", "ms", lambda phase: phase.e2e_ms.mean)
E2E_P50 = Metric("e2e-p50", "median end-to-end latency", "ms", lambda phase: phase.e2e_ms.p50)
E2E_P99 = Metric("e2e-p99", "99th percentile of latency", "ms", lambda phase: phase.e2e_ms.p99)
TTFT_MEAN = Metric("ttft-mean", "mean time to first token", "ms", lambda phase: phase.ttft_ms.mean)
TTFT_P99 = Metric("ttft-p99", "its 99th percentile", "ms", lambda phase: phase.ttft_ms.p99)
ITL_P99 = Metric("itl-p99", "99th percentile between tokens", "ms", lambda phase: phase.itl_ms.p99)
TPOT_MEAN = Metric("tpot-mean", "mean time per token", "ms", lambda phase: phase.tpot_ms.mean)
SEND_LAG_P99 = Metric("lag-p99", "send lag", "ms", lambda phase: phase.send_lag_ms.p99)
TOKEN_GOODPUT = Metric(
    "token-goodput", "token_goodput_tps", "tokens/s", lambda phase: phase.token_goodput_tps
)
SLO_GOODPUT = Metric(
    "slo-goodput", "slo_goodput_rps", "requests/s", lambda phase: phase.slo_goodput_rps
)
DRAFT_LEN = Metric("draft-len", "mean draft length", "tokens", lambda phase: phase.mean_draft_len)
ACCEPTANCE = Metric("acceptance", "accepted drafts, share", "", lambda phase: phase.acceptance_rate)

TABLE = (
    (E2E_MEAN, "e2e mean, ms"),
    (E2E_P50, "e2e p50, ms"),
    (E2E_P99, "e2e p99, ms"),
    (TTFT_MEAN, "TTFT mean, ms"),
    (TTFT_P99, "TTFT p99, ms"),
    (TPOT_MEAN, "TPOT mean, ms"),
    (ITL_P99, "ITL p99, ms"),
    (TOKEN_GOODPUT, "token_goodput_tps"),
    (SLO_GOODPUT, "slo_goodput_rps"),
    (DRAFT_LEN, "draft length, mean"),
    (ACCEPTANCE, "accepted, share"),
    (SEND_LAG_P99, "send lag p99, ms"),
)
"""Columns of the table of phases, with their short names."""
