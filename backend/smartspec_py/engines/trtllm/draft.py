"""A draft engine on TensorRT-LLM's executor. Never run on a GPU; tested with `fake_executor`.

Each draft is one request with the whole text; cached blocks are reused. One call enqueues all
requests of a step, and one wait collects the results. The target's work in flight continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities
from smartspec_py.engines.trtllm.requests import Bindings, ExecutorModel, cache_salt

logger = logging.getLogger(__name__)

DRAFT_TIMEOUT_S = 2.0
"""A step waits this long for drafts, plus the time to prefill uncached text at READ_TOKENS_PER_S.
Then it continues without drafts, and the requests are cancelled."""

READ_TOKENS_PER_S = 2000
"""Prefill speed of a slow draft engine; a low estimate. New texts of a burst take seconds."""


class TrtllmDraftProposer(ExecutorModel, Proposer):
    """Uses the executor of a draft engine.

    max_context_len: maximum tokens of a text with its drafts.
    """

    def __init__(
        self,
        executor: Any,
        bindings: Bindings,
        *,
        max_draft_len: int,
        max_context_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(executor, bindings, vocab_size, clock)
        self.capabilities = ProposerCapabilities(max_draft_len)
        self._max_context_len = max_context_len
        self._num_cached: dict[SequenceId, int] = {}
        self._has_failed = False

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        room = self._max_context_len - len(tokens)
        return max(0, min(self.capabilities.max_draft_len, room))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Draft the most probable tokens, because the target verifies greedy text only. A request
        that fails or takes too long has no drafts."""
        try:
            request_ids = self._executor.enqueue_requests([self._request(task) for task in tasks])
        except (RuntimeError, TypeError) as error:  # exceptions of the C++ code and of nanobind
            self._warn(str(error))
            return [NO_DRAFT] * len(tasks)
        num_unread = sum(self.draft_prefill_len(task.sequence, len(task.tokens)) for task in tasks)
        results = self._await(request_ids, DRAFT_TIMEOUT_S + num_unread / READ_TOKENS_PER_S)
        return [
            self._draft(task, results.get(n)) for task, n in zip(tasks, request_ids, strict=True)
        ]

    def _request(self, task: DraftTask) -> Any:
        # Pass the loop's own list. The bindings copy it anyway, and a copy here costs more.
        tokens = task.tokens if isinstance(task.tokens, list) else list(task.tokens)
        salt = None if task.start.reuses_prefix else cache_salt(task.sequence)
        return self._greedy_request(tokens, task.draft_len, cache_salt_id=salt)

    def _await(self, request_ids: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Results by request. Failed requests are left out; late ones are cancelled first."""
        results: dict[int, Any] = {}
        left = set(request_ids)
        until_s = self._clock() + timeout_s
        while left and (left_s := until_s - self._clock()) > 0.0:
            for response in self._executor.await_responses(timedelta(seconds=left_s)):
                if response.request_id not in left:
                    continue  # from an earlier step, already cancelled
                left.discard(response.request_id)  # a request that does not stream responds once
                if response.has_error():
                    self._warn(str(response.error_msg))
                else:
                    results[response.request_id] = response.result
        for request_id in left:
            self._warn(f"no drafts within {timeout_s:.1f} s")
            self._executor.cancel_request(request_id)
        return results

    def _warn(self, reason: str) -> None:
        """Log only the first failure. Metrics show repeated failures."""
        if not self._has_failed:
            logger.warning("the draft engine failed a request: %s", reason)
        self._has_failed = True

    def _draft(self, task: DraftTask, result: Any | None) -> Draft:
        self._num_cached[task.sequence] = 0 if result is None else len(task.tokens)
        if result is None:
            return NO_DRAFT
        tokens = tuple(result.output_token_ids[0][: task.draft_len])
        return Draft(tokens[: task.start.sampling.num_before_end(tokens) + 1])

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Count accepted drafts as cached. Blocks of rejected drafts are not found again."""
        self._num_cached[sequence] = self._num_cached.get(sequence, 0) + num_accepted

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        """Assumes that all tokens processed so far, with accepted drafts, are still cached."""
        return max(0, context_len - 1 - self._num_cached.get(sequence, 0))

    def release(self, sequence: SequenceId) -> None:
        """The executor evicts the sequence's cached blocks when it needs room."""
        self._num_cached.pop(sequence, None)
