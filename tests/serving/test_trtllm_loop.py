"""The loop over TensorRT-LLM's adapter and the fakes of two executors: which requests are sent.

Texts are those of `fake_engine`, so whatever is drafted, refused or cancelled, the right text is
known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from harness import COST, VOCAB_SIZE, LoopHarness, fake_text

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import SequenceStart, TargetCapabilities
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.trtllm.draft import DRAFT_TIMEOUT_S, TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.loop import POLL_S
from smartspec_py.serving.request import ErrorCode
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import TOKEN_STEP
from smartspec_testing.fake_executor import DraftExecutor, EngineLimits, Executor

LIMITS = EngineLimits(
    max_batch_size=8, max_num_tokens=600, max_seq_len=600, max_draft_len=8,
    vocab_size=VOCAB_SIZE,
)  # fmt: skip
BURST = 8


def keeping(executor: Executor, calls: list[list[Any]]) -> Executor:
    enqueue = executor.enqueue_requests

    def enqueue_and_keep(requests: Sequence[Any]) -> list[int]:
        calls.append(list(requests))
        return enqueue(requests)

    executor.enqueue_requests = enqueue_and_keep  # type: ignore[method-assign]
    return executor


class Pair:
    """Two executors on one clock, and the adapter's halves over them."""

    def __init__(
        self,
        *,
        accept_prob: float = 0.7,
        seed: int = 1,
        draft_error_prob: float = 0.0,
        max_num_tokens: int = 600,
        max_cache_tokens: int | None = None,
        cost: CostModel = COST,
        **options: Any,
    ) -> None:
        """max_cache_tokens: of the loop's budget. options: of the target's executor."""
        self.clock = VirtualClock()
        self.of_target: list[list[Any]] = []  # the requests of each call
        self.of_draft: list[list[Any]] = []
        of_target = Executor(
            replace(LIMITS, max_num_tokens=max_num_tokens),
            cost=cost, clock=self.clock, seed=seed, **options,
        )  # fmt: skip
        of_draft = DraftExecutor(
            LIMITS, cost=cost, clock=self.clock, seed=seed,
            accept_prob=accept_prob, error_prob=draft_error_prob, texts=of_target.texts,
        )  # fmt: skip
        self.executors = (
            keeping(of_target, self.of_target),
            keeping(of_draft, self.of_draft),
        )
        self.target = TrtllmTarget(
            of_target,
            fake_executor,
            TargetCapabilities(
                max_sequences=8, max_context_len=592, max_draft_len=8, max_decode_tokens=BURST,
                max_prefill_tokens=None, verifies_sampling=False, vocab_size=VOCAB_SIZE,
            ),
            self.clock.now,
        )  # fmt: skip
        self.proposer = TrtllmDraftProposer(
            of_draft, fake_executor, max_draft_len=8, max_context_len=600,
            vocab_size=VOCAB_SIZE, clock=self.clock.now,
        )  # fmt: skip
        self.harness = LoopHarness(
            target=self.target, proposer=self.proposer, clock=self.clock, cost=COST,
            max_cache_tokens=max_cache_tokens,
        )  # fmt: skip

    def check_nothing_held(self) -> None:
        self.harness.check_nothing_held()
        assert [executor.num_held for executor in self.executors] == [0, 0]


PROMPTS = [tuple(range(n, 2 * n + 5)) for n in range(1, 13)]


@pytest.mark.parametrize("policy", ["none", "fixed:3", "batch_table", "goodput"])
def test_text_is_the_same_under_every_policy(policy: str) -> None:
    """12 requests over 8 rows; about 600 tokens an iteration hold them up now and then."""
    pair = Pair(hold_back_prob=0.1)
    for prompt in PROMPTS:
        pair.harness.submit(prompt, 60, policy=policy)
    assert pair.harness.drain() == [FinishReason.LENGTH] * len(PROMPTS)
    drafted = sum(request.num_drafted for request in pair.harness.requests.values())
    assert (drafted > 0) == (policy != "none")
    pair.check_nothing_held()


