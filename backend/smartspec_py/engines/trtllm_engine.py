"""A target on TensorRT-LLM's executor, by its external-draft mode.

The executor keeps no sequences: every request is new and brings its whole text as the prompt, of
which the KV cache reuse spares most of the work. So the sequences are kept here, and each piece of
work becomes one request:

- `Prefill`: all tokens that are known, max_tokens = 1.
- `Verify`: all tokens and k drafts, max_tokens = k + 1; the executor ends it after one step.
- `Decode`: all tokens, max_tokens of the burst, streaming.

A request's noise starts with its seed, so equal seeds would draw every request of a sequence from
the same numbers. The seed sent is therefore mixed with the position, and sampled text depends on
how it was cut into requests. At temperature > 0 drafts are accepted with a bias, so none are taken.
Tested against `engines.executor_double`; never run on the real executor by this project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from smartspec_py.core.types import NO_TOKEN, FinishReason, SamplingParams, SequenceId
from smartspec_py.engines.base import Decode, Event, Prefill, TargetCapabilities, Verify, Work

UNSUPPORTED = frozenset(
    {
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "embedding_bias_words",
        "bad_words",
        "min_tokens",
        "return_log_probs",
    }
)
"""Not passed on yet: how the executor counts them over requests that resend all is not known."""


@dataclass(slots=True)
class _Sequence:
    """tokens: prompt and generated; each request brings all of them."""

    tokens: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class _InFlight:
    """A piece of work, the request that carries it out, and how many tokens it has brought."""

    work: Work
    request_id: int
    num_emitted: int = 0


class TrtllmTarget:
    """A `Target` over an executor.

    executor, bindings: a `bindings.Executor`, and the module that it is of:
    `tensorrt_llm.bindings.executor` or its double.
    Misuse raises KeyError for a sequence that is not held, ValueError for the rest.
    """

    def __init__(self, executor: Any, bindings: Any, capabilities: TargetCapabilities) -> None:
        if capabilities.max_prefill_tokens is not None or capabilities.verifies_sampling:
            raise ValueError("the executor takes whole prompts and verifies only greedy text")
        self._executor = executor
        self._bindings = bindings
        self._capabilities = capabilities
        self._held: dict[SequenceId, _Sequence] = {}
        self._in_flight: dict[SequenceId, _InFlight] = {}
        self._sequence_of: dict[int, SequenceId] = {}
        self._refused: list[Event] = []

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
        """The executor finds for itself which of the tokens it has cached."""
        if sequence in self._held:
            raise ValueError(f"sequence {sequence} has begun already")
        self._held[sequence] = _Sequence(list(tokens), sampling)
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        """Raises RuntimeError where the executor takes no more requests at all."""
        if not self._executor.can_enqueue_requests():
            raise RuntimeError("the executor takes no requests")
        for item in work:
            self._check(item)
            self._enqueue(item)

    def _check(self, work: Work) -> None:
        if work.sequence in self._in_flight:
            raise ValueError(f"sequence {work.sequence} already has work in flight")
        held = self._held[work.sequence]
        if isinstance(work, Prefill) and list(work.tokens) != held.tokens:
            raise ValueError(f"sequence {work.sequence}: prompts are taken whole")
        if isinstance(work, Verify) and not (work.drafts and held.sampling.is_plain_greedy):
            raise ValueError(f"sequence {work.sequence}: no drafts, or no greedy text, to verify")

    def _enqueue(self, work: Work) -> None:
        """One call a request: where one is refused, it is clear which, and the others run."""
        try:
            request = self._request(work, self._held[work.sequence])
            (request_id,) = self._executor.enqueue_requests([request])
        except RuntimeError as error:  # what the C++ side throws at a request that cannot run
            self._refused.append(Event(work.sequence, error=f"request refused: {error}"))
            return
        self._in_flight[work.sequence] = _InFlight(work, request_id)
        self._sequence_of[request_id] = work.sequence

    def _request(self, work: Work, sequence: _Sequence) -> Any:
        bindings, end_token, drafts = self._bindings, sequence.sampling.end_token, None
        if isinstance(work, Verify):
            drafts = bindings.ExternalDraftTokensConfig(list(map(int, work.drafts)))
        return bindings.Request(
            list(map(int, sequence.tokens)),  # the bindings convert no NumPy integers
            _num_asked(work),
            streaming=isinstance(work, Decode),
            sampling_config=self._sampling_config(sequence),
            output_config=bindings.OutputConfig(exclude_input_from_output=True),
            end_id=None if end_token == NO_TOKEN else end_token,
            external_draft_tokens_config=drafts,
        )

    def _sampling_config(self, sequence: _Sequence) -> Any:
        """top_p is always set: with neither top_k nor top_p the executor is greedy."""
        sampling = sequence.sampling
        if sampling.is_greedy:
            return self._bindings.SamplingConfig(top_k=1)
        return self._bindings.SamplingConfig(
            top_k=sampling.top_k or None,
            top_p=sampling.top_p,
            temperature=sampling.temperature,
            seed=request_seed(sampling.seed, len(sequence.tokens)),
        )

    def poll(self, timeout_s: float) -> list[Event]:
        """An event for each response of the executor, and for each request that it refused."""
        events, self._refused = self._refused, []
        if self._in_flight:
            timeout = timedelta(seconds=0.0 if events else timeout_s)  # a refusal does not wait
            events += [self._event(r) for r in self._executor.await_responses(timeout)]
        return events

    def _event(self, response: Any) -> Event:
        sequence = self._sequence_of[response.request_id]
        flight, state = self._in_flight[sequence], self._held[sequence]
        if response.has_error():
            self._end_work(flight)
            return Event(sequence, error=str(response.error_msg))
        result = response.result
        end_token, reported = state.sampling.end_token, result.output_token_ids[0]
        tokens = tuple(takewhile(lambda token: token != end_token, reported))
        state.tokens.extend(tokens)
        flight.num_emitted += len(tokens)
        if result.is_final:
            self._end_work(flight)
        finish = self._finish(flight, state, result)
        num_drafted, num_accepted = _verification(flight.work, tokens, finish, state.sampling)
        return Event(sequence, tokens, num_drafted, num_accepted, result.is_final, finish)

    def _end_work(self, flight: _InFlight) -> None:
        del self._in_flight[flight.work.sequence]
        del self._sequence_of[flight.request_id]

    def _finish(self, flight: _InFlight, state: _Sequence, result: Any) -> FinishReason | None:
        """LENGTH with all tokens that were asked for ends the work; with fewer, the sequence."""
        reasons, reason = self._bindings.FinishReason, result.finish_reasons[0]
        if reason in (reasons.END_ID, reasons.STOP_WORDS):
            return FinishReason.STOP
        is_cut = reason == reasons.LENGTH and flight.num_emitted < _num_asked(flight.work)
        is_full = result.is_final and len(state.tokens) >= self._capabilities.max_context_len
        return FinishReason.LENGTH if is_cut or is_full else None

    def cancel(self, sequence: SequenceId) -> None:
        """Ends the work, not the sequence: its tokens so far, and late ones, are kept."""
        if sequence not in self._held:
            raise KeyError(f"sequence {sequence} is not held")
        if sequence in self._in_flight:
            self._executor.cancel_request(self._in_flight[sequence].request_id)

    def release(self, sequence: SequenceId) -> None:
        """The executor holds nothing between requests: its cached blocks age out by themselves."""
        if sequence in self._in_flight:
            raise ValueError(f"sequence {sequence} has work in flight")
        del self._held[sequence]

    def close(self) -> None:
        self._executor.shutdown()


def _num_asked(work: Work) -> int:
    """max_tokens of the request that carries out the work."""
    if isinstance(work, Decode):
        return work.max_tokens
    return len(work.drafts) + 1 if isinstance(work, Verify) else 1


def request_seed(seed: int, position: int) -> int:
    """Seed of the request whose first new token is at `position`; 64 bits.

    The odd stride, 2^64 over the golden ratio, keeps the ranges of different seeds apart.
    """
    return (seed * 0x9E3779B97F4A7C15 + position) % 2**64


def _verification(
    work: Work, tokens: tuple[int, ...], finish: FinishReason | None, sampling: SamplingParams
) -> tuple[int, int]:
    """num_drafted and num_accepted; 0 and 0 where nothing was verified, as after an early cancel.

    The end token counts as accepted where it was drafted.
    """
    text = (*tokens, sampling.end_token) if finish == FinishReason.STOP else tokens
    if not isinstance(work, Verify) or not text:
        return 0, 0
    return len(work.drafts), sum(takewhile(bool, map(eq, work.drafts, text)))


def capabilities_of(build: Mapping[str, Any], max_decode_tokens: int) -> TargetCapabilities:
    """What an engine can do, from the `config.json` of its directory.

    Every prompt carries the text so far and up to max_draft_len drafts, and a request without
    drafts reserves max_draft_len as well: so all three limits of the build shrink by it.
    """
    config = build["build_config"]
    max_draft_len = int(config["max_draft_len"])
    limits = (config["max_input_len"], config["max_seq_len"], config["max_num_tokens"])
    return TargetCapabilities(
        max_sequences=int(config["max_batch_size"]),
        max_context_len=int(min(limits)) - max_draft_len,
        max_draft_len=max_draft_len,
        max_decode_tokens=max_decode_tokens,
        max_prefill_tokens=None,
        verifies_sampling=False,
        vocab_size=int(build["pretrained_config"]["vocab_size"]),
        unsupported=UNSUPPORTED,
    )


def create_trtllm_target(
    engine_dir: Path, *, max_decode_tokens: int, free_gpu_memory_fraction: float
) -> TrtllmTarget:
    """Load the engine in `engine_dir`. Not run by this project: it needs TensorRT-LLM and a GPU."""
    from tensorrt_llm.bindings import executor as bindings

    build = json.loads((engine_dir / "config.json").read_text(encoding="utf-8"))
    kv_cache = bindings.KvCacheConfig(enable_block_reuse=True)  # external drafts need it
    kv_cache.free_gpu_memory_fraction = free_gpu_memory_fraction
    config = bindings.ExecutorConfig(kv_cache_config=kv_cache)
    executor = bindings.Executor(str(engine_dir), bindings.ModelType.DECODER_ONLY, config)
    return TrtllmTarget(executor, bindings, capabilities_of(build, max_decode_tokens))
