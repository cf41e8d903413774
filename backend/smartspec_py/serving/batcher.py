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
    """Holds every request from arrival to release; changes none.

    waiting: by rank. live: by sequence, in the order of their admission. max_batch_size: requests
    that can be live at once.
    """

    def __init__(
        self, max_batch_size: int, prefill_chunk: int | None, largest_chunk: int | None = None
    ) -> None:
        """prefill_chunk: prompt tokens a step; None where the engine takes prompts whole.
        largest_chunk: that it takes of one prompt; None is without bound."""
        self.max_batch_size = max_batch_size
        self._prefill_chunk = prefill_chunk
        self._largest_chunk = largest_chunk
        self.waiting: list[Request] = []
        self.live: dict[SequenceId, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter((*self.waiting, *self.live.values()))

    @property
    def num_prefilling(self) -> int:
        """Live requests whose known tokens are being read, and that generate nothing until then."""
        return sum(r.state is RequestState.PREFILLING for r in self.live.values())

    @property
    def num_background(self) -> int:
        """Live requests that generate what they were given to in an earlier step."""
        return sum(r.is_in_flight and r.state is RequestState.DECODING for r in self.live.values())

    def find(self, sequence: SequenceId) -> Request | None:
        """The request, waiting or live; None when it is gone."""
        waiting = (request for request in self.waiting if request.sequence == sequence)
        return self.live.get(sequence) or next(waiting, None)

    def add(self, request: Request) -> None:
        """Among the waiting, at the place of its rank."""
        insort(self.waiting, request, key=_rank)

    def admit(self, request: Request) -> None:
        """Move a waiting request among the live ones."""
        self.waiting.remove(request)
        self.live[request.sequence] = request

    def ready(self) -> list[Request]:
        """Live requests that decode and have nothing in flight."""
        return [
            request
            for request in self.live.values()
            if request.state is RequestState.DECODING and not request.is_in_flight
        ]

    def prefills(self, num_decode_tokens: int = 0) -> list[Prefill]:
        """Chunks for this step, within the budget, by rank.

        num_decode_tokens: that the step computes beside them, drafts included. A budget
        that is too small for all is cut such that both together fill tiles, see `TILE`.
        """
        chunks: list[Prefill] = []
        left, largest = self._prefill_chunk, self._largest_chunk
        reading = sorted(
            (
                request
                for request in self.live.values()
                if request.state is RequestState.PREFILLING and not request.is_in_flight
            ),
            key=_rank,
        )
        if left is not None and left < sum(
            one.num_prefill_tokens - one.num_computed_tokens for one in reading
        ):
            excess = (left + num_decode_tokens) % TILE
            left -= excess if 2 * excess < left else 0
        for request in reading:
            if left == 0:
                break
            most = [bound for bound in (left, largest) if bound is not None]
            chunk = request.next_chunk(min(most, default=request.num_prefill_tokens))
            if left is not None:
                left -= len(chunk)
            is_last = request.num_computed_tokens + len(chunk) == request.num_prefill_tokens
            chunks.append(
                Prefill(request.sequence, tuple(chunk), request.num_computed_tokens, is_last)
            )
        return chunks


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
