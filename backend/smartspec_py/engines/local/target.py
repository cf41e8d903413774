"""The target of PyTorch and OpenVINO: each poll runs one packed pass over all submitted work.

Start reading at `poll`. It runs one target pass over all work and verifies all requested positions.
For each sequence it returns the accepted drafts and one more token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from smartspec_py.core.types import PromptLogProbs, SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Decode,
    Event,
    Failure,
    Prefill,
    SequenceStart,
    Target,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.cache.blocks import Memory, Table
from smartspec_py.engines.cache.cached_model import CachedModel, CachedSequence, history_of
from smartspec_py.engines.decoding.sampling import (
    NOT_FINITE,
    VerifyRequest,
    VerifyResult,
    token_log_probs,
    verify,
)
from smartspec_py.engines.device import Moment
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.host_time import Cause, HostTime
from smartspec_py.engines.runtimes.runner import RowInput, Runner
from smartspec_py.faults import ENDS, sentence

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _TargetSequence(CachedSequence):
    """tokens: all known tokens; the first num_prompt are the prompt. After the prefill, the table
    holds all of them but the last. adapter: see `RowInput`. host_time: see `SequenceStart`."""

    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    adapter: int
    host_time: HostTime


@dataclass(frozen=True, slots=True)
class _Item:
    """One work item as a row of the pass. request: what to draw; None inside a prompt. scored: the
    known tokens of a prompt that follow its first logits, if their log-probabilities are wanted."""

    sequence: SequenceId
    row_input: RowInput
    request: VerifyRequest | None
    scored: Sequence[int] = ()


class LocalTarget(CachedModel[_TargetSequence], Target):
    """A Hugging Face causal language model."""

    def __init__(
        self,
        runner: Runner,
        capabilities: TargetCapabilities,
        *,
        reuses_prefixes: bool = True,
        memory: Memory | None = None,
    ) -> None:
        most = capabilities.max_sequences
        super().__init__(runner, most, reuses_prefixes=reuses_prefixes, memory=memory)
        self.capabilities = capabilities
        self._pending: list[Work] = []

    @property
    def warm_shapes(self) -> Collection[int]:
        return self.runner.warm_shapes

    def begin(self, start: SequenceStart) -> int:
        sequence, sampling, num_prompt = start.sequence, start.sampling, start.num_prompt
        known = list(start.tokens)
        history = history_of(start)
        if history is not None:
            history.extend(known)
        adapter = self.runner.config.adapters.index(start.adapter)
        # The last that can fail: a table has an owner.
        table = self._allocate(start, known)
        self._sequences[sequence] = _TargetSequence(
            table,
            history,
            tokens=known,
            num_prompt=num_prompt,
            sampling=sampling,
            adapter=adapter,
            host_time=start.host_time or HostTime(),
        )
        return table.num_cached

    def table(self, sequence: SequenceId) -> Table:
        """The blocks of the sequence."""
        return self._sequences[sequence].table

    def find_more(self, sequence: SequenceId) -> int:
        return self.pool.find_more(sequence)

    def num_shared_tokens(self, gone: Collection[SequenceId] = ()) -> int:
        return self.pool.num_shared_without(gone) * self.pool.block_len

    def num_common(
        self,
        tokens: Sequence[int],
        num_prompt: int,
        adapter: str,
        gone: Collection[SequenceId] = (),
    ) -> int:
        return self.pool.num_common(tokens, num_prompt, adapter, gone)

    def submit(self, work: Sequence[Work]) -> None:
        self._pending.extend(work)

    def poll(self, timeout_s: float) -> list[Event]:
        work, self._pending = self._pending, []
        return self._run(work) if work else []

    def _run(self, work: Sequence[Work]) -> list[Event]:
        """Run one pass over the work, and one more over sequences whose drafts overflow. Its time
        starts when the device has finished the drafts. An exception outside of the pass fails the
        sequence that it concerns."""
        device = self.runner.config.device
        start = Moment(device)
        made = [(one.sequence, self._alone(one.sequence, self._item, one)) for one in work]
        events = [
            Event(sequence, failure=why) for sequence, why in made if isinstance(why, Failure)
        ]
        items = [item for _, item in made if isinstance(item, _Item)]
        if not items:
            return events
        drafts = [item.request.draft.on_device for item in items if item.request]
        unknown = [tokens for tokens in drafts if tokens is not None]
        token_ids = torch.cat(unknown) if unknown else None
        out = self.runner.forward([item.row_input for item in items], token_ids)
        logits, scores = self._score_prompts(out.logits, items)
        verified = _verified(logits, [item.request for item in items if item.request])
        self._move_keys([item for item in items if item.request], verified)
        results = iter(verified)
        pass_s = start.seconds_until(Moment(device))
        states_of: Sequence[torch.Tensor | None] = out.states or [None] * len(items)
        overflowed = []
        for item, states in zip(items, states_of, strict=True):
            result = next(results) if item.request else None
            if self._draft_overflows(item, result):
                overflowed.append(item)
                continue
            scored = scores.get(item.sequence)
            done = self._alone(item.sequence, self._settle, item, result, pass_s, states, scored)
            if isinstance(done, Failure):
                done = Event(item.sequence, failure=done)
            events.append(done)
        return events + self._run_without_drafts(overflowed)

    def _draft_overflows(self, item: _Item, result: VerifyResult | None) -> bool:
        """Whether a draft may have made all logits of the row NaN, also those before it."""
        if result is None or result.failure is not NOT_FINITE or item.request is None:
            return False
        return bool(item.request.draft.tokens) and self.runner.cache.spreads_nan

    def _run_without_drafts(self, items: Sequence[_Item]) -> list[Event]:
        """Run work again whose drafts overflow. It verifies none of them, because the draft that
        overflows may not be the first."""
        if not items:
            return []
        num_drafted = {}
        for item in items:
            table = self._sequences[item.sequence].table
            self.runner.cache.clear([table.row], item.row_input.position)
            num_drafted[item.sequence] = item.request.draft.length if item.request else 0
        events = self._run([Decode(item.sequence, 1) for item in items])
        return [event._replace(num_drafted=num_drafted[event.sequence]) for event in events]

    def _alone(self, sequence: SequenceId, act: Callable[..., T], *arguments: Any) -> T | Failure:
        """The result of something done for one sequence; or why it has failed."""
        try:
            return act(*arguments)
        except ENDS:
            raise
        except BaseException as error:
            logger.exception("sequence %d fails", sequence)
            self.pool.forget(self._sequences[sequence].table)
            return Failure(sentence(error))

    def cancel(self, sequence: SequenceId) -> None:
        """Does nothing: work in flight ends with the next poll."""

    def release(self, sequence: SequenceId) -> None:
        del self._sequences[sequence]
        self._free(sequence)

    def _item(self, work: Work) -> _Item:
        return self._prompt(work) if isinstance(work, Prefill) else self._decoding(work)

    def _prompt(self, work: Prefill) -> _Item:
        state = self._sequences[work.sequence]
        table, sampling = state.table, state.sampling
        assert work.start == table.num_cached, f"a chunk at {work.start} of {table.num_cached}"
        num, end = len(work.tokens), work.start + len(work.tokens)
        scored = state.tokens[work.start + 1 : end + 1] if sampling.prompt_log_probs else []
        num_prompt = max(0, min(num, state.num_prompt - work.start))
        read = self._row_input(
            table,
            work.start,
            work.tokens,
            num_logits=len(scored) + int(work.is_last),
            num_prompt=num_prompt,
            adapter=state.adapter,
        )
        request = VerifyRequest(sampling, end, state.history) if work.is_last else None
        return _Item(work.sequence, read, request, scored=scored)

    def _decoding(self, work: Verify | Decode) -> _Item:
        state = self._sequences[work.sequence]
        draft = self._known(work.draft) if isinstance(work, Verify) else NO_DRAFT
        tokens, first = (state.tokens[-1], *draft.tokens), state.table.num_cached
        read = self._row_input(
            state.table,
            first,
            tokens,
            num_logits=len(tokens),
            tree=draft.tree,
            adapter=state.adapter,
        )
        request = VerifyRequest(state.sampling, first + 1, state.history, draft)
        return _Item(work.sequence, read, request)

    def _known(self, draft: Draft) -> Draft:
        """The draft with its tokens on the host, if the target needs them there."""
        if draft.on_device is None or self.runner.is_asynchronous:
            return draft
        return draft._replace(tokens=tuple(draft.on_device.tolist()), on_device=None)

    def _move_keys(self, items: Sequence[_Item], results: Sequence[VerifyResult]) -> None:
        """Move the keys of accepted tokens of trees to where those of a chain are, for all rows
        together."""
        moves = []
        for item, result in zip(items, results, strict=True):
            if item.row_input.tree:
                read = item.row_input
                first = read.row * self.runner.config.max_len + read.position
                pairs = enumerate(result.nodes)
                moves += [(first + node, first + place) for place, node in pairs if node != place]
        if moves:
            self.runner.move_keys(*zip(*moves, strict=True))

    def _fail(self, sequence: SequenceId, failure: Failure | None) -> Event:
        if failure is NOT_FINITE:
            table = self._sequences[sequence].table
            self.runner.cache.clear(table.own.tolist())
            self.pool.forget(table)
            logger.error("sequence %d: %s", sequence, failure.reason)
        return Event(sequence, failure=failure)

    def _score_prompts(
        self, logits: torch.Tensor, items: Sequence[_Item]
    ) -> tuple[torch.Tensor, dict[SequenceId, PromptLogProbs | Failure]]:
        """The logits that tokens are drawn from, and the log-probabilities of parts of prompts."""
        if not any(item.scored for item in items):
            return logits, {}
        kept, scores, first = [], dict[SequenceId, PromptLogProbs | Failure](), 0
        for item in items:
            last, num_scored = first + item.row_input.num_logits, len(item.scored)
            if num_scored:
                of_item = logits[first:last]
                scores[item.sequence] = self._alone(item.sequence, self._scored, item, of_item)
            kept.append(logits[first + num_scored : last])
            first = last
        return torch.cat(kept), scores

    def _scored(self, item: _Item, logits: torch.Tensor) -> PromptLogProbs:
        read, num_scored = item.row_input, len(item.scored)
        state = self._sequences[item.sequence]
        num_top = [state.sampling.num_top_log_probs] * num_scored
        values = state.host_time.of(
            Cause.LOG_PROBS, token_log_probs, logits[:num_scored], item.scored, num_top
        )
        return PromptLogProbs(read.position + len(read.tokens) - read.num_logits + 1, tuple(values))

    def _settle(
        self,
        item: _Item,
        result: VerifyResult | None,
        pass_s: float,
        states: torch.Tensor | None,
        scored: PromptLogProbs | Failure | None,
    ) -> Event:
        """Update the sequence with the result. After a verification, the row also holds the last
        known token and the accepted drafts. After a prompt chunk, it holds the whole chunk.

        states: of the item's tokens, for its proposers. scored: the log-probabilities of a prompt,
        or why there are none.
        """
        if isinstance(scored, Failure):
            return self._fail(item.sequence, scored)
        hidden = None if states is None else _reported(states, item, result)
        state = self._sequences[item.sequence]
        end = item.row_input.position + len(item.row_input.tokens)
        if result is None or item.request is None:
            state.table.num_cached = end
            return Event(item.sequence, pass_s=pass_s, hidden=hidden, prompt_log_probs=scored)
        if result.failure is not None:
            return self._fail(item.sequence, result.failure)
        draft = item.request.draft
        state.table.num_cached = end - len(draft.tokens) + result.num_accepted
        state.tokens.extend(result.tokens)
        if state.history is not None:
            state.history.extend(result.tokens)
        return Event(
            sequence=item.sequence,
            tokens=result.tokens,
            num_drafted=draft.length,
            num_accepted=result.num_accepted,
            pass_s=pass_s,
            log_probs=result.log_probs,
            hidden=hidden,
            prompt_log_probs=scored,
        )


def _verified(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    """`verify`. If all together fail, each request is verified alone, to find the one that fails.
    This gives the same results: a request's tokens depend on its own rows only."""
    try:
        return verify(logits, requests)
    except ENDS:
        raise
    except BaseException:
        logger.exception("the verification of all together failed")
    results, first = [], 0
    for request in requests:
        last = first + request.num_rows
        try:
            results += verify(logits[first:last], [request])
        except ENDS:
            raise
        except BaseException as error:
            results.append(VerifyResult((), failure=Failure(sentence(error))))
        first = last
    return results


def _reported(
    states: torch.Tensor, item: _Item, result: VerifyResult | None
) -> torch.Tensor | None:
    """Those of the item's states that the proposers get: of tokens that are new and final. None if
    there are none."""
    if item.request is not None and item.request.draft.tokens and result is not None:
        if item.request.draft.tree:
            return states[list(result.nodes)]
        return states[: result.num_accepted + 1]
    return states if len(states) else None
