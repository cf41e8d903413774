"""What is learned of a look-up that was not taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import VOCAB_SIZE

from smartspec_py.core.types import SamplingParams, SequenceId, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.engines.drafts.lookup import PromptLookupProposer
from smartspec_py.serving.request import Request, RequestState
from smartspec_py.serving.speculation import Speculation
from smartspec_py.serving.step import Mode
from smartspec_testing.fake_proposer import FakeProposer

NAMES = ("draft_model", "prompt_lookup")
TEXT = [1, 2, 3, 4, 5, 1, 2]
"""What followed 1, 2 before were 3, 4, 5."""


class Asked(PromptLookupProposer):
    """Remembers of which sequences it was asked."""

    def __init__(self) -> None:
        super().__init__(max_draft_len=4)
        self.asked: list[SequenceId] = []

    def counterfactual(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        self.asked.append(sequence)
        return super().counterfactual(sequence, tokens, generated)


def made(policy: str = "goodput", sequence: SequenceId = 1) -> Request:
    request = Request(sequence, list(TEXT), 5, 60, SamplingParams(), policy, 4)
    request.proposers, request.state = NAMES, RequestState.DECODING
    return request


@pytest.fixture
def lookup() -> Asked:
    return Asked()


@pytest.fixture
def speculation(lookup: Asked) -> Speculation:
    return Speculation({NAMES[0]: FakeProposer(0.5, vocab_size=VOCAB_SIZE), NAMES[1]: lookup})


def first_prob(speculation: Speculation, request: Request) -> float:
    """That the first token looked up is right, as believed now."""
    (view,) = speculation.views([request], {}, 0.0)
    return float(view.options[1].accept_probs[0])


@pytest.mark.parametrize(("token", "is_better"), [(3, True), (9, False)])
def test_estimates_follow_what_it_would_have_brought(
    speculation: Speculation, token: int, is_better: bool
) -> None:
    request = made()
    before = first_prob(speculation, request)
    for _ in range(5):
        views = speculation.views([request], {}, 0.0)
        speculation.observe([(request, Event(1, (token,)))], views)
    assert (first_prob(speculation, request) > before) is is_better


def test_what_was_taken_counts_once(speculation: Speculation, lookup: Asked) -> None:
    request = made()
    views = speculation.views([request], {}, 0.0)
    speculation.propose([request], views, SpecPlan({1: 4}, choices={1: 1}))
    speculation.observe([(request, Event(1, (3, 4, 9), 4, 2))], views)
    assert lookup.asked == []


def test_no_proposer_works_for_steps_that_are_not_planned(
    speculation: Speculation, lookup: Asked
) -> None:
    """No search for a match, no counterfactual, and estimates stay as they are."""
    request, asked_for = made(), made("fixed:2", sequence=2)
    before = first_prob(speculation, request)
    views = speculation.views([request, asked_for], {}, 0.0, mode=Mode.REST)
    assert [len(view.options) for view in views] == [1, 2]
    assert views[0].options[0].max_draft_len == 0
    speculation.observe([(request, Event(1, (3,))), (asked_for, Event(2, (9,)))], views)
    assert lookup.asked == [2]
    speculation.release(asked_for)
    state = speculation.state()
    for _ in range(100):
        views = speculation.views([request], {}, 0.0, mode=Mode.REST)
        speculation.observe([(request, Event(1, (9,)))], views)
    assert speculation.state() == state
    assert first_prob(speculation, request) == pytest.approx(before, abs=0.05)


@pytest.mark.parametrize("policy", ["none", "goodput"])
def test_nobody_looks_back_for_requests_without_drafts(
    speculation: Speculation, lookup: Asked, policy: str
) -> None:
    request = made(policy)
    request.proposers = NAMES[1:]
    views = speculation.views([request], {}, 0.0)
    speculation.observe([(request, Event(1, (3,)))], views)
    assert lookup.asked == ([1] if policy == "goodput" else [])


def test_bursts_are_left_out_and_their_neighbours_are_not(
    speculation: Speculation, lookup: Asked
) -> None:
    """The second event of a burst begins where the first ended, which is not known yet."""
    one, other = made(), made(sequence=2)
    views = speculation.views([one, other], {}, 0.0)
    burst = [(one, Event(1, (3,), is_last=False)), (one, Event(1, (4,)))]
    speculation.observe([*burst, (other, Event(2, (3,)))], views)
    assert lookup.asked == [2]


def test_where_it_had_no_guess_there_is_nothing_to_learn(
    speculation: Speculation, lookup: Asked
) -> None:
    request = made()
    request.tokens[:] = range(7)
    views = speculation.views([request], {}, 0.0)
    speculation.observe([(request, Event(1, (3,)))], views)
    assert lookup.asked == []
