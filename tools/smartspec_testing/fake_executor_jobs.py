"""What the executor's fake is made for, and a request inside of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from smartspec_testing.fake_executor_blocks import Allocation
from smartspec_testing.fake_executor_values import FinishReason, Request


@dataclass(frozen=True)
class EngineLimits:
    """What an engine directory is built for: the flags of `trtllm-build` of the same names.

    max_num_tokens: tokens of one iteration, all requests together. num_blocks: of the KV cache,
    which is no flag; None holds max_batch_size requests of max_seq_len, and `KvCacheConfig.
    max_tokens` lowers it.
    """

    max_batch_size: int = 16
    max_num_tokens: int = 8192
    max_input_len: int = 4096
    max_seq_len: int = 4096
    max_draft_len: int = 8
    vocab_size: int = 1000
    tokens_per_block: int = 32
    num_blocks: int | None = None


@dataclass(frozen=True)
class Behaviour:
    """Points in which the real executor is not known; `smartspec doctor` asks it about each.

    charges_reused_tokens: whether cached tokens count against max_num_tokens.
    keeps_blocks_after_cancel: whether a cancelled request's blocks can be reused.
    finish_of_full_acceptance: where max_tokens is k + 1 and all k drafts are accepted.
    fills_specdec_stats: whether the iteration statistics count drafts.
    lags_latency: whether an entry of the iteration statistics has the latency of the iteration
    before; if not, each iteration has one entry with its own latency, before its responses.
    processes_all_positions: whether a logits post-processor sees all positions of a verification,
    or the first alone.
    sampled_logits: the two logits of a distribution, on the token of the rule and on the one after
    it, from which requests that sample draw; None: they follow the rule.
    redraws_after_mismatch: without draft logits, a rejected draft may be drawn again.
    tempers_draft_logits: draft logits are divided by the request's temperature.
    """

    charges_reused_tokens: bool = True
    keeps_blocks_after_cancel: bool = False
    finish_of_full_acceptance: FinishReason = FinishReason.LENGTH
    fills_specdec_stats: bool = False
    lags_latency: bool = True
    processes_all_positions: bool = False
    sampled_logits: tuple[float, float] | None = None
    redraws_after_mismatch: bool = True
    tempers_draft_logits: bool = False


@dataclass(eq=False)
class Job:
    """A request inside the executor. It is waiting until its context step, then generating.

    tokens: all of its text, from its input on. num_read: of its input, those that context steps
    were charged for. is_chunked: whether the context took more than one step.
    *_s: seconds on the executor's clock; first_iter: the number of its first iteration.
    """

    request_id: int
    request: Request
    drafts: list[int]
    max_tokens: int
    text_key: int
    tokens: list[int]
    arrival_s: float
    held: Allocation | None = None
    num_read: int = 0
    is_chunked: bool = False
    num_iterations: int = 0
    num_accepted: int = 0
    first_iter: int | None = None
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    log_probs: list[float] = field(default_factory=list)

    @property
    def num_input(self) -> int:
        return len(self.request.input_token_ids)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_input :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_input

    @property
    def context_charge(self) -> int:
        """Tokens that the context counts against max_num_tokens."""
        return self.num_input + len(self.drafts)

    @property
    def num_reserved(self) -> int:
        """Tokens that it may come to hold."""
        return self.num_input + len(self.drafts) + self.max_tokens

    @property
    def has_read_all(self) -> bool:
        return self.num_read >= self.num_input

    @property
    def computed(self) -> list[int]:
        """Tokens whose keys and values are in the cache: the last one drawn was never read."""
        return self.tokens[:-1] if self.num_generated else self.tokens[: self.num_read]

    def mark_scheduled(self, iteration: int, now_s: float) -> None:
        """At the first step of its context; later calls change nothing."""
        if self.first_iter is None:
            self.first_iter, self.scheduled_s = iteration, now_s
