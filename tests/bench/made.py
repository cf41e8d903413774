"""Phases made by hand."""

from __future__ import annotations

from smartspec_bench.document import Phase, Spread


def phase(
    policy: str,
    mean_ms: float | None,
    repeat: int,
    *,
    shape: str = "steady",
    workload: str = "mixed",
    load: float = 0.3,
    num_failed: int = 0,
) -> Phase:
    return Phase(
        policy=policy,
        shape=shape,
        workload=workload,
        load=load,
        rate_rps=2.0,
        seed=1,
        repeat=repeat,
        num_sent=10,
        num_finished=10 - num_failed,
        num_failed=num_failed,
        duration_s=5.0,
        e2e_ms=Spread(mean=mean_ms, p99=mean_ms),
        ttft_ms=Spread(mean=1.0),
        itl_ms=Spread(),
        tpot_ms=Spread(mean=1.0),
        send_lag_ms=Spread(),
        token_goodput_tps=100.0,
        slo_goodput_rps=None,
        mean_draft_len=2.0,
        acceptance_rate=0.5,
    )


def phases(means: dict[str, list[float]], shape: str = "steady", load: float = 0.3) -> list[Phase]:
    """means: milliseconds by policy, one a repeat."""
    return [
        phase(policy, mean_ms, repeat, shape=shape, load=load)
        for policy, values in means.items()
        for repeat, mean_ms in enumerate(values)
    ]
