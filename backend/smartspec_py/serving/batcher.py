"""Who takes part in the next step: waiting requests, live ones, and the prompt tokens to read.

Requests are admitted in the order of arrival, as many as the target has rows for. Prompts are read
in chunks of a common budget a step, the oldest first, beside the decoding of the others: a long
prompt delays a step by one chunk and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Prefill
from smartspec_py.serving.request import Request, RequestState


class Batcher:
    """Holds every request from arrival to release."""

    def __init__(self, max_sequences: int, prefill_chunk: int | None) -> None:
        """prefill_chunk: prompt tokens a step; None where the engine takes prompts whole."""
        self._max_sequences = max_sequences
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Request] = deque()
        self._live: dict[SequenceId, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._live)

    @property
    def live(self) -> Iterator[Request]:
        return iter(self._live.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def find(self, sequence: SequenceId) -> Request | None:
        """The request, waiting or live; None when it is gone."""
        waiting = (request for request in self._waiting if request.sequence == sequence)
        return self._live.get(sequence) or next(waiting, None)

    def is_live(self, request: Request) -> bool:
        return request.sequence in self._live

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def can_admit(self) -> bool:
        return bool(self._waiting) and len(self._live) < self._max_sequences

    def admit(self) -> None:
        """Move the oldest waiting request among the live ones."""
        request = self._waiting.popleft()
        request.move_to(RequestState.PREFILLING)
        self._live[request.sequence] = request

    def drop_waiting(self, request: Request) -> None:
        self._waiting.remove(request)

    def release(self, request: Request) -> None:
        del self._live[request.sequence]

    def ready(self) -> list[Request]:
        """Live requests that decode and have nothing in flight."""
        return [
            request
            for request in self._live.values()
            if request.state is RequestState.DECODING and not request.is_in_flight
        ]

    def prefills(self) -> list[Prefill]:
        """Prompt chunks for this step, within the budget, the oldest request first."""
        chunks = []
        left = self._prefill_chunk
        for request in self._live.values():
            if request.state is not RequestState.PREFILLING or request.is_in_flight:
                continue
            if left == 0:
                break
            chunk = request.next_chunk(request.num_prompt if left is None else left)
            if not chunk:
                continue
            if left is not None:
                left -= len(chunk)
            start = request.num_prefilled
            is_last = start + len(chunk) == request.num_prompt
            chunks.append(Prefill(request.sequence, tuple(chunk), start, is_last, request.sampling))
        return chunks