def test_bursts_in_a_full_cache() -> None:
    """Two requests of 66 and 67 tokens in a budget of 110: one is preempted, and its burst is
    cancelled."""
    pair = Pair(max_cache_tokens=110)
    numbers = [pair.harness.submit(prompt, 60, policy="none") for prompt in PROMPTS[:2]]
    assert pair.harness.drain() == [FinishReason.LENGTH] * 2
    assert pair.harness.requests[numbers[1]].num_preemptions >= 1
    pair.check_nothing_held()


def test_a_step_submits_prompts_within_the_budget() -> None:
    """Four prompts of 40 tokens and a budget of 64 beside a running request: one in each step, and
    a token between them."""
    pair = Pair()
    running = pair.harness.submit(PROMPTS[0], 100, policy="none")
    pair.harness.step(3)
    prompts = [tuple(range(n, n + 40)) for n in range(100, 104)]
    numbers = [pair.harness.submit(prompt, 4, policy="none") for prompt in prompts]
    stories, seen = pair.harness.stories, []
    for number in numbers:
        while number not in stories or not stories[number].tokens:
            pair.harness.step(1)
        seen.append(len(stories[running].tokens))
    assert [later - earlier for earlier, later in pairwise(seen)] == [1, 1, 1]
    whole = [[r for r in call if not r.streaming] for call in pair.of_target]
    assert max(len(call) for call in whole) == 1


def test_bursts_without_drafts() -> None:
    """60 tokens are the prompt's first and 59 more: seven bursts of 8, and one of 3."""
    pair = Pair()
    for prompt in PROMPTS[:4]:
        pair.harness.submit(prompt, 60, policy="none")
    pair.harness.submit(PROMPTS[4], 60, max_draft_len=0)
    pair.harness.drain()
    requests = [request for call in pair.of_target for request in call]
    lengths = sorted(r.max_tokens for r in requests if r.streaming)
    assert lengths == [3] * 5 + [BURST] * 35
    assert not pair.of_draft


def test_with_speculation_a_step_is_a_call_each() -> None:
    """One request a sequence and step, to each engine, all of a step in one call. The clock moves
    in passes alone, so a step is its draft passes and its target's pass."""
    pair = Pair()
    for prompt in PROMPTS[:4]:
        pair.harness.submit(prompt, 60, policy="fixed:3")
    pair.harness.drain()
    verifying = [num for call in pair.of_target if (num := sum(_is_verification(r) for r in call))]
    assert verifying == [len(call) for call in pair.of_draft]
    steps = sum(request.num_steps for request in pair.harness.requests.values())
    undrafted = [r for call in pair.of_target for r in call if r.streaming]
    assert sum(verifying) + sum(r.max_tokens for r in undrafted) == steps
    assert set(verifying[:10]) == {4}, "all four go on together"
    drafted = [record for record in pair.harness.loop.records if record.num_drafted]
    for record in drafted:
        assert record.draft_s > 0.0
        assert record.target_s == pytest.approx(record.total_s - record.draft_s)


def _is_verification(request: Any) -> bool:
    return request.external_draft_tokens_config is not None


@pytest.mark.parametrize("is_down", [False, True])
def test_a_draft_engine_that_fails_costs_no_text(is_down: bool) -> None:
    pair = Pair(draft_error_prob=0.5)
    if is_down:
        pair.executors[1].shutdown()
    number = pair.harness.submit(PROMPTS[3], 80, policy="fixed:4")
    assert pair.harness.drain() == [FinishReason.LENGTH]
    assert (pair.harness.requests[number].num_drafted > 0) is not is_down
    pair.check_nothing_held()


