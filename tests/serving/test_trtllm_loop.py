"""The loop over TensorRT-LLM's adapter and the fakes of two executors: which requests are sent.

Texts are those of `fake_engine`, so whatever is drafted, refused or cancelled, the right text is
known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from harness import COST, VOCAB_SIZE, LoopHarness, fake_text

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import DraftTask, TargetCapabilities
from smartspec_py.engines.trtllm.draft import DRAFT_TIMEOUT_S, TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
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


@dataclass
class Calls:
    """What was enqueued: the requests of each call."""

    of_target: list[list[Any]] = field(default_factory=list)
    of_draft: list[list[Any]] = field(default_factory=list)


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
        burst: int = BURST,
        **options: Any,
    ) -> None:
        """max_cache_tokens: of the loop's budget. burst: the longest `Decode`.
        options: of the target's executor."""
        self.clock = VirtualClock()
        self.calls = Calls()
        of_target = Executor(
            replace(LIMITS, max_num_tokens=max_num_tokens),
            cost=COST, clock=self.clock, seed=seed, **options,
        )  # fmt: skip
        of_draft = DraftExecutor(
            LIMITS, cost=COST, clock=self.clock, seed=seed,
            accept_prob=accept_prob, error_prob=draft_error_prob, texts=of_target.texts,
        )  # fmt: skip
        self.executors = (
            keeping(of_target, self.calls.of_target),
            keeping(of_draft, self.calls.of_draft),
        )
        self.target = TrtllmTarget(
            of_target,
            fake_executor,
            TargetCapabilities(
                max_sequences=8, max_context_len=592, max_draft_len=8, max_decode_tokens=burst,
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


@pytest.mark.parametrize("policy", ["none", "fixed:3", "batch_table", "goodput_global", "goodput"])
def test_text_is_the_same_under_every_policy(policy: str) -> None:
    """12 requests over 8 rows; about 600 tokens an iteration hold them up now and then."""
    pair = Pair(hold_back_prob=0.1)
    numbers = [pair.harness.submit(prompt, 60, policy=policy) for prompt in PROMPTS]
    pair.harness.drain()
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        story = pair.harness.stories[number]
        assert story.tokens == fake_text(prompt, 60)
        assert story.finals == [FinishReason.LENGTH]
    drafted = sum(request.num_drafted for request in pair.harness.requests.values())
    assert (drafted > 0) == (policy != "none")
    pair.check_nothing_held()


def test_bursts_without_drafts() -> None:
    """60 tokens are the prompt's first and 59 more: seven bursts of 8, and one of 3."""
    pair = Pair()
    for prompt in PROMPTS[:4]:
        pair.harness.submit(prompt, 60, policy="none")
    pair.harness.submit(PROMPTS[4], 60, max_draft_len=0)
    pair.harness.drain()
    requests = [request for call in pair.calls.of_target for request in call]
    lengths = sorted(r.max_tokens for r in requests if r.streaming)
    assert lengths == [3] * 5 + [BURST] * 35
    assert not pair.calls.of_draft


def test_bursts_in_a_full_cache() -> None:
    """Two requests of 66 and 67 tokens in a budget of 110: one is preempted, and its burst is
    cancelled."""
    pair = Pair(max_cache_tokens=110)
    numbers = [pair.harness.submit(prompt, 60, policy="none") for prompt in PROMPTS[:2]]
    pair.harness.drain()
    for number, prompt in zip(numbers, PROMPTS, strict=False):
        assert pair.harness.stories[number].tokens == fake_text(prompt, 60)
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
    whole = [[r for r in call if not r.streaming] for call in pair.calls.of_target]
    assert max(len(call) for call in whole) == 1


def test_with_speculation_a_step_is_a_call_each() -> None:
    """One request a sequence and step, to each engine, all of a step in one call."""
    pair = Pair()
    for prompt in PROMPTS[:4]:
        pair.harness.submit(prompt, 60, policy="fixed:3")
    pair.harness.drain()
    verifying = [
        [r for r in call if r.external_draft_tokens_config] for call in pair.calls.of_target
    ]
    verifying = [call for call in verifying if call]
    assert [len(call) for call in verifying] == [len(call) for call in pair.calls.of_draft]
    steps = sum(request.num_steps for request in pair.harness.requests.values())
    undrafted = [r for call in pair.calls.of_target for r in call if r.streaming]
    assert sum(map(len, verifying)) + sum(r.max_tokens for r in undrafted) == steps
    # All four go on together: no step is in pieces.
    assert {len(call) for call in verifying[:10]} == {4}


def test_bursts_go_on_while_others_verify() -> None:
    """Beside drafts, a sequence without drafts generates one token at a time."""
    pair = Pair()
    slow = pair.harness.submit(PROMPTS[0], 100, policy="none")
    fast = pair.harness.submit(PROMPTS[1], 100, policy="fixed:4")
    pair.harness.step(8)
    records = [r for r in pair.harness.loop.records if r.num_drafted]
    assert len(records) >= 4
    assert all(record.target_s > 0.0 for record in records)
    assert pair.harness.stories[slow].tokens
    assert pair.harness.stories[fast].tokens
    pair.harness.drain()
    assert pair.harness.stories[slow].tokens == fake_text(PROMPTS[0], 100)


def test_the_time_of_a_pass_has_no_drafting_in_it() -> None:
    """The clock moves in passes alone: a step is its draft passes and its target's pass."""
    pair = Pair()
    pair.harness.submit(PROMPTS[0], 40, policy="fixed:4")
    pair.harness.drain()
    drafted = [record for record in pair.harness.loop.records if record.num_drafted]
    assert len(drafted) >= 5
    for record in drafted:
        assert record.draft_s > 0.0
        assert record.target_s == pytest.approx(record.total_s - record.draft_s)


def test_a_draft_engine_that_fails_costs_no_text() -> None:
    pair = Pair(draft_error_prob=0.5)
    number = pair.harness.submit(PROMPTS[3], 80, policy="fixed:4")
    pair.harness.drain()
    assert pair.harness.stories[number].tokens == fake_text(PROMPTS[3], 80)
    assert pair.harness.requests[number].num_drafted > 0
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
    tasks = [DraftTask(n, PROMPTS[n], len(PROMPTS[n]), 3, SamplingParams()) for n in (0, 1)]
    drafts = pair.proposer.propose(tasks)
    assert [len(draft.tokens) for draft in drafts] == [3, 0]
    assert DRAFT_TIMEOUT_S <= pair.clock.now() - start < DRAFT_TIMEOUT_S + 1.0
    # What still comes of it is of no step, and the next one is not disturbed.
    assert [len(draft.tokens) for draft in pair.proposer.propose(tasks[:1])] == [3]


def test_texts_that_are_new_to_the_draft_have_longer() -> None:
    """8 texts of 590 tokens, of which an iteration of 0.5 s reads one. All are known in the next
    step, in which the executor hangs."""
    clock = VirtualClock()
    cost = CostModel(PassTable((1,), (1,), ((0.5,),)))
    executor = Executor(LIMITS, cost=cost, clock=clock)
    proposer = TrtllmDraftProposer(
        executor, fake_executor, max_draft_len=8, max_context_len=600, vocab_size=VOCAB_SIZE,
        clock=clock.now,
    )  # fmt: skip
    texts = [tuple(range(n, n + 590)) for n in range(8)]
    tasks = [DraftTask(n, text, 590, 1, SamplingParams()) for n, text in enumerate(texts)]
    assert [len(draft.tokens) for draft in proposer.propose(tasks)] == [1] * 8

    def hang(timeout: Any) -> list[Any]:
        clock.sleep(timeout.total_seconds())
        return []

    executor.await_responses = hang  # type: ignore[assignment]
    start = clock.now()
    assert [len(draft.tokens) for draft in proposer.propose(tasks)] == [0] * 8
    assert clock.now() - start == pytest.approx(DRAFT_TIMEOUT_S, abs=0.1)


def test_a_draft_engine_that_takes_nothing_costs_no_text() -> None:
    pair = Pair()
    pair.executors[1].shutdown()
    number = pair.harness.submit(PROMPTS[3], 40, policy="fixed:4")
    pair.harness.drain()
    assert pair.harness.stories[number].tokens == fake_text(PROMPTS[3], 40)
    assert pair.harness.requests[number].num_drafted == 0


def test_drafts_end_with_the_end_token() -> None:
    pair = Pair(accept_prob=1.0)
    text = fake_text(PROMPTS[2], 6)
    sampling = SamplingParams(end_tokens=(1999, text[3]))
    task = DraftTask(1, PROMPTS[2], len(PROMPTS[2]), 6, sampling)
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
    assert pair.proposer.draft_lag(1, len(prompt)) == len(prompt) - 1
    pair.proposer.propose([DraftTask(1, prompt, len(prompt), 3, SamplingParams())])
    pair.proposer.observe(1, 3)
    assert pair.proposer.draft_lag(1, len(prompt) + 4) == 0
    assert pair.proposer.draft_lag(1, len(prompt) + 40) == 36
    pair.proposer.release(1)
    assert not pair.proposer._num_cached
    assert pair.proposer.num_available(1, range(597)) == 3


def plain_prompt(rng: random.Random) -> tuple[int, ...]:
    """One that the fake takes for a prompt: its last token does not follow the rule."""
    while True:
        *others, last = prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        if not others or last != (sum(others) + TOKEN_STEP * len(others)) % VOCAB_SIZE:
            return tuple(prompt)


@pytest.mark.parametrize("seed", range(2))
def test_hundreds_of_requests_with_cancels_and_errors(seed: int) -> None:
    """250 requests: every tenth is cancelled, some have end tokens, one engine request in fifty
    fails. Each has one last update, and the right text as far as it goes."""
    rng = random.Random(seed)
    pair = Pair(
        seed=seed, hold_back_prob=0.1, error_prob=0.005, draft_error_prob=0.02, max_num_tokens=900
    )
    harness, prompts = pair.harness, {}
    for _ in range(250):
        prompt = plain_prompt(rng)
        policy = rng.choice(["none", "fixed:2", "goodput", "goodput"])
        end = fake_text(prompt, 60)[rng.randrange(60)]
        sampling = SamplingParams(end_tokens=rng.choice([(), (end,), (VOCAB_SIZE + 1, end)]))
        number = harness.submit(prompt, rng.randint(1, 50), policy=policy, sampling=sampling)
        prompts[number] = prompt
        if rng.random() < 0.1:
            harness.inbox.cancel(rng.randint(max(1, number - 12), number))
        harness.step(rng.randint(0, 4))
    harness.drain(20_000)
    pair.check_nothing_held()
    ends = {number: story.finals for number, story in harness.stories.items()}
    assert all(len(finals) == 1 for finals in ends.values())
    assert {finals[0] for finals in ends.values()} == {
        FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, ErrorCode.INTERNAL
    }  # fmt: skip
    for number, story in harness.stories.items():
        request, text = harness.requests[number], fake_text(prompts[number], 60)
        assert story.tokens == text[: len(story.tokens)]
        assert set(story.tokens).isdisjoint(request.sampling.end_tokens)
        if ends[number] == [FinishReason.LENGTH]:
            assert len(story.tokens) == request.max_tokens
        if ends[number] == [FinishReason.STOP]:
            assert text[len(story.tokens)] in request.sampling.end_tokens
