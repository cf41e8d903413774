"""Engines of the simulator. They count tokens but do not compute them.

All tokens are placeholders. A draft token is the number of its proposer, which selects the runs
that the target applies. All other tokens are 0. One poll runs one packed pass over all submitted
work, as in the local engine. Verifications, single tokens and prompt chunks share the pass. On
the virtual clock it takes, in seconds,

    target_s(rows, tokens, mean context of the rows)  +  prefill_s(prompt tokens)  +  host_s
    +  shape_change_s if the previous pass had another number of tokens

The first term counts decoding rows and their tokens, or one row and one token if none decodes. A
cost model without prompt costs counts prompt chunks as normal rows and tokens. The decode bursts of
TensorRT-LLM are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import FinishReason, SequenceId
from smartspec_py.engines.base import (
    Event,
    Grammar,
    Prefill,
    SequenceStart,
    Target,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.proposer import SHORT_PREFILL, DraftTask, Proposer, ProposerCapabilities
from smartspec_sim.acceptance import NO_DRAFT, Runs, num_accepted
from smartspec_testing.clock import VirtualClock

PROPOSERS = (DRAFT_MODEL, PROMPT_LOOKUP)
PLACEHOLDER = 0
VOCAB_SIZE = len(PROPOSERS)


class SimText(Protocol):
    """The properties of a request's text that the engines use. runs: by proposer; a proposer that
    is missing does not draft for this request."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def output_len(self) -> int: ...

    @property
    def runs(self) -> Mapping[str, Runs]: ...


class SimTarget(Target):
    """A target engine that only counts tokens. texts: by sequence; read at each verification.

    busy_s: virtual seconds inside passes.
    """

    def __init__(
        self,
        capabilities: TargetCapabilities,
        cost: CostModel,
        clock: VirtualClock,
        texts: Mapping[SequenceId, SimText],
    ) -> None:
        self.capabilities = capabilities
        self._cost = cost
        self._clock = clock
        self._texts = texts
        self._num_known: dict[SequenceId, int] = {}  # prompt and generated tokens
        self._work: list[Work] = []
        self._warm: tuple[int, ...] = ()
        self.busy_s = 0.0

    @property
    def warm_shapes(self) -> tuple[int, ...]:
        return self._warm

    @property
    def num_sequences(self) -> int:
        return len(self._num_known)

    def begin(self, start: SequenceStart) -> int:
        assert start.sequence not in self._num_known, f"{start.sequence} has begun already"
        self._num_known[start.sequence] = len(start.tokens)
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        assert not self._work, "a pass was not polled"
        self._work = list(work)

    def poll(self, timeout_s: float) -> list[Event]:
        work, self._work = self._work, []
        if not work:
            return []
        pass_s = self._pass_s(work)
        self._clock.sleep(pass_s + self._cost.host_s)
        self.busy_s += pass_s
        return [self._event(item, pass_s) for item in work]

    def _pass_s(self, work: Sequence[Work]) -> float:
        batch_size = num_tokens = context = num_prompt = prompt_context = 0
        for item in work:
            if isinstance(item, Prefill):
                num_prompt += len(item.tokens)
                prompt_context += item.start
                continue
            batch_size += 1
            num_tokens += 1
            context += self._num_known[item.sequence]
            if isinstance(item, Verify):
                num_tokens += len(item.draft.tokens)
        cost, is_warm = self._cost, num_tokens + num_prompt in self._warm
        self._warm = (num_tokens + num_prompt,)
        if cost.prompt is None:
            batch_size, num_tokens = len(work), num_tokens + num_prompt
            context, num_prompt = context + prompt_context, 0
        rows = max(1, batch_size)
        pass_s = cost.target_s(rows, max(1, num_tokens), context / rows)
        if num_prompt:
            pass_s += cost.prefill_s(num_prompt)
        return pass_s if is_warm else pass_s + cost.shape_change_s

    def _event(self, item: Work, pass_s: float) -> Event:
        """Passes arguments by position, because keyword arguments take 1.5 times as long and this
        method is called most often."""
        sequence = item.sequence
        if isinstance(item, Prefill) and not item.is_last:
            return Event(sequence, pass_s=pass_s)
        num_drafted = num_kept = 0
        text = self._texts[sequence]
        num_generated = self._num_known[sequence] - text.prompt_len
        if isinstance(item, Verify):
            num_drafted = len(item.draft.tokens)
            runs = text.runs[PROPOSERS[item.draft.tokens[0]]]
            num_kept = num_accepted(runs, num_generated, num_drafted)
        num, finish = num_kept + 1, None
        if num >= text.output_len - num_generated:
            num, finish = text.output_len - num_generated, FinishReason.STOP
        self._num_known[sequence] += num
        tokens = repeated(PLACEHOLDER, num)
        return Event(sequence, tokens, num_drafted, num_kept, True, finish, pass_s)

    def cancel(self, sequence: SequenceId) -> None:
        """Does nothing: no work is in flight between two steps."""

    def release(self, sequence: SequenceId) -> None:
        del self._num_known[sequence]

    def close(self) -> None:
        self._num_known.clear()


