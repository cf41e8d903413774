"""The glossary: the values that the parts of the system exchange.

Nothing here uses I/O, clocks or threads. Each type has the same meaning in the planner, the step
loop, the engines and the simulator. Values are not changed after they are passed on. Types that a
step creates for every sequence are not frozen dataclasses, because creating those takes twice as
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
"""ID of one request inside the loop and the engines. It is not reused while the server runs."""

NO_TOKEN = -1
"""Placeholder where there is no token."""


class FinishReason(StrEnum):
    """Why a request ended. Clients receive these values in `finish_reason`."""

    STOP = "stop"  # the end token or a stop word
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"  # the client cancelled or disconnected, or the server stopped
    DEADLINE = "deadline"  # deadline_ms passed during generation


class Verification(StrEnum):
    """How drafts are verified. Both ways keep the target's distribution; see
    `engines.decoding.sampling`."""

    COUPLED = "coupled"  # accept a draft equal to the target's own sample: same seed, same text
    REJECTION = "rejection"  # rejection sampling: accepts more drafts at high temperatures


class GuideType(StrEnum):
    """The language of a grammar, with TensorRT-LLM's names and `choice`."""

    JSON = "json"  # any JSON object or array; there is no guide
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"  # Lark's or llama.cpp's (GBNF) notation
    CHOICE = "choice"  # a JSON list of texts


