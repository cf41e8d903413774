"""The step loop over the fake engine, stepped by hand on a virtual clock: no threads, no waiting.

Whatever the policy, the load or the moment of a cancel: the text is the fake engine's, every
request ends once, and nothing is held afterwards.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest
from harness import CAPABILITIES, COST, VOCAB_SIZE, LoopHarness, fake_text

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import evaluate
from smartspec_py.core.types import (
    FinishReason,
    SamplingParams,
    SequenceView,
    SpecPlan,
    TokenLogProb,
)
from smartspec_py.engines.base import Event
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.serving import controller as controller_module
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.step import Reason
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_proposer import FakeProposer

POLICIES = ["none", "fixed:1", "fixed:3", "fixed:8", "goodput"]

PROMPT = (3, 4)
"""Sums to 7: its text is 21, 28, 35, 42, .."""


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


def prompt_of(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple((first + i) % 100 for i in range(length))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("accept_prob", [0.0, 0.6, 1.0])
def test_a_mixed_batch_has_the_same_text_under_every_policy(
    policy: str, accept_prob: float
) -> None:
    """Prompts shorter and longer than a chunk, greedy and sampled, one token and many."""
    harness = LoopHarness(accept_prob=accept_prob)
    for length, max_tokens, sampling in (
        (2, 40, SamplingParams()),
        (200, 25, sampled(5)),
        (64, 1, SamplingParams()),
        (1, 2, sampled(2**63)),
        (65, 30, sampled(9)),
    ):
        harness.submit(prompt_of(length), max_tokens, policy=policy, sampling=sampling)
    assert harness.drain() == [FinishReason.LENGTH] * 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("end_tokens", "text"),
    [
        ((42,), [21, 28, 35]),  # the fourth token ends it and is not emitted
        ((21,), []),  # the first token, drawn by the prefill
        ((22,), [21, 28, 35, 42, 49, 56]),  # never drawn
        ((22, 42, 35), [21, 28]),  # the one of them that comes first
    ],
)
def test_an_end_token_ends_the_text(
    policy: str, end_tokens: tuple[int, ...], text: list[int]
) -> None:
    harness = LoopHarness(accept_prob=1.0)
    harness.submit(PROMPT, 6, policy=policy, sampling=SamplingParams(end_tokens=end_tokens))
    is_cut = len(text) == 6
    assert harness.drain() == [FinishReason.LENGTH if is_cut else FinishReason.STOP]
    assert harness.stories[1].tokens == text


def test_the_text_is_the_same_with_another_length_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, lengths = random.Random(3), set()

    def jumping(views: Sequence[SequenceView], cost: CostModel, _: object) -> SpecPlan:
        chosen = [rng.randint(0, view.options[0].max_draft_len) for view in views]
        lengths.update(chosen)
        return evaluate(views, chosen, cost)

    monkeypatch.setattr("smartspec_py.serving.controller.plan", jumping)
    harness = LoopHarness(accept_prob=0.8)
    for length in (1, 30, 90):
        harness.submit(prompt_of(length), 50)
    assert harness.drain() == [FinishReason.LENGTH] * 3
    assert lengths == set(range(9))


def test_a_cancel_in_mid_burst_cuts_it_short() -> None:
    """The client hears at once; the row is freed with the last event of the burst of 32."""
    harness = LoopHarness(max_decode_tokens=32)
    number = harness.submit(PROMPT, 40, policy="none")
    harness.step(3)
    harness.inbox.cancel(number)
    harness.step()
    assert harness.stories[number].finals == [FinishReason.CANCELLED]
    assert harness.stories[number].tokens == fake_text(PROMPT, 3)
    assert harness.loop.num_live == 0
    harness.check_nothing_held()


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """Of 640 tokens, a step reads so many that they are 64 with those of the others."""
    harness = LoopHarness()
    others = [harness.submit(PROMPT, 200) for _ in range(2)]
    harness.step(3)
    number = harness.submit(prompt_of(640), 1)
    left = 640
    while left:
        before = [len(harness.stories[other].tokens) for other in others]
        harness.step()
        after = [len(harness.stories[other].tokens) for other in others]
        assert all(b < a for b, a in zip(before, after, strict=True))
        record = harness.loop.records[-1]
        num_decoded = 2 + sum(record.decision.plan.draft_lens.values())
        assert record.num_prefill_tokens == min(left, 64 - num_decoded)
        left -= record.num_prefill_tokens
    assert harness.stories[number].finals == [FinishReason.LENGTH]


@pytest.mark.parametrize("position", [0, 149])
def test_a_prompt_that_fails_in_the_engine_fails_alone(position: int) -> None:
    """The token 999 is in the first or the last chunk of the prompt."""
    harness = LoopHarness(poison_token=999)
    prompt = [*prompt_of(150)]
    prompt[position] = 999
    for one in (prompt_of(20), tuple(prompt), prompt_of(30)):
        harness.submit(one, 15)
    assert harness.drain() == [FinishReason.LENGTH, ErrorCode.INTERNAL, FinishReason.LENGTH]
    assert "token 999" in str(harness.stories[2].updates[-1].error)


@pytest.mark.parametrize("max_decode_tokens", [1, 4])
@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_a_text_that_fails_in_the_engine_fails_alone(
    policy: str, max_decode_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The sixth token of PROMPT is 56: the client has the first ones and a reason, the log a line.

    Nothing of the step with the failure is sent.
    """
    harness = LoopHarness(poison_token=56, max_decode_tokens=max_decode_tokens)
    harness.submit(prompt_of(20), 15, policy=policy)
    number = harness.submit(PROMPT, 15, policy=policy)
    assert harness.drain() == [FinishReason.LENGTH, ErrorCode.INTERNAL]
    story = harness.stories[number]
    assert 1 <= len(story.tokens) <= 5
    reason = "the engine failed this request: the text contains token 56"
    assert story.updates[-1].error == (ErrorCode.INTERNAL, reason)
    assert [r.getMessage() for r in caplog.records] == [f"request {number}: {reason}"]


