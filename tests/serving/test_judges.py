"""`goodput_confidence`: how deep drafting goes by how sure the draft is, in the loop."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import pytest
from harness import COST, VOCAB_SIZE, LoopHarness

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams, SequenceId, Verification
from smartspec_py.engines.base import NO_DRAFT, Draft, DraftTask, PassRule, ProposerCapabilities
from smartspec_py.engines.clock import VirtualClock
from smartspec_py.proposers.fake import FakeProposer

EASY, HARD = 0.97, 0.1
PROMPTS = tuple((3, 4 + n, 21) for n in range(4))


def stretches(num_positions: int) -> list[bool]:
    """Easy text and hard text in turn, of 1 to 15 and 1 to 7 tokens."""
    rng, found = random.Random(7), list[bool]()
    while len(found) < num_positions:
        found += [True] * rng.randint(1, 15) + [False] * rng.randint(1, 7)
    return found


IS_EASY = stretches(2000)


def ease(tokens: Sequence[int], position: int) -> float:
    return EASY if IS_EASY[position] else HARD


class SureProposer(FakeProposer):
    """Knows how probable each of its drafts is; makes them pass by pass, as a rule allows."""

    def __init__(self, clock: VirtualClock, cost: CostModel) -> None:
        super().__init__(ease, vocab_size=VOCAB_SIZE, cost=cost, clock=clock)
        self._pass_clock, self._pass_cost = clock, cost
        self.num_drafted: Counter[SequenceId] = Counter()

    @property
    def capabilities(self) -> ProposerCapabilities:
        return replace(super().capabilities, says_confidence=True)

    def propose(self, tasks: Sequence[DraftTask], rule: PassRule | None = None) -> list[Draft]:
        if rule is None:
            return super().propose(tasks)
        drafts = [self._draft(task) for task in tasks]
        lengths = [0] * len(tasks)
        active = [index for index, task in enumerate(tasks) if task.draft_len]
        while active:
            active = [index for index in active if lengths[index] < tasks[index].draft_len]
            active = list(compress(active, rule.going_on(active))) if active else []
            if not active:
                break
            self._pass_clock.sleep(self._pass_cost.draft_s(len(active)))
            probs = [ease((), len(tasks[i].tokens) + lengths[i]) for i in active]
            rule.hear(active, [math.log(p / (1 - p)) for p in probs])
            for index in active:
                lengths[index] += 1
        for task, length in zip(tasks, lengths, strict=True):
            self.num_drafted[task.sequence] += length
        return [
            Draft(d.tokens[:n]) if n else NO_DRAFT for d, n in zip(drafts, lengths, strict=True)
        ]


def served(
    policies: Sequence[str], num_tokens: int, sampling: SamplingParams | None = None
) -> LoopHarness:
    harness = LoopHarness(accept_prob=ease)
    proposer = SureProposer(harness.clock, COST)
    harness.proposer = proposer
    harness.loop._drafters.__init__({"draft_model": proposer})  # type: ignore[misc]
    for prompt, policy in zip(PROMPTS, policies, strict=False):
        harness.submit(prompt, num_tokens, policy=policy, sampling=sampling)
    harness.drain(most_steps=20_000)
    return harness


def texts(harness: LoopHarness) -> list[list[int]]:
    return [story.tokens for story in harness.stories.values()]


def test_it_is_faster_than_every_draft_length_and_changes_no_text() -> None:
    """Where drafts know whether they are right, no length that is fixed beforehand can keep up.
    Drafts that were made and not verified are part of the time."""
    seconds, found = {}, {}
    for policy in (*(f"fixed:{k}" for k in range(1, 7)), "goodput", "goodput_confidence", "none"):
        harness = served([policy] * 4, 600)
        seconds[policy], found[policy] = harness.clock.now(), texts(harness)
    assert all(text == found["none"] for text in found.values())
    best = min(s for policy, s in seconds.items() if policy != "goodput_confidence")
    assert seconds["goodput_confidence"] < 0.97 * best, seconds


def test_some_drafts_are_left_unverified_and_steps_are_still_learned_from() -> None:
    harness = served(["goodput_confidence"] * 4, 600)
    proposer = harness.proposer
    assert isinstance(proposer, SureProposer)
    num_verified = sum(request.num_drafted for request in harness.requests.values())
    assert 0 < num_verified < proposer.num_drafted.total()
    # The draft's passes are counted as they were run: the factor on them stays that of the profile.
    assert harness.loop.records[-1].decision.cost.draft_factor == pytest.approx(1.0, abs=0.02)


def test_others_in_the_same_step_get_what_they_asked_for() -> None:
    harness = served(["goodput_confidence", "fixed:3", "none", "goodput"], 300)
    _, fixed, none, _ = harness.requests.values()
    assert (none.num_drafted, none.num_accepted) == (0, 0)
    num_full = fixed.num_drafted // 3
    assert fixed.num_drafted - 3 * num_full <= 2  # only its last steps have room for less
    assert texts(harness) == texts(served(["none"] * 4, 300))


def test_what_is_verified_by_rejection_is_verified_whole() -> None:
    """To leave out a draft for what it is would bend the distribution; see `core.confidence`."""
    sampling = SamplingParams(temperature=1.0, seed=5, verification=Verification.REJECTION)
    harness = served(["goodput_confidence"] * 4, 200, sampling)
    proposer = harness.proposer
    assert isinstance(proposer, SureProposer)
    for number, request in harness.requests.items():
        assert request.num_drafted == proposer.num_drafted[number] > 0


def test_without_a_proposer_that_says_how_sure_it_is_it_is_goodput() -> None:
    found = []
    for policy in ("goodput", "goodput_confidence"):
        harness = LoopHarness(accept_prob=0.7)
        harness.submit(PROMPTS[0], 200, policy=policy)
        harness.drain()
        found.append((harness.clock.now(), texts(harness)))
    assert found[0] == found[1]
