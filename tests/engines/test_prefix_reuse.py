"""Prefixes that are taken from the cache, of the target and of the draft model: no text changes,
and as many tokens are found as can be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from local_models import VOCAB_SIZE, check_cache, expected_text, make_proposer, make_target, poll
from step_driver import GREEDY, NUM_TOKENS, Driver, prompts

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, Prefill, SequenceStart
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput

pytestmark = pytest.mark.slow  # so that they run beside the others


def driver_of(
    kind: str = "llama", *, reuses_prefixes: bool = True, max_sequences: int = 5, seed: int = 2
) -> Driver:
    return Driver(
        make_target(kind, reuses_prefixes=reuses_prefixes, max_sequences=max_sequences),
        make_proposer(kind, reuses_prefixes=reuses_prefixes, max_sequences=max_sequences),
        seed,
    )


SEEDED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3),
]


@pytest.mark.parametrize("kind", ["gpt-neox", "openvino: llama, grouped keys"])
def test_prefix_reuse_changes_no_text(kind: str) -> None:
    """Eight sequences with 30 tokens in common, through three rows, under four samplings.

    The common part is read twice or so: by those that begin before anybody has read it. The rest
    take it over, from living rows and from memories.
    """
    shared = [(11 * i) % VOCAB_SIZE for i in range(30)]
    rests = [[60 + i, 61 + i] for i in range(8)]

    def texts(reuses_prefixes: bool) -> tuple[dict[int, list[int]], dict[int, int]]:
        driver = driver_of(kind, reuses_prefixes=reuses_prefixes, max_sequences=3)
        todo, done = list(enumerate(rests)), {}
        while todo or driver.tokens:
            while todo and len(driver.tokens) < 3:
                number, rest = todo.pop(0)
                driver.begin(number, shared + rest, SEEDED[number % 4])
            driver.step()
            for number in list(driver.tokens):
                if len(driver.tokens[number]) >= 32 + NUM_TOKENS:
                    done[number] = driver.end(number)[32:][:NUM_TOKENS]
        return done, driver.num_cached

    plain, none_cached = texts(reuses_prefixes=False)
    reused, num_cached = texts(reuses_prefixes=True)
    assert reused == plain
    assert set(none_cached.values()) == {0}
    assert [num_cached[number] for number in range(3)] == [0, 0, 0]
    assert all(num_cached[number] >= 30 for number in range(3, 8))
    greedy = [number for number in range(8) if number % 4 == 0]
    for number in greedy:
        assert plain[number] == expected_text(kind, shared + rests[number], NUM_TOKENS)


def write(
    target: LocalTarget,
    sequence: int,
    tokens: list[int],
    num_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    reuses_prefix: bool = True,
) -> tuple[int, list[int]]:
    """A sequence alone, without drafts: how many tokens it found cached, and its text."""
    num_cached = target.begin(SequenceStart(sequence, tokens, len(tokens), sampling, reuses_prefix))
    prefill = Prefill(sequence, tuple(tokens[num_cached:]), num_cached, True)
    text = [*poll(target, prefill)[0].tokens]
    while len(text) < num_tokens:
        text += poll(target, Decode(sequence, 1))[0].tokens
    return num_cached, text


MEMORY = [40 + i for i in range(20)]


@pytest.mark.parametrize(
    ("tokens", "num_generated", "reuses_prefix", "num_cached"),
    [
        (MEMORY, 0, True, 19),  # the last one must be read, to draw what follows it
        (MEMORY, 5, True, 20),  # of a prompt, only what was read as a prompt
        ([*MEMORY[:12], 1, 2], 0, True, 12),
        (MEMORY, 0, False, 0),
    ],
)
@pytest.mark.parametrize("is_released", [True, False])
def test_how_many_tokens_are_found_in_the_cache(
    tokens: list[int], num_generated: int, reuses_prefix: bool, num_cached: int, is_released: bool
) -> None:
    """20 tokens were read and 5 generated. The row gives those 20, whether its owner has gone or
    not."""
    target = make_target("llama")
    _, text = write(target, 0, MEMORY, 5)
    if is_released:
        target.release(0)
    tokens = [*tokens, *text[:num_generated]]
    found, following = write(target, 1, tokens, 6, reuses_prefix=reuses_prefix)
    assert found == num_cached
    assert following == expected_text("llama", tokens, 6)
    check_cache(target)


PENALISED = [
    SamplingParams(temperature=0.8, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(frequency_penalty=0.7, bad_words=((3,), (5, 6)), logit_bias=((9, 2.0),)),
    SamplingParams(temperature=1.0, seed=8, end_tokens=(7,), min_tokens=20),
]


@pytest.mark.parametrize("reuses_prefixes", [True, False])
def test_preemption_changes_no_text(reuses_prefixes: bool) -> None:
    """Released and begun again at random, eight sequences write what they write undisturbed.

    Also where the sampling counts tokens: after `begin` the generated ones still count as such.
    """
    samplings = [*SEEDED, *PENALISED]
    starts = prompts(len(samplings), seed=21)

    def texts(preempt_prob: float) -> tuple[list[list[int]], Counter[int]]:
        driver = driver_of(reuses_prefixes=reuses_prefixes, max_sequences=len(starts), seed=5)
        rng, num_preempted = random.Random(1), Counter[int]()
        for number, prompt in enumerate(starts):
            driver.begin(number, prompt, samplings[number])
        while any(len(driver.tokens[n]) < len(one) + NUM_TOKENS for n, one in enumerate(starts)):
            driver.step()
            for number, prompt in enumerate(starts):
                if rng.random() < preempt_prob:
                    known = driver.end(number)
                    driver.begin(number, known, samplings[number], len(prompt))
                    num_preempted[number] += 1
        found = [driver.tokens[n][len(one) :][:NUM_TOKENS] for n, one in enumerate(starts)]
        return found, num_preempted

    plain, _ = texts(0.0)
    preempted, num_preempted = texts(0.3)
    assert preempted == plain
    assert min(num_preempted[number] for number in range(len(starts))) > 2


def test_drafts_are_the_same_with_and_without_reuse() -> None:
    """A draft cache that took over 30 tokens, in place or from a living row, drafts what one does
    that read all of them."""
    tokens = [(7 * i) % VOCAB_SIZE for i in range(40)]
    for is_released in (True, False):
        proposer, fresh = make_proposer("llama"), make_proposer("llama", reuses_prefixes=False)
        proposer.propose([DraftTask(SequenceStart(0, tokens[:35], 35, GREEDY), 3)])
        proposer.observe(0, 0)
        if is_released:
            proposer.release(0)
        task = DraftTask(SequenceStart(1, [*tokens[:30], 1, 2, 3], 33, GREEDY), 5)
        assert proposer.propose([task]) == fresh.propose([task])
        proposer.observe(1, 0)
        check_cache(proposer)


def test_a_memory_holds_no_rejected_drafts() -> None:
    """Six draft rows; five are released before the drafts of the last are judged, and its row is
    brought down. What is left above must not pass for more than the tokens known then: a sequence
    that goes on like the last one is drafted for as if nothing had been cached."""
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(6)]
    proposer = make_proposer("llama", max_sequences=6)
    fresh = make_proposer("llama", reuses_prefixes=False)
    drafts = proposer.propose(
        [DraftTask(SequenceStart(n, texts[n], 20, GREEDY), 5) for n in range(6)]
    )
    for number in range(5):
        proposer.release(number)
    proposer.observe(5, 0)
    wrong = drafts[5].tokens
    others = [next(t for t in range(VOCAB_SIZE) if t not in wrong[:4]) for _ in range(5)]
    texts[5].extend(others)
    task = DraftTask(SequenceStart(7, [*texts[5], 1], 26, GREEDY), 5)
    assert proposer.propose([task]) == fresh.propose([task])


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_the_draft_model_shares_only_between_requests_that_allow_it(
    first: bool, second: bool
) -> None:
    proposer = make_proposer("llama")
    tokens = list(range(3, 23))
    proposer.propose([DraftTask(SequenceStart(1, tokens, 20, GREEDY, reuses_prefix=first), 3)])
    proposer.release(1)
    lengths = []
    forward = proposer.runner.forward

    def counted(inputs: Sequence[RowInput], token_ids: None = None) -> PassOutput:
        lengths.append(len(inputs[0].tokens))
        return forward(inputs, token_ids)

    proposer.runner.forward = counted  # type: ignore[method-assign]
    proposer.propose([DraftTask(SequenceStart(2, tokens, 20, GREEDY, reuses_prefix=second), 3)])
    assert lengths == ([1, 1, 1] if first and second else [19, 1, 1, 1])
