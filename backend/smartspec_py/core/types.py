"""The glossary: the values that the parts of the system hand to one another.

Everything here is free of I/O, clocks and threads, and means the same in the planner, the step
loop, the engines and the simulator. Values are not changed once they were handed on; what a step
makes for every sequence is not declared frozen, since making one would take twice as long. Times
are seconds and end in `_s`; counts begin with `num_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SequenceId = int
"""Names one request inside the loop and the engines; never reused while the server lives."""

NO_TOKEN = -1
"""Stands for `no such token`."""


class FinishReason(StrEnum):
    """Why a request ended. The values are what the client reads in `finish_reason`."""

    STOP = "stop"  # the end token or a stop word
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"  # the client went away, or the server had to stop
    DEADLINE = "deadline"  # deadline_ms passed while it generated


class Verification(StrEnum):
    """How drafts are verified, see `engines.torch.sampling`: both by the target's distribution."""

    COUPLED = "coupled"  # equal to the target's own draw: same seed, same text
    REJECTION = "rejection"  # by probability, with independent noise: more accepted when hot


class SpecMetrics(StrEnum):
    """How much of a request's speculation its last response reports."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"  # with an entry for each step


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens; `engines.torch.sampling` has the exact rule and its order.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1], 1 is off. min_p: in [0, 1], least
        probability relative to the most probable token; 0 is off.
    seed: keys the noise.
    end_tokens: generation stops at the first of them and does not emit it; empty is none.
    repetition_penalty: divides positive and multiplies negative logits of tokens that are in the
        prompt or were generated; 1 is off. presence_penalty, frequency_penalty: taken off the
        logits of generated tokens, once and for each time; 0 is off.
    logit_bias: (token, added to its logit). bad_words: token sequences never completed.
    min_tokens: no end token can be drawn before so many were generated.
    log_probs: whether the log-probability of each token is asked for.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    end_tokens: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    verification: Verification = Verification.COUPLED
    log_probs: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def counts_tokens(self) -> bool:
        """Whether logits depend on how often tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before temperature and truncation."""
        return bool(
            self.counts_tokens
            or self.logit_bias
            or self.bad_words
            or (self.min_tokens and self.end_tokens)
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the most probable token of the model's own logits."""
        return self.is_greedy and not self.shapes_logits

    def num_before_end(self, tokens: Sequence[int]) -> int:
        """How many tokens precede the first end token; all of them where there is none."""
        for index, token in enumerate(tokens):
            if token in self.end_tokens:
                return index
        return len(tokens)


class DraftOption(NamedTuple):
    """A way to draft for a sequence.

    max_draft_len: the most drafts that make sense now: the least of the request's own limit, the
        engine's, the proposer's, and the room left before max_tokens and the context limit.
    accept_probs: for each position up to max_draft_len, the estimated probability that the draft
        there is accepted given that all drafts before it in the same step were. An array is read
        faster than a tuple.
    draft_lag: tokens that the proposer must read before it can propose (0: it is up to date, or so
        nearly that it reads the rest on the way).
    has_draft_passes: whether drafting takes passes of a draft model; looking up takes none.
    draft_s: seconds that drafting takes at any length, beside draft passes.
    """

    max_draft_len: int
    accept_probs: Sequence[float] | NDArray[np.float64]
    draft_lag: int = 0
    has_draft_passes: bool = True
    draft_s: float = 0.0


@dataclass(slots=True)
class SequenceView:
    """What a policy may know of one sequence that is ready for its next step.

    context_len: tokens known so far, prompt and generated.
    remaining: tokens that the request may still generate.
    policy: the policy that the request is served under.
    options: the ways to draft for it, one at least; a policy that does not choose takes the first.
    slo_s_per_token: seconds a generated token that the request may take on average; None is no
        target.
    slack_s: seconds by which it is ahead of that so far (negative: behind), counted from its first
        token: slo_s_per_token times the tokens since, less the time since.
    """

    sequence: SequenceId
    context_len: int
    remaining: int
    policy: str
    options: tuple[DraftOption, ...]
    slo_s_per_token: float | None = None
    slack_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """One step's decision, with what it was expected to bring (both 0.0 when nothing is ready).

    draft_lens: tokens to draft for each sequence that is ready; 0 is no speculation.
    expected_tokens: tokens that the step is expected to generate.
    expected_s: seconds that its decoding part is expected to take.
    choices: which of `SequenceView.options` a sequence drafts with; 0 for those left out.
    """

    draft_lens: dict[SequenceId, int] = field(default_factory=dict)
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    choices: dict[SequenceId, int] = field(default_factory=dict)

    def option(self, view: SequenceView) -> DraftOption:
        """What a sequence drafts with, if it drafts."""
        return view.options[self.choices.get(view.sequence, 0)]

    @property
    def goodput(self) -> float:
        """Expected generated tokens per second; 0.0 for an empty plan."""
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What is learned from: what a step ran, brought and took. Times are seconds.

    batch_size: sequences that decoded. num_tokens: theirs in the target's pass, drafts included.
    context_len: mean tokens of context a row. num_generated: tokens that requests kept.
    draft_rows: rows of each draft pass, as run; none where drafts were looked up.
    target_s: the target's pass, prompt chunks included.
    draft_s: the draft passes together, catch-up included.
    total_s: all of the step. plan_s: of it, deciding what to draft.
    num_prefill_tokens: prompt tokens that shared the pass.
    num_catch_up_tokens: tokens that stale draft caches read first.
    num_charged_tokens: tokens of the texts that were verified, drafts included; see
        `CostModel.max_charged_tokens`.
    is_repeat: whether the target's pass had as many tokens as the one before it.
    """

    batch_size: int
    num_tokens: int
    context_len: float
    num_generated: int
    draft_rows: tuple[int, ...]
    target_s: float
    draft_s: float
    total_s: float
    plan_s: float = 0.0
    num_prefill_tokens: int = 0
    num_catch_up_tokens: int = 0
    num_charged_tokens: int = 0
    is_repeat: bool = True

    @property
    def is_speculating(self) -> bool:
        return self.num_tokens > self.batch_size

    @property
    def host_s(self) -> float:
        """What the step took beside its passes."""
        return max(0.0, self.total_s - self.target_s - self.draft_s)

    @property
    def spent_s(self) -> float:
        """For what it generated: without a plan that drafted nothing, which a server that never
        speculates is spared."""
        return self.total_s if self.is_speculating else self.total_s - self.plan_s
