"""The charts of a run on a CUDA device."""

from __future__ import annotations

from smartspec_bench.gpu.document import Document
from smartspec_bench.gpu.page import LOADED, PASSES, RATES
from smartspec_bench.report import charts
from smartspec_bench.report.blocks import Chart
from smartspec_bench.report.points import ordered


def charts_of(document: Document) -> dict[str, Chart]:
    """Charts by section, for the parts that were measured."""
    passes = [
        {"group": f"k = {k}", "x": point.batch_size, "y": ms}
        for point in document.batches
        for k, ms in enumerate(point.target_ms)
    ]
    rates = [
        {
            "group": rate.policy,
            "x": point.batch_size,
            "y": rate.median_tps,
            "low": min(rate.tokens_tps),
            "high": max(rate.tokens_tps),
        }
        for point in document.batches
        for rate in point.rates
    ]
    loads = [
        {"group": point.policy, "x": point.rate_rps, "y": point.mean_ms}
        for point in document.load
        if point.mean_ms is not None
    ]
    drawn = {
        PASSES: (passes, "Passes of the target", "sequences at once", "ms of a pass"),
        RATES: (rates, "Tokens a second by policy", "sequences at once", "tokens/s"),
        LOADED: (loads, "Mean latency by policy", "requests/s", "mean latency, ms"),
    }
    return {
        name: Chart(
            f"chart-{name}",
            title,
            charts.lines(
                rows,
                ordered(str(row["group"]) for row in rows),
                x,
                y,
                is_log=True,
                is_x_log=name != LOADED,
            ),
        )
        for name, (rows, title, x, y) in drawn.items()
        if rows
    }