class SpecMetrics(StrEnum):
    """Level of detail of the speculation metrics in a request's last response."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"  # also one entry per step


class TokenLogProb(NamedTuple):
    """The natural log-probability of a token under the unmodified logits of the target.

    top: the most probable tokens at its position and their log-probabilities, best first.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogProbs(NamedTuple):
    """Log-probabilities of successive tokens of a prompt. first: index of the first one, at least
    1, because no logits belong to the first token of a prompt."""

    first: int
    values: tuple[TokenLogProb, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled. `engines.decoding` has the exact rules and their
    order.

    temperature: 0 is greedy.
    top_k: 0 is off.
    top_p: in (0, 1]; 1 is off.
    min_p: in [0, 1]; smallest probability relative to the most probable token. 0 is off.
    seed: seed of the random numbers.
    end_tokens: generation stops at the first of them, which is not emitted. It may be empty.
    repetition_penalty: applies to tokens of the prompt and to generated tokens. It divides positive
        logits and multiplies negative ones. 1 is off.
    presence_penalty: subtracted once from the logit of each token generated so far. 0 is off.
    frequency_penalty: subtracted once per occurrence of a generated token. 0 is off.
    logit_bias: pairs of a token and the value added to its logit.
    bad_words: token sequences that are never completed.
    min_tokens: number of tokens to generate before an end token can be sampled.
    verification: how drafts are verified.
    log_probs: whether to return the log-probability of each token.
    num_top_log_probs: with log_probs, how many of the most probable tokens to return at each
        position. prompt_log_probs: return the same for the tokens of the prompt.
    is_guided: whether the text follows a grammar, which the engine has.
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
    num_top_log_probs: int = 0
    prompt_log_probs: bool = False
    is_guided: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty makes logits depend on earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def shapes_logits(self) -> bool:
        """Whether logits may be changed before temperature and truncation."""
        may_ban = self.logit_bias or self.bad_words or (self.min_tokens and self.end_tokens)
        return bool(self.counts_tokens or may_ban or self.is_guided)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether each token is the most probable one by the model's unchanged logits."""
        return self.is_greedy and not self.shapes_logits

    def num_before_end(self, tokens: Sequence[int]) -> int:
        """Number of tokens before the first end token; all of them if there is no end token."""
        for index, token in enumerate(tokens):
            if token in self.end_tokens:
                return index
        return len(tokens)


class DraftOption(NamedTuple):
    """One method of drafting for a sequence.

    max_draft_len: largest useful draft length in this step. It is the minimum of the limits of the
        request, engine and proposer, and of the tokens left before max_tokens and the context
        limit. For a tree, its largest number of nodes.
    accept_probs: for each position up to max_draft_len, the estimated probability that the draft
        is accepted, given that all earlier drafts of the step were accepted. For a tree, products
        of the first n are the probability of the path to node n; see `core.plan.trees`. An array is
        faster to read than a tuple.
    draft_prefill_len: tokens that the proposer must process before it can propose. 0 if its cache
        is up to date, or if it processes the few missing tokens as part of drafting.
    has_draft_passes: whether drafting runs passes of a draft model. Prompt lookup runs none.
    draft_s: seconds of drafting in addition to draft passes, the same for any draft length.
    proposer: its name; empty if there is none. The planner does not use it.
    depth: of a tree, its longest path, which is also its number of draft passes with any number of
        nodes. 0 for a chain, which takes one pass for each draft.
    """

    max_draft_len: int
    accept_probs: Sequence[float] | NDArray[np.float64]
    draft_prefill_len: int = 0
    has_draft_passes: bool = True
    draft_s: float = 0.0
    proposer: str = ""
    depth: int = 0


@dataclass(slots=True)
class SequenceView:
    """The input of a policy for one sequence that is ready for its next step.

    context_len: tokens of the prompt and generated tokens so far.
    remaining: tokens that the request is expected to generate from now on.
    policy: name of the request's policy.
    options: the methods of drafting for it, at least one. A policy that does not choose between
        methods uses the first.
    slo_s_per_token: latency target, in seconds per generated token on average; None if the request
        has no target.
    slack_s: seconds by which the request is ahead of its latency target; negative if it is behind.
        It is slo_s_per_token times the tokens after the first, minus the time since the first.
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
    """The decision for one step, with its expected result.

    draft_lens: draft length of each sequence that is ready; 0 is no speculation. For a tree, its
        number of nodes.
    expected_tokens: tokens that the step is expected to generate; 0.0 if no sequence is ready.
    expected_s: expected seconds of its decoding part; 0.0 if no sequence is ready.
    choices: for each sequence, the index into `SequenceView.options` that it drafts with. A
        sequence that is missing here uses option 0.
    """

    draft_lens: dict[SequenceId, int] = field(default_factory=dict)
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    choices: dict[SequenceId, int] = field(default_factory=dict)

    def option(self, view: SequenceView) -> DraftOption:
        """The drafting method of a sequence, used if its draft length is not 0."""
        return view.options[self.choices.get(view.sequence, 0)]

    @property
    def goodput(self) -> float:
        """Expected generated tokens per second; 0.0 for an empty plan."""
        return self.expected_tokens / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of one step, as input of the learners. Times are in seconds.

    batch_size: sequences that decoded.
    num_tokens: their tokens in the target pass, with drafts and padding.
    context_len: mean context length per row, in tokens.
    num_generated: tokens that were added to requests.
    draft_rows: number of rows of each draft pass; empty if no draft pass ran, as with prompt
        lookup.
    target_s: duration of the target pass, prompt chunks included.
    draft_s: total duration of the draft passes, draft prefill included.
    num_drafting: sequences with drafts.
    fixed_draft_s: duration of drafting without draft passes, as by heads. Plans charge it as
        `DraftOption.draft_s`, so it is neither host time nor that of draft passes.
    total_s: duration of the whole step.
    plan_s: part of total_s that making the views and choosing draft lengths took.
    num_prefill_tokens: prompt tokens in the same target pass.
    num_draft_prefill_tokens: tokens that outdated draft caches had to process first.
    is_warm: whether the target pass needed no preparation for its number of tokens.
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
    num_drafting: int = 0
    fixed_draft_s: float = 0.0
    num_prefill_tokens: int = 0
    num_draft_prefill_tokens: int = 0
    is_warm: bool = True

    @property
    def is_speculating(self) -> bool:
        return self.num_tokens > self.batch_size

    @property
    def is_draft_prefill(self) -> bool:
        """Whether draft models only read tokens that they had missed. Such a step shows neither the
        speed with drafts nor that without."""
        return self.num_draft_prefill_tokens > 0 and not self.is_speculating

    @property
    def host_s(self) -> float:
        """Duration of the step without its passes and drafts."""
        return max(0.0, self.total_s - self.target_s - self.draft_s - self.fixed_draft_s)

    @property
    def spent_s(self) -> float:
        """Duration of the step for comparisons with a server that never speculates. If nothing
        was drafted, it excludes the planning time, because such a server does not plan."""
        return self.total_s if self.is_speculating else self.total_s - self.plan_s