def test_late_drafts_are_given_up() -> None:
    """Of two requests one has never a turn within the time: it is cancelled, the other drafted."""
    pair = Pair()
    executor = pair.executors[1]
    waits = executor.await_responses

    def never(timeout: Any) -> list[Any]:
        pair.clock.sleep(0.5)
        return [response for response in waits(timeout) if response.request_id != 2]

    executor.await_responses = never  # type: ignore[method-assign]
    start = pair.clock.now()
    tasks = [
        DraftTask(SequenceStart(n, PROMPTS[n], len(PROMPTS[n]), SamplingParams()), 3)
        for n in (0, 1)
    ]
    drafts = pair.proposer.propose(tasks)
    assert [len(draft.tokens) for draft in drafts] == [3, 0]
    assert DRAFT_TIMEOUT_S <= pair.clock.now() - start < DRAFT_TIMEOUT_S + 1.0
    # What still comes of it is of no step, and the next one is not disturbed.
    assert [len(draft.tokens) for draft in pair.proposer.propose(tasks[:1])] == [3]


def test_texts_that_are_new_to_the_draft_have_longer() -> None:
    """8 texts of 590 tokens, of which an iteration of 0.5 s reads one: 4 s."""
    pair = Pair(cost=CostModel(PassTable((1,), (1,), ((0.5,),))))
    texts = [tuple(range(n, n + 590)) for n in range(8)]
    tasks = [
        DraftTask(SequenceStart(n, text, 590, SamplingParams()), 1) for n, text in enumerate(texts)
    ]
    assert [len(draft.tokens) for draft in pair.proposer.propose(tasks)] == [1] * 8
    assert pair.clock.now() > DRAFT_TIMEOUT_S


def test_drafts_end_with_the_end_token() -> None:
    pair = Pair(accept_prob=1.0)
    text = fake_text(PROMPTS[2], 6)
    sampling = SamplingParams(end_tokens=(1999, text[3]))
    task = DraftTask(SequenceStart(1, PROMPTS[2], len(PROMPTS[2]), sampling), 6)
    (draft,) = pair.proposer.propose([task])
    assert draft.tokens == tuple(text[:4])
    number = pair.harness.submit(PROMPTS[2], 6, policy="fixed:6", sampling=sampling)
    pair.harness.drain()
    assert pair.harness.stories[number].tokens == text[:3]
    assert pair.harness.stories[number].finals == [FinishReason.STOP]


def test_a_draft_knows_what_it_has_missed() -> None:
    """All of the prompt at first; nothing behind a step of its own; all since then later on."""
    pair = Pair(accept_prob=1.0)
    prompt = PROMPTS[5]
    assert pair.proposer.draft_prefill_len(1, len(prompt)) == len(prompt) - 1
    pair.proposer.propose([DraftTask(SequenceStart(1, prompt, len(prompt), SamplingParams()), 3)])
    pair.proposer.observe(1, 3)
    assert pair.proposer.draft_prefill_len(1, len(prompt) + 4) == 0
    assert pair.proposer.draft_prefill_len(1, len(prompt) + 40) == 36
    pair.proposer.release(1)
    assert not pair.proposer._num_cached
    assert pair.proposer.num_available(1, range(597), SamplingParams()) == 3


def plain_prompt(rng: random.Random) -> tuple[int, ...]:
    """One that the fake takes for a prompt: its last token does not follow the rule."""
    while True:
        *others, last = prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        if not others or last != (sum(others) + TOKEN_STEP * len(others)) % VOCAB_SIZE:
            return tuple(prompt)