def test_all_rejected_switches_off_within_35_steps_and_probes_again() -> None:
    """Drafting once costs 1.2 ms on 10 ms: off below 0.12. The estimate after 23 rejections:

    shared 5.6/30.7 = 0.182, own 32 * 0.182/(32 + 18.6) = 0.115. Later it drifts up and one draft
    is tried now and then; a rejected one costs 12 % of a step, so 1 in 9 costs 1.3 %.
    """
    harness = LoopHarness(accept_prob=0.0)
    number = harness.submit(PROMPT, 1000)  # of which all steps are remembered
    harness.drain()
    drafted = [
        r.decision.plan.draft_lens[number]
        for r in harness.loop.records
        if r.decision.plan.draft_lens
    ]
    # The first steps are the guard's: it wants to know what not speculating is worth.
    assert max(drafted[:10]) > 0
    assert 0 in drafted[10:35]
    late = drafted[500:]
    assert 0 < fmean(k > 0 for k in late) < 1 / 9
    assert max(late) <= 2


@pytest.mark.parametrize("draft_prefill_s", [0.0, 0.001])
def test_text_that_drafts_well_again_is_speculated_on_again(draft_prefill_s: float) -> None:
    """All rejected up to position 300, all accepted from there: deep within 200 tokens.

    "Off" must not be for good because the draft cache falls ever further behind: at 1 ms a token
    catching up costs 0.3 s once, and drafting then saves 8 of 10 ms for each of 700 tokens.
    """
    harness = LoopHarness(
        accept_prob=lambda tokens, position: 0.0 if position < 300 else 1.0,
        cost=replace(COST, draft_prefill_s=draft_prefill_s),
    )
    harness.submit(PROMPT, 1000)
    assert harness.drain() == [FinishReason.LENGTH]
    position, drafted = 0, {}
    for record in harness.loop.records:
        for draft_len in record.decision.plan.draft_lens.values():
            drafted[position] = draft_len
        position += record.num_generated
    assert fmean(k for at, k in drafted.items() if 100 < at < 290) < 0.5
    assert fmean(k for at, k in drafted.items() if 500 < at < 980) > 5