class SimProposer(Proposer):
    """Drafts the requested number of tokens. The target determines which are accepted.

    Each pass of the draft model takes `draft_s`. Sequences with a draft prefill above SHORT_PREFILL
    share one more pass, and each of its tokens takes `draft_prefill_s`. Of these, it reads
    `max_prefill_len` in a step, as in a draft model. Prompt lookup takes no time.
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
        self._has_passes = name == DRAFT_MODEL
        self._name = name
        self._texts = texts
        self.capabilities = ProposerCapabilities(max_draft_len, self._has_passes, bytes_per_token)
        self._cost = cost
        self._clock = clock
        self._num_computed_tokens: dict[SequenceId, int] = {}
        self._last_task: dict[SequenceId, tuple[int, int]] = {}  # known tokens, drafts

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        text = self._texts[sequence]
        position, runs = len(tokens) - text.prompt_len, text.runs.get(self._name, ())
        is_paused = position < len(runs) and runs[position] == NO_DRAFT
        has_drafts = self._has_passes or (self._name in text.runs and not is_paused)
        return self.capabilities.max_draft_len if has_drafts else 0

    def counterfactual(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """See `Proposer`."""
        if self._has_passes or not self.num_available(sequence, tokens):
            return 0, 0
        text, num = self._texts[sequence], min(len(generated), self.capabilities.max_draft_len)
        return num, num_accepted(text.runs[self._name], len(tokens) - text.prompt_len, num)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        number, waiting = PROPOSERS.index(self._name), set[SequenceId]()
        if self._has_passes:
            reads, waiting = self._read_chunk(tasks)
            able = [task for task in tasks if task.sequence not in waiting]
            self._clock.sleep(drafting_s(self._cost, [task.draft_len for task in able], reads))
            for task in able:
                known = len(task.tokens)
                self._num_computed_tokens[task.sequence] = known
                self._last_task[task.sequence] = (known, task.draft_len)
        return [
            Draft(() if task.sequence in waiting else repeated(number, task.draft_len))
            for task in tasks
        ]

    def _read_chunk(self, tasks: Sequence[DraftTask]) -> tuple[list[int], set[SequenceId]]:
        """Read up to `max_prefill_len` missed tokens, of those first that lack the fewest. Returns
        how many of each sequence that has any, and the sequences that still lack some."""
        missed = [(self.draft_prefill_len(t.sequence, len(t.tokens)), t.sequence) for t in tasks]
        reads, waiting, left = list[int](), set[SequenceId](), self.max_prefill_len
        for num, sequence in sorted(missed):
            read = min(num, left) if num > SHORT_PREFILL else 0
            if num - read > SHORT_PREFILL:
                waiting.add(sequence)
                computed = self._num_computed_tokens.get(sequence, 0)
                self._num_computed_tokens[sequence] = computed + read
            reads += [read] if read else []
            left -= read
        return reads, waiting

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        if (task := self._last_task.get(sequence)) is not None:
            num_known, num_drafted = task
            # The draft model never computed the last draft it proposed.
            self._num_computed_tokens[sequence] = num_known + min(num_accepted, num_drafted - 1)

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        """As in a draft model: the first draft pass itself computes the last known token."""
        missed = context_len - 1 - self._num_computed_tokens.get(sequence, 0)
        return missed if missed > 0 and self._has_passes else 0

    def release(self, sequence: SequenceId) -> None:
        self._num_computed_tokens.pop(sequence, None)
        self._last_task.pop(sequence, None)

    def close(self) -> None:
        self._num_computed_tokens.clear()


def drafting_s(cost: CostModel, draft_lens: Sequence[int], prefill_lens: Sequence[int]) -> float:
    """Seconds of the draft passes for these sequences, including draft prefill."""
    # Pass p has one row per sequence with at least p drafts.
    passes_s = sum(
        cost.draft_s(sum(length >= p for length in draft_lens))
        for p in range(1, max(draft_lens, default=0) + 1)
    )
    late = [length for length in prefill_lens if length > SHORT_PREFILL]
    return passes_s + cost.draft_s(len(late)) + cost.draft_prefill_s * sum(late)


@lru_cache(maxsize=1024)
def repeated(token: int, num_tokens: int) -> tuple[int, ...]:
    return (token,) * num_tokens
