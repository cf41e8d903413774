"""Who takes part in the next step: waiting requests, live ones, and the known tokens to read.

Waiting requests are admitted by rank, which is arrival moved by priority, as far as rows and cache
reach (`serving.admission`). Prompts are read in chunks of a common budget a step, by rank, beside
the decoding of the others: a long prompt delays a generated token by one chunk and no more.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Prefill
from smartspec_py.serving.request import Request, RequestState

TILE = 64
"""Kernels multiply so many tokens, or a divisor of it, as fast as one fewer, and one more needs a
tile of its own: with 136 tokens a pass takes 1.3 times as long as with 128 (97 M parameters,
float32, two cores of an Intel Xeon). 32 requests at once take 0.82 of the time between tokens."""


class Batcher:
    """Holds every request from arrival to release."""

    def __init__(
        self, max_sequences: int, prefill_chunk: int | None, largest_chunk: int | None = None
    ) -> None:
        """prefill_chunk: prompt tokens a step; None where the engine takes prompts whole.
        largest_chunk: that it takes of one prompt; None is without bound."""
        self._max_sequences = max_sequences
        self._prefill_chunk = prefill_chunk
        self._largest_chunk = largest_chunk
        self._waiting: list[Request] = []
        self._live: dict[SequenceId, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._live)

    @property
    def live(self) -> list[Request]:
        return list(self._live.values())

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_reading(self) -> int:
        """Live requests whose known tokens are being read, and that generate nothing until then."""
        return sum(r.state is RequestState.PREFILLING for r in self._live.values())

    @property
    def num_background(self) -> int:
        """Live requests that generate what they were given to in an earlier step."""
        return sum(r.is_in_flight and r.state is RequestState.DECODING for r in self._live.values())

    @property
    def num_rows(self) -> int:
        """Requests that can be live at once."""
        return self._max_sequences

    def find(self, sequence: SequenceId) -> Request | None:
        """The request, waiting or live; None when it is gone."""
        found = self._live.get(sequence)
        if found is None:
            waiting = (request for request in self._waiting if request.sequence == sequence)
            found = next(waiting, None)
        return found

    def is_live(self, request: Request) -> bool:
        return request.sequence in self._live

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank)

    def first_waiting(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def admit(self, request: Request) -> None:
        """Move a waiting request among the live ones."""
        self._waiting.remove(request)
        request.move_to(RequestState.PREFILLING)
        self._live[request.sequence] = request

    def preempt(self, request: Request) -> None:
        """Back among the waiting, at the place of its rank; it begins anew with all its tokens."""
        del self._live[request.sequence]
        request.move_to(RequestState.WAITING)
        request.num_preemptions += 1
        self.add(request)

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

    def prefills(self, num_decode_tokens: int = 0) -> list[Prefill]:
        """Chunks for this step, within the budget, by rank.

        num_decode_tokens: that the step computes beside them, drafts included. A budget
        that is too small for all is cut such that both together fill tiles, see `TILE`.
        """
        chunks: list[Prefill] = []
        left, largest = self._prefill_chunk, self._largest_chunk
        reading = sorted(self._reading(), key=_rank)
        if left is not None and left < sum(one.num_to_read - one.num_read for one in reading):
            excess = (left + num_decode_tokens) % TILE
            left -= excess if 2 * excess < left else 0
        for request in reading:
            if left == 0:
                break
            most = [bound for bound in (left, largest) if bound is not None]
            chunk = request.next_chunk(min(most, default=request.num_to_read))
            if left is not None:
                left -= len(chunk)
            is_last = request.num_read + len(chunk) == request.num_to_read
            chunks.append(Prefill(request.sequence, tuple(chunk), request.num_read, is_last))
        return chunks

    def _reading(self) -> Iterator[Request]:
        for request in self._live.values():
            if request.state is RequestState.PREFILLING and not request.is_in_flight:
                yield request


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
