"""Compares answers with and without speculation: asks, times and summarises them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_bench.streams import StreamError, Transport


@dataclass(frozen=True)
class Answer:
    """One streamed answer. elapsed_s: from sending the request to its last response."""

    text: str
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True)
class Row:
    """A workload's line in the table.

    Lengths are per decoding step with speculation: tokens drafted, and tokens gained, which are the
    accepted drafts and one. The prompt's step, which gives the first token, is not among them.
    """

    workload: str
    transport: str
    num_tokens: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    speed_up: float
    mean_draft_len: float
    mean_acceptance_len: float
    is_same_text: bool


def ask(
    transport: Transport,
    fields: Mapping[str, Any],
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Stream one answer and hand its words on as they come. Raises StreamError."""
    text, num_tokens, last = "", 0, dict[str, Any]()
    start = time.monotonic()
    for last in transport.stream(fields):
        text += last["text_output"]
        num_tokens += last["num_output_tokens"]
        if on_text is not None:
            on_text(last["text_output"])
    elapsed_s = time.monotonic() - start
    if not last.get("finish_reason"):
        raise StreamError("the stream ended without a final response")
    return Answer(
        text,
        num_tokens,
        last["num_steps"],
        last["total_draft_tokens"],
        last["total_accepted_draft_tokens"],
        elapsed_s,
    )


def summarise(
    workload: str, transport: str, speculated: Sequence[Answer], plain: Sequence[Answer]
) -> Row:
    """Medians over the runs; lengths over all of their steps."""
    rate_with = statistics.median(answer.tokens_per_s for answer in speculated)
    rate_without = statistics.median(answer.tokens_per_s for answer in plain)
    num_steps = sum(answer.num_steps for answer in speculated) or 1
    return Row(
        workload=workload,
        transport=transport,
        num_tokens=speculated[0].num_tokens,
        tokens_per_s_without=rate_without,
        tokens_per_s_with=rate_with,
        speed_up=rate_with / rate_without,
        mean_draft_len=sum(answer.num_drafted for answer in speculated) / num_steps,
        mean_acceptance_len=1.0 + sum(answer.num_accepted for answer in speculated) / num_steps,
        is_same_text=len({answer.text for answer in (*speculated, *plain)}) == 1,
    )
