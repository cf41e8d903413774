"""Policies as interleaved arms on one live server.

A round gives every policy the same prompts and seeds, one policy after the other, in an order that
rotates with the round. By default all policies generate the same tokens, so that only the time
differs. Results are ratios within a round, because the speed of a shared machine changes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smartspec_bench.progress import Progress
from smartspec_bench.streams import GrpcStreams, Transport, ask, seconds_from_now

NONE = "none"


@dataclass(frozen=True)
class Job:
    """One request: its fields but for the policy."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """A round of one policy, with all jobs sent at once. elapsed_s: from the first send to the last
    end."""

    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass
class Arm:
    """All rounds of one policy."""

    policy: str
    phases: list[Phase] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Geometric mean over the rounds. The ratio of two such means is the mean of the ratios
        within a round, if both have the same rounds."""
        return statistics.geometric_mean(phase.tokens_per_s for phase in self.phases)

    @property
    def mean_draft_len(self) -> float:
        return sum(p.num_drafted for p in self.phases) / self._num_steps

    @property
    def mean_acceptance_len(self) -> float:
        """Tokens per decoding step: accepted drafts plus one."""
        return 1.0 + sum(p.num_accepted for p in self.phases) / self._num_steps

    @property
    def _num_steps(self) -> int:
        return max(1, sum(p.num_steps for p in self.phases))


async def run_arms(
    grpc_url: str,
    policies: Sequence[str],
    groups: Mapping[str, Sequence[Sequence[Job]]],
    progress: Progress,
) -> dict[str, list[Arm]]:
    """Run every round of every group under every policy; returns the arms of each group.

    A group is a kind of load with its rounds, one list of jobs for each; groups alternate within a
    round. The first round runs once before the measurement. Raises StreamError if a request fails.
    """
    arms = {name: {policy: Arm(policy) for policy in policies} for name in groups}
    num_rounds = len(next(iter(groups.values())))
    progress.update(total=(num_rounds + 1) * len(groups) * len(policies))
    async with GrpcStreams(grpc_url) as streams:
        for policy in policies:
            for rounds in groups.values():
                await _phase(streams, rounds[0], policy)
                progress.advance()
        for number in range(num_rounds):
            for name, rounds in groups.items():
                shift = number % len(policies)
                for policy in (*policies[shift:], *policies[:shift]):
                    progress.update(f"round {number + 1} of {num_rounds}, {name}, {policy}")
                    arms[name][policy].phases.append(await _phase(streams, rounds[number], policy))
                    progress.advance()
    return {name: list(found.values()) for name, found in arms.items()}


async def _phase(streams: Transport, jobs: Sequence[Job], policy: str) -> Phase:
    now_s = seconds_from_now()
    more = {"stream": True, "speculation_policy": policy}
    answers = await asyncio.gather(*(ask(streams, {**job.fields, **more}) for job in jobs))
    elapsed_s = now_s()
    return Phase(
        num_tokens=sum(one.num_tokens for one in answers),
        num_steps=sum(one.last["num_steps"] for one in answers),
        num_drafted=sum(one.last["total_draft_tokens"] for one in answers),
        num_accepted=sum(one.last["total_accepted_draft_tokens"] for one in answers),
        elapsed_s=elapsed_s,
    )
