"""Compares answers with and without speculation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from smartspec_bench.streams import Exchange


@dataclass(frozen=True)
class Row:
    """A workload's line in the table. Lengths are per decoding step with speculation: drafted
    tokens, and gained tokens (accepted drafts plus one). The step of the prompt, which generates
    the first token, is not counted."""

    workload: str
    transport: str
    num_tokens: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    speed_up: float
    mean_draft_len: float
    mean_acceptance_len: float
    is_same_text: bool


def summarise(
    workload: str, transport: str, speculated: Sequence[Exchange], plain: Sequence[Exchange]
) -> Row:
    """Medians over the runs; lengths are over all of their steps."""
    rate_with = statistics.median(_tokens_per_s(answer) for answer in speculated)
    rate_without = statistics.median(_tokens_per_s(answer) for answer in plain)
    num_steps, num_drafted, num_accepted = (
        sum(answer.last[name] for answer in speculated)
        for name in ("num_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    )
    num_steps = num_steps or 1
    return Row(
        workload=workload,
        transport=transport,
        num_tokens=speculated[0].num_tokens,
        tokens_per_s_without=rate_without,
        tokens_per_s_with=rate_with,
        speed_up=rate_with / rate_without,
        mean_draft_len=num_drafted / num_steps,
        mean_acceptance_len=1.0 + num_accepted / num_steps,
        is_same_text=len({answer.text for answer in (*speculated, *plain)}) == 1,
    )


def _tokens_per_s(answer: Exchange) -> float:
    timing = answer.timing
    return answer.num_tokens / timing.e2e_s(timing.sent_s)
