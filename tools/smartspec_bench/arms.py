"""Policies as interleaved arms on one live server.

A round gives every policy the same prompts and seeds, one policy after the other in an order that
rotates with the round; under the sampling contract they generate the same tokens, so that only time
differs. Results are ratios within a round, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smartspec_bench.progress import Progress
from smartspec_bench.streams import StreamError, grpc_inputs
from smartspec_py.api.contract import MODEL_NAME

NONE = "none"


@dataclass(frozen=True)
class Job:
    """One request: its fields but for the policy."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """A round of one policy, all jobs sent at once. elapsed_s: first send to last end."""

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
        """Geometric mean over the rounds: of two arms with the same rounds, the ratio of the means
        is the mean of the ratios within a round."""
        return statistics.geometric_mean(phase.tokens_per_s for phase in self.phases)

    @property
    def mean_draft_len(self) -> float:
        return sum(p.num_drafted for p in self.phases) / self._num_steps

    @property
    def mean_acceptance_len(self) -> float:
        """Tokens of a decoding step: its accepted drafts and one."""
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

    A group is a kind of load with its rounds, one list of jobs each; groups take turns within a
    round. The first round is run once more before, uncounted. Raises StreamError when a request
    fails.
    """
    import tritonclient.grpc.aio as triton

    arms = {name: {policy: Arm(policy) for policy in policies} for name in groups}
    num_rounds = len(next(iter(groups.values())))
    progress.update(total=(num_rounds + 1) * len(groups) * len(policies))
    async with triton.InferenceServerClient(grpc_url) as client:
        for policy in policies:
            for rounds in groups.values():
                await _phase(client, rounds[0], policy)
                progress.advance()
        for number in range(num_rounds):
            for name, rounds in groups.items():
                shift = number % len(policies)
                for policy in (*policies[shift:], *policies[:shift]):
                    progress.update(f"round {number + 1} of {num_rounds}, {name}, {policy}")
                    arms[name][policy].phases.append(await _phase(client, rounds[number], policy))
                    progress.advance()
    return {name: list(found.values()) for name, found in arms.items()}


async def _phase(client: Any, jobs: Sequence[Job], policy: str) -> Phase:
    start = time.monotonic()
    finals = await asyncio.gather(*(_request(client, job, policy) for job in jobs))
    elapsed_s = time.monotonic() - start
    return Phase(
        num_tokens=sum(final["num_tokens"] for final in finals),
        num_steps=sum(final["num_steps"] for final in finals),
        num_drafted=sum(final["total_draft_tokens"] for final in finals),
        num_accepted=sum(final["total_accepted_draft_tokens"] for final in finals),
        elapsed_s=elapsed_s,
    )


async def _request(client: Any, job: Job, policy: str) -> dict[str, int]:
    """One streamed request; the counts of its final response."""
    inputs = grpc_inputs({**job.fields, "stream": True, "speculation_policy": policy})

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": MODEL_NAME,
            "inputs": inputs,
            "enable_empty_final_response": True,
        }

    counts, num_tokens, is_final = dict[str, int](), 0, False
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise StreamError(error.message())
        if (found := result.as_numpy("num_output_tokens")) is not None:
            num_tokens += int(found.item())
            for name in ("num_steps", "total_draft_tokens", "total_accepted_draft_tokens"):
                counts[name] = int(result.as_numpy(name).item())
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    if not is_final:
        raise StreamError("the stream ended without a final response")
    return {**counts, "num_tokens": num_tokens}
