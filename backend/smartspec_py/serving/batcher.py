"""The batch of the next step: waiting requests, live requests, and prefill chunks.

Waiting requests are admitted by rank while rows and cache are available (`serving.admission`). The
rank is the arrival time, shifted by priority. All prefills of a step share one budget of tokens and
run together with decoding. So a long prompt delays a token by at most one chunk, or by the time of
the whole prompt if the engine takes whole prompts only.

Half of the budget goes to the prompt with the lowest rank. The rest goes to the prompts with the
fewest tokens left, of the highest priority first. So a short prompt waits for few tokens, and each
long one has half of the budget at last.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Prefill
from smartspec_py.serving.request import Request, RequestState

TILE = 64
"""Tile size of the compute kernels in tokens.

A tile that is not full costs as much as a full one. With 136 tokens, a pass takes 1.3 times as long
as with 128 (97 M parameters, float32, two cores of an Intel Xeon). Filling tiles reduces the time
between tokens to 0.82 with 32 simultaneous requests.
"""


class Batcher:
    """Holds every request from arrival to release. It does not change them.

    waiting: sorted by rank. live: by sequence, in order of admission. max_batch_size: most live
    requests.
    """

    def __init__(
        self,
        max_batch_size: int,
        prefill_chunk: int,
        largest_chunk: int | None,
        block_len: int = 1,
    ) -> None:
        """prefill_chunk: prompt tokens per step. largest_chunk: most tokens of one prompt per step;
        None if the engine takes whole prompts only. block_len: requests that begin alike share
        blocks of so many tokens; with 1, they share nothing."""
        self.max_batch_size = max_batch_size
        self._prefill_chunk = prefill_chunk
        self._largest_chunk = largest_chunk
        self._block_len = block_len
        self.waiting: list[Request] = []
        self.live: dict[SequenceId, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter((*self.waiting, *self.live.values()))

    @property
    def num_prefilling(self) -> int:
        """Live requests whose prefill is not complete. They generate nothing yet."""
        return sum(r.state is RequestState.PREFILLING for r in self.live.values())

    def find(self, sequence: SequenceId) -> Request | None:
        """The request, waiting or live. None if it no longer exists."""
        waiting = (request for request in self.waiting if request.sequence == sequence)
        return self.live.get(sequence) or next(waiting, None)

    def add(self, request: Request) -> None:
        """Add a request to the waiting requests, sorted by rank."""
        insort(self.waiting, request, key=_rank)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to live."""
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
        """Chunks for this step within the budget, the prompt with the lowest rank first.

        num_decode_tokens: tokens that the step decodes, including drafts. If the budget is too
        small for all prompts, it is reduced so that both together fill tiles, see `TILE`. A whole
        prompt that is longer than the budget is prefilled alone.
        """
        prefilling = [r for r in self.live.values() if r.state is RequestState.PREFILLING]
        unread = [r for r in prefilling if not r.is_in_flight]
        left = self._prefill_chunk
        left -= sum(r.num_prefill_tokens for r in prefilling if r.is_in_flight)
        if not unread or left <= 0:
            return []
        oldest = min(unread, key=_rank)
        shortest = sorted(unread, key=_remaining_work)
        if self._largest_chunk is None:
            others = [request for request in shortest if request is not oldest]
            return self._whole([oldest, *others], left)
        if left < sum(map(_num_unread, unread)):
            excess = (left + num_decode_tokens) % TILE
            left -= excess if 2 * excess < left else 0
        return self._chunks(oldest, shortest, left, self._largest_chunk)

    def _whole(self, requests: Sequence[Request], left: int) -> list[Prefill]:
        """Whole prompts in this order, up to the first that does not fit into what is left of the
        budget. If the budget is unused, the first one always fits."""
        chunks: list[Prefill] = []
        for request in requests:
            num_tokens = _num_unread(request)
            if num_tokens > left and left < self._prefill_chunk:
                break
            chunks.append(_prefill(request, num_tokens))
            left -= num_tokens
        return chunks

    def _chunks(
        self, oldest: Request, shortest: Sequence[Request], left: int, largest: int
    ) -> list[Prefill]:
        """Half of what is left of the budget for the oldest prompt, the rest for the shortest. What
        either does not need, the other takes. largest: most tokens of a prompt.

        A prompt that has not begun waits while another one reads in this step what it needs next:
        it will find that in the cache.
        """
        sizes: dict[SequenceId, int] = {}
        for request, most in [(oldest, left - left // 2), *((one, left) for one in shortest)]:
            given = sizes.get(request.sequence, 0)
            more = min(_num_unread(request), largest) - given
            more = min(more, most, left)
            if not more or (not given and self._is_read_by(sizes, request)):
                continue
            sizes[request.sequence] = given + more
            left -= more
        return [_prefill(self.live[sequence], num) for sequence, num in sizes.items()]

    def _is_read_by(self, sequences: Iterable[SequenceId], request: Request) -> bool:
        """Whether one of these prompts has the next block of a request whose prefill has not begun,
        and has not read it yet."""
        end = request.num_computed_tokens + self._block_len
        if self._block_len == 1 or request.has_begun or not request.reuses_prefix:
            return False
        head = request.tokens[:end]
        return end < request.num_prompt and any(
            other.reuses_prefix
            and other.num_computed_tokens < end <= other.num_prompt
            and other.adapter == request.adapter
            and other.tokens[:end] == head
            for other in map(self.live.__getitem__, sequences)
        )


def _prefill(request: Request, num_tokens: int) -> Prefill:
    start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
    chunk, is_last = tuple(request.tokens[start:stop]), stop == request.num_prefill_tokens
    return Prefill(request.sequence, chunk, start, is_last)


def _num_unread(request: Request) -> int:
    return request.num_prefill_tokens - request.num_computed_tokens


def _remaining_work(request: Request) -> tuple[int, int, tuple[float, int]]:
    """The key by which the shortest prompts come first. Within a priority, by tokens."""
    return -request.priority, _num_unread(request), request.rank


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
