"""Engines of the simulator. They count tokens but do not compute them.

All tokens are placeholders. A draft token is the number of its proposer, which selects the
acceptance that the target applies. All other tokens are 0. One poll runs one packed pass over all
submitted work, as in the PyTorch engine. Verifications, single tokens and prompt chunks share the
pass. On the virtual clock it takes, in seconds,

    target_s(rows, tokens, mean context of the rows)  +  prefill_s(prompt tokens)  +  host_s(rows)

The first term counts decoding rows and their tokens, or one row and one token if none decodes. A
cost model without prompt costs counts prompt chunks as normal rows and tokens. The decode bursts of
TensorRT-LLM are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from smartspec_py.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import (
    SHORT_LAG,
    Draft,
    DraftTask,
    Event,
    Prefill,
    ProposerCapabilities,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_sim.acceptance import DraftRuns
from smartspec_testing.clock import VirtualClock

PROPOSERS = (DRAFT_MODEL, PROMPT_LOOKUP)
PLACEHOLDER = 0
ONE = (PLACEHOLDER,)


class SimText(Protocol):
    """The properties of a request's text that the engines use. acceptances: of
    `PROPOSERS`; None for a proposer that does not draft for this request."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def acceptances(self) -> Sequence[DraftRuns | None]: ...


class _State:
    """num_known: prompt and generated tokens of the sequence. num_prompt: prompt tokens."""

    __slots__ = ("num_known", "num_prompt")

    def __init__(self, num_known: int, num_prompt: int) -> None:
        self.num_known = num_known
        self.num_prompt = num_prompt


def sim_capabilities(
    batch_size: int,
    longest: int,
    max_draft_len: int,
    max_prefill_tokens: int | None = None,
    bytes_per_token: int = 0,
) -> TargetCapabilities:
    """longest: maximum tokens of a sequence. max_prefill_tokens: None means `longest`."""
    return TargetCapabilities(
        max_sequences=batch_size,
        max_context_len=longest,
        max_draft_len=max_draft_len,
        max_decode_tokens=1,
        max_prefill_tokens=max_prefill_tokens or longest,
        verifies_sampling=True,
        vocab_size=PLACEHOLDER + 1,
        bytes_per_token=bytes_per_token,
    )


class SimTarget:
    """A target engine that only counts tokens. texts: by sequence; read at each verification."""

    def __init__(
        self,
        capabilities: TargetCapabilities,
        cost: CostModel,
        clock: VirtualClock,
        texts: Mapping[SequenceId, SimText],
    ) -> None:
        self._capabilities = capabilities
        self._cost = cost
        self._clock = clock
        self._texts = texts
        self._held: dict[SequenceId, _State] = {}
        self._work: list[Work] = []
        self._last_num_tokens = 0
        self.num_passes = 0
        self.busy_s = 0.0

    def set_cost(self, cost: CostModel) -> None:
        """Use this cost model from the next pass on."""
        self._cost = cost

    @property
    def capabilities(self) -> TargetCapabilities:
        return self._capabilities

    @property
    def num_sequences(self) -> int:
        return len(self._held)

    def begin(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        sampling: SamplingParams,
        reuses_prefix: bool = True,
    ) -> int:
        assert sequence not in self._held, f"sequence {sequence} has begun already"
        self._held[sequence] = _State(len(tokens), num_prompt)
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        assert not self._work, "a pass was not polled"
        self._work = list(work)

    def poll(self, timeout_s: float) -> list[Event]:
        work, self._work = self._work, []
        if not work:
            return []
        pass_s = self._pass_s(work)
        self._clock.sleep(pass_s + self._cost.step_host_s(len(work)))
        self.num_passes += 1
        self.busy_s += pass_s
        return [self._event(item, pass_s) for item in work]

    def _pass_s(self, work: Sequence[Work]) -> float:
        batch_size = num_tokens = context = num_prompt = prompt_context = 0
        held = self._held
        for item in work:
            if isinstance(item, Prefill):
                num_prompt += len(item.tokens)
                prompt_context += item.start
                continue
            batch_size += 1
            num_tokens += 1
            context += held[item.sequence].num_known
            if isinstance(item, Verify):
                num_tokens += len(item.drafts)
        cost, is_repeat = self._cost, num_tokens + num_prompt == self._last_num_tokens
        self._last_num_tokens = num_tokens + num_prompt
        rows = len(work) if num_prompt and cost.prompt is None else max(1, batch_size)
        extra_s = 0.0 if is_repeat else cost.change_s(rows)
        if num_prompt == 0:
            return extra_s + cost.target_s(batch_size, num_tokens, context / batch_size)
        if cost.prompt is None:
            mean = (context + prompt_context) / len(work)
            return extra_s + cost.target_s(rows, num_tokens + num_prompt, mean)
        # A pass with only prompts has the base cost of decoding one token of one row.
        alone_s = cost.target_s(rows, max(1, num_tokens), context / rows)
        return extra_s + alone_s + cost.prefill_s(num_prompt)

    def _event(self, item: Work, pass_s: float) -> Event:
        """Passes arguments by position, because keyword arguments take 1.5 times as long and this
        method is called most often."""
        sequence = item.sequence
        if isinstance(item, Verify):
            state, num_drafted = self._held[sequence], len(item.drafts)
            position = state.num_known - state.num_prompt
            acceptance = self._texts[sequence].acceptances[item.drafts[0]]
            assert acceptance is not None, "the request has no acceptance for this proposer"
            kept = acceptance.accepted(position, num_drafted)
            state.num_known += kept + 1
            return Event(sequence, placeholders(kept + 1), num_drafted, kept, True, None, pass_s)
        if isinstance(item, Prefill) and not item.is_last:
            return Event(sequence, pass_s=pass_s)
        self._held[sequence].num_known += 1
        return Event(sequence, ONE, 0, 0, True, None, pass_s)

    def cancel(self, sequence: SequenceId) -> None:
        """Does nothing: no work is in flight between two steps."""

    def release(self, sequence: SequenceId) -> None:
        del self._held[sequence]

    def close(self) -> None:
        self._held.clear()


