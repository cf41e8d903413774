"""A `Target` on TensorRT-LLM's executor. Never run on a GPU; tested with `fake_executor`.

The executor keeps no sequences. Every request brings the whole text as its prompt, and reuse of the
KV cache avoids most of the work. So this file keeps the sequences, and each piece of work is one
request. One call enqueues all requests of a step.

- `Prefill`: all known tokens, max_tokens = 1.
- `Verify`: all tokens and k drafts, max_tokens = k + 1; the executor ends it after one step.
- `Decode`: all tokens, max_tokens of the burst, streaming. Bursts continue while others verify.

A poll waits for the verifications in flight, so that those of one step are measured together. The
pass time is measured here, because the executor's statistics report that of an earlier iteration.

The noise of a request starts with its seed, so the seed is mixed with the position, and sampled
text depends on how it was divided into requests. It has no drafts: without the draft's logits, the
executor accepts with a bias. Log-probabilities are computed here from the model's logits: the
decoding layer for external drafts writes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from operator import eq
from typing import Any

from smartspec_py.core.types import FinishReason, SamplingParams, SequenceId, TokenLogProb
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
from smartspec_py.engines.trtllm.requests import (
    Bindings,
    ExecutorModel,
    bad_words,
    cache_salt,
    embedding_bias,
    num_before_end_allowed,
    sampling_arguments,
)

MAX_LOGITS = 16
"""Tokens of a request that returns their logits. The executor pins host memory for the logits of
all tokens that a request asks for: 128,256 logits take 0.5 MB per token."""


@dataclass(slots=True)
class _TrtllmSequence:
    """tokens: prompt and generated tokens; each request sends all of them. salt: of its cached
    blocks; None if they are shared with sequences that start with the same tokens. bias: see
    `embedding_bias`."""

    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    salt: int | None
    bias: Any

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True)
class _InFlight:
    """num_asked, num_emitted: tokens requested, and returned so far. start_s: when it was enqueued;
    None after the first response."""

    work: Work
    request_id: int
    num_asked: int
    start_s: float | None
    num_emitted: int = 0


class TrtllmTarget(ExecutorModel, Target):
    """Raises KeyError for a sequence that was not begun, and AssertionError for other misuse."""

    def __init__(
        self,
        executor: Any,
        bindings: Bindings,
        capabilities: TargetCapabilities,
        clock: Callable[[], float] = time.monotonic,
        num_logits: int | None = None,
    ) -> None:
        """num_logits: the engine's vocabulary size; by default the one of the capabilities."""
        super().__init__(executor, bindings, capabilities.vocab_size, clock)
        self._with_logits = bindings.OutputConfig(
            exclude_input_from_output=True, return_generation_logits=True
        )
        self._num_logits = num_logits or capabilities.vocab_size
        self.capabilities = capabilities
        self._held: dict[SequenceId, _TrtllmSequence] = {}
        self._in_flight: dict[SequenceId, _InFlight] = {}
        self._sequence_of: dict[int, SequenceId] = {}
        self._refused: list[Event] = []

    def begin(self, start: SequenceStart) -> int:
        """Keep the tokens. Returns 0, because the executor finds cached tokens by itself."""
        self._held[start.sequence] = _TrtllmSequence(
            tokens=list(map(int, start.tokens)),  # the bindings do not convert NumPy integers
            num_prompt=start.num_prompt,
            sampling=start.sampling,
            salt=None if start.reuses_prefix else cache_salt(start.sequence),
            bias=embedding_bias(start.sampling, self._num_logits),
        )
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        """Raises RuntimeError if the executor takes no requests. A request that it cannot run fails
        alone, with an event."""
        if not self._executor.can_enqueue_requests():
            raise RuntimeError("the executor takes no requests")
        made = [(item, request) for item in work if (request := self._made(item)) is not None]
        if not made:
            return
        start_s = self._clock()
        request_ids = self._executor.enqueue_requests([request for _, request in made])
        for (item, request), request_id in zip(made, request_ids, strict=True):
            flight = _InFlight(item, request_id, request.max_tokens, start_s)
            self._in_flight[item.sequence] = flight
            self._sequence_of[request_id] = item.sequence

    def _made(self, work: Work) -> Any:
        """The request for this work. None if the bindings reject it; the next poll reports that."""
        held = self._held[work.sequence]
        assert work.sequence not in self._in_flight, "a sequence has one piece of work at a time"
        assert not isinstance(work, Prefill) or list(work.tokens) == held.tokens, "whole prompts"
        assert not isinstance(work, Verify) or self.capabilities.can_verify(held.sampling)
        try:
            return self._request(work, held)
        except (RuntimeError, TypeError) as error:  # exceptions of the C++ code and of nanobind
            failure = Failure(f"request rejected: {error}")
            self._refused.append(Event(work.sequence, failure=failure))
            return None

    def _request(self, work: Work, sequence: _TrtllmSequence) -> Any:
        bindings, drafts = self._bindings, None
        if isinstance(work, Verify):
            tokens = list(map(int, work.draft.tokens))
            drafts = bindings.ExternalDraftTokensConfig(tokens)
        sampling = sequence.sampling
        ends = sampling.end_tokens
        return bindings.Request(
            sequence.tokens,
            _num_asked(work, sequence),
            streaming=isinstance(work, Decode),
            sampling_config=(
                self._greedy
                if sampling.is_plain_greedy
                else bindings.SamplingConfig(**sampling_arguments(sampling, len(sequence.tokens)))
            ),
            output_config=self._with_logits if sampling.log_probs else self._output,
            end_id=ends[0] if ends else None,  # a request has only one; others are stop words
            bad_words=bad_words(sampling, sequence.num_generated, self._num_logits),
            stop_words=[[token] for token in ends[1:]] or None,
            embedding_bias=sequence.bias,
            external_draft_tokens_config=drafts,
            cache_salt_id=sequence.salt,
        )

    def poll(self, timeout_s: float) -> list[Event]:
        """Events for the responses of the executor, and for each request that it rejected.

        The first event of each work has the seconds since it was enqueued; later events have 0.
        Returns when no verification is in flight, or after timeout_s.
        """
        events, self._refused = self._refused, []
        if not self._in_flight:
            return events
        left_s = 0.0 if events else timeout_s  # do not wait if there is a rejection to report
        until_s = self._clock() + left_s
        while True:
            responses = self._executor.await_responses(timedelta(seconds=left_s))
            now_s = self._clock()
            for response in responses:
                if response.request_id in self._sequence_of:
                    events.append(self._event(response, now_s))
            left_s = until_s - now_s
            works = (flight.work for flight in self._in_flight.values())
            if left_s <= 0.0 or not any(isinstance(work, Verify) for work in works):
                return events

    def _event(self, response: Any, now_s: float) -> Event:
        sequence = self._sequence_of[response.request_id]
        flight, state = self._in_flight[sequence], self._held[sequence]
        if response.has_error():
            self._end_work(flight)
            return Event(sequence, failure=Failure(str(response.error_msg)))
        pass_s = 0.0 if flight.start_s is None else now_s - flight.start_s
        flight.start_s = None
        result = response.result
        reported = tuple(result.output_token_ids[0])
        tokens = reported[: state.sampling.num_before_end(reported)]
        state.tokens.extend(tokens)
        flight.num_emitted += len(tokens)
        if result.is_final:
            self._end_work(flight)
        has_ended = len(tokens) < len(reported)
        finish = FinishReason.STOP if has_ended else self._finish(flight, state, result)
        if finish == FinishReason.STOP and not has_ended:
            reported = (*tokens, *state.sampling.end_tokens[:1])  # the executor omits end_id
        num_drafted, num_accepted = _verification(flight.work, reported)
        log_probs = _log_probs(result, tokens, state.sampling)
        event = Event(
            sequence,
            tokens,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            is_last=result.is_final,
            finish=finish,
            pass_s=pass_s,
        )
        return event._replace(log_probs=log_probs) if log_probs else event

    def _end_work(self, flight: _InFlight) -> None:
        del self._in_flight[flight.work.sequence]
        del self._sequence_of[flight.request_id]

    def _finish(
        self, flight: _InFlight, state: _TrtllmSequence, result: Any
    ) -> FinishReason | None:
        """LENGTH after all requested tokens ends only the work; after fewer, the sequence."""
        reasons, reason = self._bindings.FinishReason, result.finish_reasons[0]
        if reason in (reasons.END_ID, reasons.STOP_WORDS):
            return FinishReason.STOP
        is_cut = reason == reasons.LENGTH and flight.num_emitted < flight.num_asked
        is_full = result.is_final and len(state.tokens) >= self.capabilities.max_context_len
        return FinishReason.LENGTH if is_cut or is_full else None

    def cancel(self, sequence: SequenceId) -> None:
        """Ends the work, not the sequence. Tokens generated so far, and late ones, are kept."""
        if sequence in self._in_flight:
            self._executor.cancel_request(self._in_flight[sequence].request_id)

    def release(self, sequence: SequenceId) -> None:
        """The executor holds nothing between requests. It evicts old cached blocks by itself."""
        assert sequence not in self._in_flight, "it has work in flight"
        del self._held[sequence]


