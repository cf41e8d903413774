"""Random steps of a target and its proposer, as a server would plan them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from local_models import MAX_DRAFT_LEN, VOCAB_SIZE, check_cache, poll

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, Event, Prefill, SequenceStart, Verify, Work
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask

NUM_TOKENS = 18
GREEDY = SamplingParams()


class Driver:
    """The least loop: chunks of a prompt, then drafts of random lengths, verified at once.

    unread: tokens at the end of a sequence's known ones that no chunk has brought yet.
    num_cached: tokens that were found in the cache, by sequence.
    """

    def __init__(self, target: LocalTarget, proposer: Any, seed: int) -> None:
        self.target, self.proposer = target, proposer
        self.rng = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.unread: dict[int, list[int]] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.num_prompt: dict[int, int] = {}
        self.num_cached: dict[int, int] = {}
        self.num_accepted = 0

    def begin(
        self,
        sequence: int,
        tokens: list[int],
        sampling: SamplingParams = GREEDY,
        num_prompt: int | None = None,
    ) -> None:
        """num_prompt: None where all tokens are of the prompt."""
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        num_cached = self.target.begin(SequenceStart(sequence, tokens, num_prompt, sampling))
        assert 0 <= num_cached < len(tokens)
        self.tokens[sequence] = list(tokens)
        self.unread[sequence] = tokens[num_cached:]
        self.sampling[sequence], self.num_prompt[sequence] = sampling, num_prompt
        self.num_cached[sequence] = num_cached

    def generate(self, sequence: int, num_tokens: int) -> list[int]:
        """Step until so many tokens of its text are known; returns those."""
        first = self.num_prompt[sequence]
        while len(self.tokens[sequence]) < first + num_tokens:
            self.step()
        return self.tokens[sequence][first:][:num_tokens]

    def step(self) -> None:
        """Some sequences verify, some decode, some read a chunk of their prompt."""
        work: list[Work] = []
        decoding = [s for s in self.tokens if not self.unread[s] and self.rng.random() < 0.8]
        tasks = [
            DraftTask(
                SequenceStart(s, self.tokens[s], self.num_prompt[s], self.sampling[s]),
                self.rng.randrange(MAX_DRAFT_LEN + 1),
            )
            for s in decoding
        ]
        for task, draft in zip(tasks, self.propose(tasks), strict=True):
            work.append(Verify(task.sequence, draft) if draft.tokens else Decode(task.sequence, 1))
        for sequence, unread in self.unread.items():
            if unread:
                work.append(self.chunk(sequence, unread))
        self.rng.shuffle(work)
        for event in poll(self.target, *work):
            self.take(event)

    def take(self, event: Event) -> None:
        if event.num_drafted or event.hidden is not None:
            self.proposer.observe(event.sequence, event.num_accepted, event.hidden)
        self.tokens[event.sequence].extend(event.tokens)
        self.num_accepted += event.num_accepted

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return self.proposer.propose(tasks)

    def chunk(self, sequence: int, unread: list[int]) -> Prefill:
        size = min(self.rng.randrange(1, 24), len(unread))
        start = len(self.tokens[sequence]) - len(unread)
        chunk, unread[:] = tuple(unread[:size]), unread[size:]
        return Prefill(sequence, chunk, start, not unread)

    def end(self, sequence: int) -> list[int]:
        """Its prompt and text."""
        self.release(sequence)
        del self.unread[sequence]
        return self.tokens.pop(sequence)

    def release(self, sequence: int) -> None:
        for cache in (self.target, self.proposer):
            cache.release(sequence)
            check_cache(cache)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random tokens, of lengths from 1 to 39."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
