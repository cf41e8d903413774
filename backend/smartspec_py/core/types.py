"""The glossary: the values that the parts of the system hand to one another.

Everything here is frozen, free of I/O, clocks and threads, and means the same in the planner, the
step loop, the engines and the simulator. Times are seconds and end in `_s`; counts begin with
`num_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SequenceId = int
"""Names one request inside the loop and the engines; never reused while the server lives."""

NO_TOKEN = -1
"""Stands for `no such token`, e.g. a model without an end-of-text token."""


class FinishReason(StrEnum):
    """Why a request ended. The values are what the client reads in `finish_reason`."""

    STOP = "stop"  # the end token or a stop word
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"  # the client went away


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens; see `engines.sampling` for the exact rule.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1], 1 is off. seed: keys the noise.
    end_token: generation stops at it and does not emit it; NO_TOKEN is none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    end_token: int = NO_TOKEN

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a policy may know of one sequence that is ready for its next step.

    context_len: tokens known so far, prompt and generated.
    max_draft_len: the most drafts that make sense now: the least of the request's own limit, the
        engine's, the proposer's, and the room left before max_tokens and the context limit.
    draft_lag: tokens that the proposer must read before it can propose (0: it is up to date).
    remaining: tokens that the request may still generate.
    accept_probs: for each position up to max_draft_len, the estimated probability that the draft
        there is accepted given that all drafts before it in the same step were.
    policy: the policy that the request is served under.
    """

    sequence: SequenceId
    context_len: int
    max_draft_len: int
    draft_lag: int
    remaining: int
    accept_probs: tuple[float, ...]
    policy: str


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """One step's decision, with what it was expected to bring (both 0.0 when nothing is ready).

    draft_lens: tokens to draft for each sequence that is ready; 0 is no speculation.
    expected_tokens: tokens that the step is expected to generate.
    expected_s: seconds that its decoding part is expected to take.
    """

    draft_lens: dict[SequenceId, int] = field(default_factory=dict)
    expected_tokens: float = 0.0
    expected_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Expected generated tokens per second; 0.0 for an empty plan."""
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0