def decoding_goodput(policy: str, accept_prob: float) -> float:
    """Tokens a second of one request's decoding, behind the first 100 steps."""
    harness = LoopHarness(accept_prob=accept_prob)
    harness.submit(PROMPT, 1000, policy=policy)
    harness.drain()
    steps = [record for record in harness.loop.records if record.decision.plan.draft_lens][100:]
    return sum(r.num_generated for r in steps) / sum(r.total_s for r in steps)


@pytest.mark.parametrize(
    ("accept_prob", "best_policy"),
    [
        # E/T in tokens for each 10 ms, by COST: 1 at k = 0. A draft costs 1.2 ms.
        (0.0, "none"),
        (0.5, "fixed:2"),  # 1.5/1.12 = 1.34, 1.75/1.24 = 1.41, 1.875/1.36 = 1.38
        (0.8, "fixed:5"),  # 3.36/1.48 = 2.27, 3.69/1.60 = 2.31, 3.95/1.72 = 2.30
    ],
)
def test_goodput_is_within_two_percent_of_the_best_fixed_length(
    accept_prob: float, best_policy: str
) -> None:
    """The drafts that are right are the same for both: no statistics in between."""
    best = decoding_goodput(best_policy, accept_prob)
    assert decoding_goodput("goodput", accept_prob) >= 0.98 * best


def test_a_request_shows_before_its_first_step() -> None:
    """A stop trusts that: what is not shown to be in flight may be killed with the server."""
    harness = LoopHarness(max_sequences=1)
    for _ in range(2):
        came_s, num_shown = harness.clock.now(), len(harness.states)
        harness.submit(PROMPT, 4)
        harness.submit(PROMPT, 4)
        harness.loop.step()
        shown_s, state = harness.states[num_shown]
        assert shown_s == came_s < harness.clock.now()
        assert state.num_running + state.num_waiting == 2
        harness.drain()
        harness.step()
        assert harness.states[-1][1].num_running == 0


def test_limits_on_drafts_and_the_progress_of_a_request() -> None:
    """All drafts are accepted. Each request's first token comes with its prompt. With r tokens to
    go, a step emits up to k + 1, so k is at most r - 1.

    fixed:8: 7 tokens are 1 and 5 drafts with the target's own. fixed:3: 10 tokens are 1, 4, 4 and
    1. The others have limits of 2 and 0 drafts: 1, 3, 3, and single tokens.
    """
    harness = LoopHarness(accept_prob=1.0)
    for max_tokens, policy, max_draft_len in (
        *((7, "fixed:8", 8), (10, "fixed:3", 8)),
        *((7, "fixed:8", 2), (3, "goodput", 0)),
    ):
        harness.submit(PROMPT, max_tokens, policy=policy, max_draft_len=max_draft_len)
    harness.drain()
    progress = [story.updates[-1].progress for story in harness.stories.values()]
    counts = [(p.num_steps, p.num_drafted, p.num_accepted) for p in progress]
    assert counts == [(1, 5, 5), (3, 6, 6), (2, 4, 4), (2, 0, 0)]


def test_a_record_tells_decoding_and_prefill_apart() -> None:
    """One row decodes without drafts: a pass of 10 ms; beside it a chunk of 63 tokens.

    That chunk is 0.010 + 62 * 0.0002 = 0.0224 s, so the step lasts 0.0324 s.
    """
    harness = LoopHarness()
    harness.submit(PROMPT, 20, policy="none")
    harness.step(2)
    harness.submit(prompt_of(200), 1)
    harness.step()
    record = harness.loop.records[-1]
    assert (record.batch_size, record.num_prefill_tokens, record.num_generated) == (1, 63, 1)
    assert record.total_s == pytest.approx(0.0324)
    assert record.draft_s == 0.0
    assert record.target_s == pytest.approx(0.010)