def test_hundreds_of_requests_with_cancels_and_errors() -> None:
    """150 requests: every tenth is cancelled, some have end tokens, one engine request in fifty
    fails. Each has one last update, and the right text as far as it goes."""
    rng = random.Random(1)
    pair = Pair(
        seed=1, hold_back_prob=0.1, error_prob=0.008, draft_error_prob=0.02, max_num_tokens=900
    )
    harness = pair.harness
    for _ in range(150):
        prompt = plain_prompt(rng)
        policy = rng.choice(["none", "fixed:2", "goodput", "goodput"])
        end = fake_text(prompt, 60)[rng.randrange(60)]
        sampling = SamplingParams(end_tokens=rng.choice([(), (end,), (VOCAB_SIZE + 1, end)]))
        number = harness.submit(prompt, rng.randint(1, 50), policy=policy, sampling=sampling)
        if rng.random() < 0.1:
            harness.inbox.cancel(rng.randint(max(1, number - 12), number))
        harness.step(rng.randint(0, 4))
    ends = harness.drain(20_000)
    pair.check_nothing_held()
    assert set(ends) == {
        FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, ErrorCode.INTERNAL
    }  # fmt: skip
    for end, request, story in zip(
        ends, harness.requests.values(), harness.stories.values(), strict=True
    ):
        end_tokens = request.sampling.end_tokens
        assert set(story.tokens).isdisjoint(end_tokens)
        if end is FinishReason.STOP:
            text = fake_text(tuple(request.tokens[: request.num_prompt]), 60)
            assert text[len(story.tokens)] in end_tokens


PASS_S = 3.4 * POLL_S


def with_long_passes(pair: Pair) -> Pair:
    """The target's responses come PASS_S after their requests, as from a real executor: a wait
    that ends before them returns nothing. The fake always runs whole iterations."""
    executor, clock = pair.executors[0], pair.clock
    enqueue, wait = executor.enqueue_requests, executor.await_responses
    due_s = [0.0]

    def enqueue_requests(requests: Any) -> list[int]:
        due_s[0] = clock.now() + PASS_S
        return enqueue(requests)

    def await_responses(timeout: timedelta) -> list[Any]:
        left_s = due_s[0] - clock.now()
        if left_s > timeout.total_seconds():
            clock.sleep(timeout.total_seconds())
            return []
        clock.sleep(max(left_s, 0.0))
        return wait(timedelta(0))

    executor.enqueue_requests = enqueue_requests  # type: ignore[method-assign]
    executor.await_responses = await_responses  # type: ignore[method-assign, assignment]
    return pair


@pytest.mark.parametrize(("policy", "fewest"), [("fixed:4", 4), ("none", 1), ("goodput", 4)])
def test_the_step_of_a_long_pass_is_recorded(policy: str, fewest: int) -> None:
    """Each step with a plan has the events and the time of its pass. Without drafts, a burst has
    8 tokens."""
    pair = with_long_passes(Pair())
    for prompt in PROMPTS[:3]:
        pair.harness.submit(prompt, 60, policy=policy)
    assert pair.harness.drain() == [FinishReason.LENGTH] * 3
    planned = [record for record in pair.harness.loop.records if record.decision.views]
    assert len(planned) >= fewest
    assert all(record.target_s >= PASS_S for record in planned)
    drafted = sum(record.num_drafted for record in pair.harness.loop.records)
    assert drafted == sum(record.num_drafted for record in planned)


def test_messages_are_taken_in_during_a_long_pass() -> None:
    """A cancel, a deadline and a closed inbox do not wait for the pass."""
    pair = with_long_passes(Pair())
    harness = pair.harness
    first = harness.submit(PROMPTS[0], 60, policy="fixed:4")
    second = harness.submit(PROMPTS[1], 60, policy="fixed:4", deadline_s=2 * PASS_S)
    while not harness.stories[second].finals:
        harness.step()
    assert harness.stories[second].finals == [FinishReason.DEADLINE]
    close_s = pair.clock.now() + 1.5 * POLL_S
    sleep = pair.clock.sleep

    def sleep_and_close(seconds: float) -> None:
        sleep(seconds)
        if pair.clock.now() > close_s:
            harness.inbox.close("the test ends")

    pair.clock.sleep = sleep_and_close  # type: ignore[method-assign]
    harness.step(4)
    assert pair.clock.now() - close_s < PASS_S
    assert harness.stories[first].finals == []
