"""What requests to TensorRT-LLM's executor have in common, those of a target and of a draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from smartspec_py.core.types import SamplingParams, SequenceId

Bindings = Any
"""The module `tensorrt_llm.bindings.executor`, or what stands for it."""

WAIT_S = 1.0
"""A wait for responses, after which time_pass waits again."""

BURST = 17
"""Tokens of a request whose generation steps are timed; the first comes with its prompt."""

LEAST_S = 1e-4
"""Of a difference of two times, which a disturbance may make negative."""

SALT = 0x5EED
"""Over the ids of sequences, so that a salt is not a small number that others may use too."""


def end_id(sampling: SamplingParams) -> int | None:
    return sampling.end_tokens[0] if sampling.end_tokens else None


def stop_words(sampling: SamplingParams) -> list[list[int]] | None:
    """The end tokens after the first, one token each: a request takes a single end_id."""
    return [[token] for token in sampling.end_tokens[1:]] or None


def cache_salt(sequence: SequenceId) -> int:
    """Keeps cached blocks of a sequence from all others, and finds them again in its next request:
    blocks are shared among requests of equal salt."""
    return (SALT << 32) + sequence


class SamplingConfigs:
    """Makes them for requests; that of greedy text once, as a request copies what it is given.

    stream: of the noise. Drafts must be drawn from another one than they are verified by: with the
    same numbers on both sides what is accepted would depend on what was drawn.
    """

    def __init__(self, bindings: Bindings, stream: int = 0) -> None:
        self._make = bindings.SamplingConfig
        self._stream = stream
        self._greedy = self._make(top_k=1)

    def of(self, sampling: SamplingParams, position: int) -> Any:
        """For a request whose first new token is at `position`.

        top_p is always set: with neither top_k nor top_p the executor is greedy.
        """
        if sampling.is_greedy:
            return self._greedy
        return self._make(
            top_k=sampling.top_k or None,
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
            temperature=sampling.temperature,
            seed=request_seed(sampling.seed, position, self._stream),
        )


def request_seed(seed: int, position: int, stream: int = 0) -> int:
    """Seed of the request whose first new token is at `position`; 64 bits.

    The odd strides, 2^64 over the golden ratio and over its square, keep the ranges of different
    seeds and streams apart.
    """
    return (seed * 0x9E3779B97F4A7C15 + stream * 0x61C8864680B583EB + position) % 2**64


class ExecutorModel:
    """An engine behind an executor; target and draft alike.

    executor, bindings: a `bindings.Executor`, and the module that it is of:
    `tensorrt_llm.bindings.executor` or its fake. clock: seconds, of which polls take some.
    """

    def __init__(
        self, executor: Any, bindings: Bindings, vocab_size: int, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._bindings = bindings
        self._vocab_size = vocab_size
        self._clock = clock
        self._output = bindings.OutputConfig(exclude_input_from_output=True)

    def close(self) -> None:
        self._executor.shutdown()

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`; from the outside, enqueueing and responses included.

        Where logits of the last position alone are wanted, texts of all these tokens are read; of
        tokens_per_row 1, texts of context_len go on by a token; of more, they are verified with
        that many drafts less one. What was read before is reused, as while serving: each row's text
        is always the same, so that reading it costs time only once. Raises RuntimeError where the
        executor fails one.
        """
        vocabulary = range(self._vocab_size)
        fresh = random.Random(f"{batch_size, tokens_per_row, context_len} {self._clock()}")

        def texts(length: int) -> list[list[int]]:
            return [fresh.choices(vocabulary, k=length) for _ in range(batch_size)]

        if num_logits == 1:
            return self._seconds(texts(context_len + tokens_per_row))
        length = max(1, context_len)
        known = [random.Random(row).choices(vocabulary, k=length) for row in range(batch_size)]
        self._seconds(known)
        if tokens_per_row > 1:
            return self._seconds(known, tokens_per_row, texts(tokens_per_row - 1))
        first_s, burst_s = self._seconds(known), self._seconds(known, BURST)
        return max(LEAST_S, burst_s - first_s) / (BURST - 1)

    def _seconds(
        self, texts: Sequence[list[int]], max_tokens: int = 1, drafts: Sequence[list[int]] = ()
    ) -> float:
        """Of greedy requests for these texts, all at once. drafts: to verify, of each text."""
        bindings = self._bindings
        configs = [bindings.ExternalDraftTokensConfig(one) for one in drafts] or [None] * len(texts)
        requests = [
            bindings.Request(
                text,
                max_tokens,
                sampling_config=bindings.SamplingConfig(top_k=1),
                output_config=self._output,
                external_draft_tokens_config=config,
            )
            for text, config in zip(texts, configs, strict=True)
        ]
        start = self._clock()
        finish(self._executor, self._executor.enqueue_requests(requests))
        return self._clock() - start


def finish(executor: Any, request_ids: Sequence[int]) -> None:
    """Await the last response of each. Raises RuntimeError with the message of one that failed."""
    left = set(request_ids)
    while left:
        for response in executor.await_responses(timedelta(seconds=WAIT_S)):
            if response.has_error():
                raise RuntimeError(f"the executor failed a request: {response.error_msg}")
            if response.result.is_final:
                left.discard(response.request_id)