@pytest.mark.parametrize("cancelled", [None, 1, 2, 3])
def test_a_dead_engine_is_not_used_again(cancelled: int | None) -> None:
    """Everyone hears once, also with a cancel on its way.

    1 decodes, 2 is in the middle of its prompt, 3 waits.
    """
    harness = LoopHarness(max_sequences=2)
    numbers = [harness.submit(prompt_of(length), 20) for length in (5, 300, 5)]
    harness.step(2)
    gone = Mock(side_effect=RuntimeError("the engine is gone"))
    for name in ("poll", "cancel", "release"):
        setattr(harness.target, name, gone)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        harness.step()
    if cancelled is not None:
        harness.inbox.cancel(cancelled)
    harness.loop.lifecycle.fail_all(ErrorCode.INTERNAL, "the loop ended")
    harness.loop.flush()
    assert gone.call_count == 1
    for number in numbers:
        assert harness.stories[number].finals == [ErrorCode.INTERNAL]


def test_a_plan_that_raises_costs_only_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = LoopHarness(accept_prob=0.9)
    works, calls = controller_module.plan, iter(range(1000))

    def fails_sometimes(*args: Any) -> Any:
        if next(calls) in (3, 5):
            raise IndexError("a fault of the planner")
        return works(*args)

    monkeypatch.setattr(controller_module, "plan", fails_sometimes)
    harness.submit(prompt_of(5), 40, policy="fixed:2")
    assert harness.drain() == [FinishReason.LENGTH]
    failed = [one for one in harness.loop.records if one.decision.reason is Reason.FAILED]
    assert [one.num_drafted for one in failed] == [0, 0]
    assert len(caplog.records) == 1, "logged once"


def test_records_keep_no_tensors() -> None:
    """Hidden states and log-probabilities reach the proposers and the client, not the records."""
    harness = LoopHarness()
    poll, log_prob = harness.target.poll, TokenLogProb(1, -1.0)

    def poll_with_states(timeout_s: float) -> Any:
        return [
            event._replace(hidden=bytearray(8), log_probs=(log_prob,) * len(event.tokens))
            for event in poll(timeout_s)
        ]

    harness.target.poll = poll_with_states  # type: ignore[method-assign]
    number = harness.submit(prompt_of(5), 8)
    harness.drain()
    updates = harness.stories[number].updates
    assert sum(len(update.log_probs) for update in updates) == 8
    events = [event for record in harness.loop.records for event in record.events]
    assert len(events) > 1
    assert not any(event.hidden or event.log_probs or event.prompt_log_probs for event in events)


@pytest.mark.parametrize("on_device", [None, object()])
def test_drafts_that_a_device_computes_meanwhile(on_device: object) -> None:
    """When the target's pass is launched, the device has 3 ms of drafting left."""

    class Late(FakeTarget):
        def poll(self, timeout_s: float) -> list[Event]:
            clock.sleep(0.003)
            return super().poll(timeout_s)

    class OnDevice(FakeProposer):
        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
            return [draft._replace(on_device=on_device) for draft in super().propose(tasks)]

    clock = VirtualClock()
    target = Late(CAPABILITIES, cost=COST, clock=clock)
    proposer = OnDevice(0.7, vocab_size=VOCAB_SIZE, cost=COST, clock=clock)
    harness = LoopHarness(target=target, proposer=proposer, clock=clock)
    harness.submit(PROMPT, 20, policy="fixed:3")
    harness.step(5)
    record = harness.loop.records[-1]
    draft_s = 3 * COST.draft_s(1)
    assert record.draft_s == pytest.approx(draft_s + 0.003 * (on_device is not None))
    assert record.target_s + draft_s + 0.003 == pytest.approx(record.total_s)