def _num_asked(work: Work, sequence: _TrtllmSequence) -> int:
    """max_tokens of the request for this work. A burst ends where end tokens become allowed, and
    is short if it returns logits."""
    if isinstance(work, Decode):
        num_banned = num_before_end_allowed(sequence.sampling, sequence.num_generated)
        most = MAX_LOGITS if sequence.sampling.log_probs else work.max_tokens
        return min(work.max_tokens, num_banned or most, most)
    return len(work.draft.tokens) + 1 if isinstance(work, Verify) else 1


def _log_probs(
    result: Any, tokens: tuple[int, ...], sampling: SamplingParams
) -> tuple[TokenLogProb, ...]:
    """Log-probabilities by the model's logits, which are [new tokens, 1, vocabulary] with streaming
    and [1, new tokens, vocabulary] without. Empty unless requested."""
    if not sampling.log_probs or not tokens:
        return ()
    logits = result.generation_logits
    rows = logits.reshape(-1, logits.shape[-1])[: len(tokens)].float().log_softmax(dim=-1)
    best = rows.topk(sampling.num_top_log_probs)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogProb(token, float(row[token]), tuple(zip(ids, values, strict=True)))
        for token, row, (ids, values) in zip(tokens, rows, tops, strict=True)
    )


def _verification(work: Work, drawn: tuple[int, ...]) -> tuple[int, int]:
    """num_drafted and num_accepted; both 0 if nothing was verified, as after an early cancel.
    drawn: includes the end token, which counts as accepted if it was drafted."""
    if not isinstance(work, Verify) or not drawn:
        return 0, 0
    return len(work.draft.tokens), sum(takewhile(bool, map(eq, work.draft.tokens, drawn)))
