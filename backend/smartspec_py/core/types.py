"""The values that the parts of the system exchange.

Nothing here uses I/O, clocks or threads. The values mean the same in the planner, the step loop,
the engines and the simulator. Do not change a value after you have passed it on. Values that a step
creates for every sequence are not declared frozen, because creating a frozen one takes twice as
long. Times are in seconds and end in `_s`. Counts begin with `num_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SequenceId = int
"""Identifies a request in the loop and the engines. It is never reused while the server runs."""

NO_TOKEN = -1
"""Means that there is no such token."""


class FinishReason(StrEnum):
    """Why a request ended. The values are what the client reads in `finish_reason`."""

    STOP = "stop"  # the end token or a stop word
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"  # the client went away, or the server had to stop
    DEADLINE = "deadline"  # deadline_ms passed while it generated


class Verification(StrEnum):
    """How drafts are verified; see `engines.torch.sampling`. Both keep the distribution."""

    COUPLED = "coupled"  # equal to the target's own draw: same seed, same text
    REJECTION = "rejection"  # by probability, with independent noise: more accepted when hot


class SpecMetrics(StrEnum):
    """How much of a request's speculation its last response reports."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"  # with an entry for each step


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request draws its tokens. The exact rules are in `engines.torch.sampling`.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1], 1 is off. min_p: in [0, 1], lowest
        probability relative to the most probable token; 0 is off.
    seed: the seed of the noise.
    end_tokens: generation stops at the first of these, which is not emitted.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
        the generated text; 1 is off. presence_penalty, frequency_penalty: subtracted from the
        logits of generated tokens, once, or once per occurrence; 0 is off.
    logit_bias: pairs of a token and the number to add to its logit. bad_words: token sequences that
        are never completed.
    min_tokens: no end token is drawn before this many tokens are generated.
    log_probs: whether to return the log-probability of each token.
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
        """Whether each token is the most probable one of the model's unchanged logits."""
        return self.is_greedy and not self.shapes_logits

    def num_before_end(self, tokens: Sequence[int]) -> int:
        """The number of tokens before the first end token; all tokens if there is none."""
        for index, token in enumerate(tokens):
            if token in self.end_tokens:
                return index
        return len(tokens)


class DraftOption(NamedTuple):
    """A way to draft for a sequence.

    max_draft_len: the largest useful draft length now: the lowest limit of request, engine,
        proposer, max_tokens and context length.
    accept_probs: for each position up to max_draft_len, the estimated probability that this draft
        is accepted if all drafts before it in the step are. An array is read faster than a tuple.
    draft_lag: tokens that the proposer must process before it can draft; 0 also if there are so few
        that it processes them in its first pass.
    has_draft_passes: whether drafting takes passes of a draft model.
    draft_s: seconds that drafting takes at any length, beside draft passes.
    """

    max_draft_len: int
    accept_probs: Sequence[float] | NDArray[np.float64]
    draft_lag: int = 0
    has_draft_passes: bool = True
    draft_s: float = 0.0


@dataclass(slots=True)
class SequenceView:
    """What a policy knows about a sequence that is ready for its next step.

    context_len: known tokens, prompt and generated.
    remaining: tokens that the request may still generate.
    policy: the request's policy.
    options: the ways to draft for it, at least one. Policies that do not choose use the first.
    slo_s_per_token: the request's latency target, mean seconds per generated token; None if it has
        no target.
    slack_s: seconds by which the request is ahead of its target (negative: behind). This is
        slo_s_per_token times the tokens after the first, minus the time since the first token.
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
    """The decision for one step, and its expected result. Both expected values are 0.0 if no
    sequence is ready.

    draft_lens: tokens to draft for each ready sequence; 0 means no speculation.
    expected_tokens: expected generated tokens of the step.
    expected_s: expected seconds of the step, without prompt chunks.
    choices: index in `SequenceView.options` by sequence; 0 for sequences that are left out.
    """

    draft_lens: dict[SequenceId, int] = field(default_factory=dict)
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    choices: dict[SequenceId, int] = field(default_factory=dict)

    def option(self, view: SequenceView) -> DraftOption:
        """The option that a sequence uses if it drafts."""
        return view.options[self.choices.get(view.sequence, 0)]

    @property
    def goodput(self) -> float:
        """Expected generated tokens per second; 0.0 for an empty plan."""
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of a step, from which costs are learned.

    batch_size: sequences that decoded. num_tokens: their tokens in the target's pass, with drafts.
    context_len: mean context length of the sequences. num_generated: tokens that requests got.
    draft_rows: batch size of each draft pass; empty if no draft model ran.
    target_s: seconds of the target's pass, with prompt chunks.
    draft_s: seconds of all draft passes, with catch-up.
    total_s: seconds of the whole step. plan_s: the part for planning.
    num_prefill_tokens: prompt tokens in the same pass.
    num_catch_up_tokens: tokens that draft caches had to process first.
    num_charged_tokens: tokens of the verified texts, with drafts; see
        `CostModel.max_charged_tokens`.
    is_repeat: whether the target's pass had as many tokens as the pass before it.
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
        """Seconds of the step outside its passes."""
        return max(0.0, self.total_s - self.target_s - self.draft_s)

    @property
    def spent_s(self) -> float:
        """Seconds to compare with steps of a server that never speculates: without the time of a
        plan that drafted nothing."""
        return self.total_s if self.is_speculating else self.total_s - self.plan_s
