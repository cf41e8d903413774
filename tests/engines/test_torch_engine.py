"""The PyTorch engine against Transformers itself, token by token.

The reference computes every token by a full pass without cache and with Transformers' own
attention, so it shares neither the packing, nor the rows, nor the mask with what is tested.
"""

from __future__ import annotations

import random

import pytest
from torch_models import (
    CONFIGS,
    MAX_DRAFT_LEN,
    VOCAB_SIZE,
    expected_text,
    make_proposer,
    make_target,
)

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, DraftTask, Prefill, Verify, Work
from smartspec_py.engines.torch_engine import TorchTarget
from smartspec_py.proposers.draft_model import DraftModelProposer

NUM_TOKENS = 24
GREEDY = SamplingParams()


class Driver:
    """The least loop: chunks of a prompt, then drafts of random lengths, checked as they come."""

    def __init__(self, target: TorchTarget, proposer: DraftModelProposer, seed: int) -> None:
        self.target, self.proposer = target, proposer
        self.rng = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.unread: dict[int, list[int]] = {}
        self.num_accepted = 0

    def begin(self, sequence: int, prompt: list[int]) -> None:
        self.tokens[sequence] = list(prompt)
        self.unread[sequence] = list(prompt)

    def step(self, sampling: SamplingParams = GREEDY) -> None:
        """Some sequences verify, some decode, some read a chunk of their prompt."""
        work: list[Work] = []
        decoding = [s for s in self.tokens if not self.unread[s] and self.rng.random() < 0.8]
        tasks = [
            DraftTask(s, self.tokens[s], self.rng.randrange(MAX_DRAFT_LEN + 1), sampling)
            for s in decoding
        ]
        for task, drafts in zip(tasks, self.proposer.propose(tasks), strict=True):
            work.append(Verify(task.sequence, drafts) if drafts else Decode(task.sequence, 1))
        for sequence, unread in self.unread.items():
            if unread:
                work.append(self.chunk(sequence, unread, sampling))
        self.rng.shuffle(work)
        self.target.submit(work)
        for event in self.target.poll(0.0):
            self.tokens[event.sequence].extend(event.tokens)
            if event.num_drafted:
                self.proposer.observe(event.sequence, event.num_accepted)
            self.num_accepted += event.num_accepted

    def chunk(self, sequence: int, unread: list[int], sampling: SamplingParams) -> Prefill:
        size = min(self.rng.randrange(1, 24), len(unread))
        start = len(self.tokens[sequence]) - len(unread)
        chunk, unread[:] = tuple(unread[:size]), unread[size:]
        return Prefill(sequence, chunk, start, not unread, sampling)

    def end(self, sequence: int) -> list[int]:
        self.target.release(sequence)
        self.proposer.release(sequence)
        del self.unread[sequence]
        return self.tokens.pop(sequence)


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_that_of_transformers(kind: str) -> None:
    """Nine sequences through five rows, joining and leaving between steps, drafts of 0 to 6."""
    todo = list(enumerate(prompts(9, seed=1)))
    texts = dict(todo)
    driver = Driver(make_target(kind), make_proposer(kind), seed=2)
    done = {}
    while todo or driver.tokens:
        while todo and len(driver.tokens) < 5:
            driver.begin(*todo.pop(0))
        driver.step()
        for sequence in list(driver.tokens):
            if len(driver.tokens[sequence]) >= len(texts[sequence]) + NUM_TOKENS:
                done[sequence] = driver.end(sequence)
    for sequence, prompt in texts.items():
        generated = done[sequence][len(prompt) :][:NUM_TOKENS]
        assert generated == expected_text(kind, prompt, NUM_TOKENS), f"sequence {sequence}"
    assert driver.num_accepted > 20, "the draft must be right often enough to test acceptance"
    driver.target.check_integrity()
    driver.proposer.check_integrity()


def test_sampled_text_does_not_depend_on_the_plan() -> None:
    """The same seed through ten random plans gives one text, and another seed another."""
    prompt = prompts(1, seed=5)[0]

    def text(plan_seed: int, seed: int) -> list[int]:
        driver = Driver(make_target("llama"), make_proposer("llama"), plan_seed)
        driver.begin(0, prompt)
        while len(driver.tokens[0]) < len(prompt) + NUM_TOKENS:
            driver.step(SamplingParams(temperature=1.0, top_p=0.95, seed=seed))
        return driver.tokens[0][len(prompt) :][:NUM_TOKENS]

    assert len({tuple(text(plan_seed, seed=7)) for plan_seed in range(10)}) == 1
    assert text(0, seed=8) != text(0, seed=7)


def test_lag_is_what_the_draft_has_not_read() -> None:
    """Unknown: all but the last of 9 tokens. After 3 drafts of which 1 was kept, 11 are known and
    10 were read: nothing is missed. After 5 tokens without drafts, 5 are."""
    proposer = make_proposer("llama")
    tokens = list(range(9))
    assert proposer.draft_lag(0, 9) == 8
    (drafts,) = proposer.propose([DraftTask(0, tokens, 3, GREEDY)])
    assert len(drafts) == 3
    proposer.observe(0, 1)
    assert proposer.draft_lag(0, 11) == 0
    assert proposer.draft_lag(0, 16) == 5
    proposer.release(0)
    assert proposer.draft_lag(0, 16) == 15


def test_a_long_lag_gives_the_same_drafts() -> None:
    """A cache that missed 30 tokens proposes what one that read all of them proposes."""
    tokens = prompts(1, seed=9)[0] + [1, 2, 3] * 11
    fresh, stale = make_proposer("llama"), make_proposer("llama")
    stale.propose([DraftTask(0, tokens[:3], 2, GREEDY)])
    stale.observe(0, 0)
    expected = fresh.propose([DraftTask(0, tokens, 4, GREEDY)])
    assert stale.propose([DraftTask(0, tokens, 4, GREEDY)]) == expected


def test_the_draft_stops_at_the_end_token() -> None:
    """What would follow the end of the text is not worth a pass."""
    proposer = make_proposer("llama")
    tokens = prompts(1, seed=3)[0]
    (drafts,) = proposer.propose([DraftTask(0, tokens, 6, GREEDY)])
    ending = SamplingParams(end_token=drafts[2])
    first = drafts.index(drafts[2])
    other = make_proposer("llama")
    assert other.propose([DraftTask(0, tokens, 6, ending)]) == [drafts[: first + 1]]


def test_nothing_in_flight_is_no_event() -> None:
    assert make_target("llama").poll(0.0) == []


def test_a_pass_can_be_timed_in_any_room() -> None:
    """Rows of 96 tokens: asked for more, the pass is as long as the row."""
    target = make_target("llama")
    for tokens, context_len in ((1, 0), (64, 90), (96, 96), (200, 10)):
        assert target.time_pass(2, tokens, context_len) > 0
