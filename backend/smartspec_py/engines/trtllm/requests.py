"""The common part of target and draft requests to TensorRT-LLM's executor. Never run on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from smartspec_py.core.types import SamplingParams, SequenceId

Bindings = Any
"""The module `tensorrt_llm.bindings.executor`, or a fake of it."""

BURST = 17
"""Tokens of a request whose generation steps are timed. The first comes with the prompt pass."""


def num_before_end_allowed(sampling: SamplingParams, num_generated: int) -> int:
    """Tokens to generate before an end token may come, after num_generated tokens.

    `SamplingConfig.min_tokens` keeps end_id away, but not the stop words that are the other end
    tokens. So no end token is drawn by `bad_words`, in a request of at most so many tokens.
    """
    return max(0, sampling.min_tokens - num_generated) if sampling.end_tokens else 0


def bad_words(
    sampling: SamplingParams, num_generated: int, num_logits: int
) -> list[list[int]] | None:
    """Words that must not be completed; the executor looks for their beginning in the prompt too.
    Words with tokens that have no logits never are."""
    words = [list(word) for word in sampling.bad_words if max(word) < num_logits]
    if num_before_end_allowed(sampling, num_generated):
        words += [[token] for token in sampling.end_tokens]
    return words or None


def embedding_bias(sampling: SamplingParams, num_logits: int) -> Any:
    """A tensor [num_logits] to add to the logits; None without a bias. The executor converts
    float32 to float16 if the engine's logits have that type."""
    if not sampling.logit_bias:
        return None
    import torch

    bias = torch.zeros(num_logits)
    for token, value in sampling.logit_bias:
        if token < num_logits:
            bias[token] = value
    return bias


def cache_salt(sequence: SequenceId) -> int:
    """A salt that only requests of this sequence use. The executor shares cached blocks only
    between requests with the same salt. Its upper bits keep it apart from salts of others."""
    return (0x5EED << 32) + sequence


def sampling_arguments(sampling: SamplingParams, position: int) -> dict[str, Any]:
    """Arguments of the `SamplingConfig` of a request whose first new token is at `position`.

    top_p is always set: with neither top_k nor top_p, the executor is greedy. It subtracts
    penalties from logits that are already divided by the temperature.
    """
    arguments: dict[str, Any] = {"top_k": 1}
    if not sampling.is_greedy:
        arguments = {
            "top_k": sampling.top_k or None,
            "top_p": sampling.top_p,
            "temperature": sampling.temperature,
            "seed": request_seed(sampling.seed, position),
        }
    if sampling.counts_tokens:
        temperature = arguments.get("temperature", 1.0)
        arguments["repetition_penalty"] = sampling.repetition_penalty
        arguments["presence_penalty"] = sampling.presence_penalty / temperature
        arguments["frequency_penalty"] = sampling.frequency_penalty / temperature
    return arguments


def request_seed(seed: int, position: int) -> int:
    """Seed of the request whose first new token is at `position`; 64 bits.

    The odd stride is 2^64 divided by the golden ratio. It keeps the ranges of different seeds
    apart.
    """
    return (seed * 0x9E3779B97F4A7C15 + position) % 2**64


class ExecutorModel:
    """The common part of target and draft: a `bindings.Executor`. clock: time in seconds."""

    def __init__(
        self, executor: Any, bindings: Bindings, vocab_size: int, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._bindings = bindings
        self._vocab_size = vocab_size
        self._clock = clock
        self._output = bindings.OutputConfig(exclude_input_from_output=True)
        self._greedy = bindings.SamplingConfig(top_k=1)

    def close(self) -> None:
        self._executor.shutdown()

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`. Raises RuntimeError if a request fails.

        With num_logits 1, new texts are prefilled. Otherwise each row has a fixed, cached text of
        context_len tokens, and one generation step or tokens_per_row - 1 drafts follow it.
        """
        fresh = random.Random(f"{batch_size, tokens_per_row, context_len} {self._clock()}")
        if num_logits == 1:
            return self._seconds(self._texts([fresh] * batch_size, context_len + tokens_per_row))
        known = self._texts([random.Random(row) for row in range(batch_size)], max(1, context_len))
        self._seconds(known)
        if tokens_per_row > 1:
            drafts = self._texts([fresh] * batch_size, tokens_per_row - 1)
            return self._seconds(known, tokens_per_row, drafts)
        first_s, burst_s = self._seconds(known), self._seconds(known, BURST)
        return max(1e-4, burst_s - first_s) / (BURST - 1)

    def _texts(self, rngs: Sequence[random.Random], length: int) -> list[list[int]]:
        return [rng.choices(range(self._vocab_size), k=length) for rng in rngs]

    def _seconds(
        self, texts: Sequence[list[int]], max_tokens: int = 1, drafts: Sequence[list[int]] = ()
    ) -> float:
        """Seconds for one greedy request per text, all at once. drafts: to verify, per text."""
        configs = [self._bindings.ExternalDraftTokensConfig(draft) for draft in drafts]
        requests = [
            self._greedy_request(text, max_tokens, external_draft_tokens_config=config)
            for text, config in zip(texts, configs or [None] * len(texts), strict=True)
        ]
        start = self._clock()
        finish(self._executor, self._executor.enqueue_requests(requests))
        return self._clock() - start

    def _greedy_request(self, tokens: list[int], max_tokens: int, **options: Any) -> Any:
        return self._bindings.Request(
            tokens, max_tokens, sampling_config=self._greedy, output_config=self._output, **options
        )


def finish(executor: Any, request_ids: Sequence[int]) -> None:
    """Await the last response of each request. Raises RuntimeError if a request fails."""
    left = set(request_ids)
    while left:
        for response in executor.await_responses(timedelta(seconds=1)):
            if response.has_error():
                raise RuntimeError(f"the executor failed a request: {response.error_msg}")
            if response.result.is_final:
                left.discard(response.request_id)