class SimProposer:
    """Drafts the requested number of placeholders. The target determines which are accepted.

    Each pass of the draft model takes `draft_s`. Sequences with a draft lag above SHORT_LAG share
    one more pass, and each token of their lag takes `catch_up_s`. Prompt lookup takes no time, and
    the text limits its number of drafts.
    """

    def __init__(
        self,
        name: str,
        texts: Mapping[SequenceId, SimText],
        max_draft_len: int,
        cost: CostModel,
        clock: VirtualClock,
        bytes_per_token: int = 0,
    ) -> None:
        """name: one of `PROPOSERS`."""
        has_passes = name == DRAFT_MODEL
        self._number = PROPOSERS.index(name)
        self._texts = texts
        self._capabilities = ProposerCapabilities(
            max_draft_len, has_passes, bytes_per_token, has_hindsight=not has_passes
        )
        self._has_passes = has_passes
        self._cost = cost
        self._clock = clock
        self._num_computed_tokens: dict[SequenceId, int] = {}
        self._last_task: dict[SequenceId, tuple[int, int]] = {}  # known tokens, drafts

    def set_cost(self, cost: CostModel) -> None:
        """Use this cost model from the next pass on."""
        self._cost = cost

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    @property
    def num_sequences(self) -> int:
        return len(self._num_computed_tokens)

    def num_available(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        most = self._capabilities.max_draft_len
        if self._has_passes:
            return most
        text = self._texts[sequence]
        acceptance = text.acceptances[self._number]
        return min(most, acceptance.available(len(tokens) - text.prompt_len)) if acceptance else 0

    def hindsight(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """See `HindsightProposer`."""
        num = min(len(generated), self.num_available(sequence, tokens))
        acceptance = self._texts[sequence].acceptances[self._number]
        if acceptance is None:
            return 0, 0
        return num, acceptance.accepted(len(tokens) - self._texts[sequence].prompt_len, num)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        if self._has_passes:
            lags = [self.draft_lag(task.sequence, len(task.tokens)) for task in tasks]
            self._clock.sleep(drafting_s(self._cost, [task.draft_len for task in tasks], lags))
            for task in tasks:
                known = len(task.tokens)
                self._num_computed_tokens[task.sequence] = known
                self._last_task[task.sequence] = (known, task.draft_len)
        return [_draft(self._number, task.draft_len) for task in tasks]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        if (task := self._last_task.get(sequence)) is not None:
            num_known, num_drafted = task
            # The draft model never computed the last draft it proposed.
            self._num_computed_tokens[sequence] = num_known + min(num_accepted, num_drafted - 1)

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        """Draft lag as in a draft model: the first draft pass itself computes the last known
        token."""
        lag = context_len - 1 - self._num_computed_tokens.get(sequence, 0)
        return lag if lag > 0 and self._has_passes else 0

    def release(self, sequence: SequenceId) -> None:
        self._num_computed_tokens.pop(sequence, None)
        self._last_task.pop(sequence, None)

    def close(self) -> None:
        self._num_computed_tokens.clear()


def drafting_s(cost: CostModel, draft_lens: Sequence[int], lags: Sequence[int]) -> float:
    """Seconds of the draft passes for these sequences, including catch-up."""
    lengths = sorted(draft_lens)
    late = [lag for lag in lags if lag > SHORT_LAG]
    passes_s, begun = 0.0, 0
    for index, length in enumerate(lengths):
        # Passes begun + 1 to `length` have one row per task with at least this draft length.
        if length > begun:
            passes_s += (length - begun) * cost.draft_s(len(lengths) - index)
            begun = length
    return passes_s + cost.draft_s(len(late)) + cost.catch_up_s * sum(late)


@lru_cache(maxsize=1024)
def placeholders(num_tokens: int) -> tuple[int, ...]:
    return (PLACEHOLDER,) * num_tokens


@lru_cache(maxsize=1024)
def _draft(proposer: int, num_tokens: int) -> Draft:
    return Draft((proposer,) * num_tokens)
