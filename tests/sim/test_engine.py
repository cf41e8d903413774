"""The simulated engines: seconds of their passes, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import Decode, Event, Prefill, SequenceStart, Verify, Work
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.proposer import DraftTask
from smartspec_sim.engine import SimProposer, SimTarget
from smartspec_sim.simulate import SAMPLING, SimLimits
from smartspec_sim.workload import SimRequest
from smartspec_testing.clock import VirtualClock

CAPABILITIES = SimLimits(max_sequences=8).capabilities(100)
FLAT = PassTable((1,), (1, 16), ((1.0, 1.0),))


def polled(cost: CostModel, known: Sequence[int], work: list[Work]) -> tuple[list[Event], float]:
    """Events and seconds of a pass with this work. known: tokens of sequences 1, 2, .. before it;
    of them, the last one was generated. Drafts are correct in runs of 9 and 2."""
    clock = VirtualClock()
    texts = {n: SimRequest(n, 0.0, k - 1, 9, {DRAFT_MODEL: [9, 2]}) for n, k in enumerate(known, 1)}
    target = SimTarget(CAPABILITIES, cost, clock, texts)
    for number, text in texts.items():
        prompt = [0] * text.prompt_len
        target.begin(SequenceStart(number, prompt, len(prompt), SAMPLING))
        target.submit([Prefill(number, tuple(prompt), 0, True)])
        assert [event.tokens for event in target.poll(0.0)] == [(0,)]
    for item in work:
        if isinstance(item, Prefill):
            target.begin(SequenceStart(item.sequence, [0] * 30, 30, SAMPLING))
    start_s = clock.now()
    target.submit(work)
    events = target.poll(0.0)
    assert target.poll(0.0) == []
    return events, clock.now() - start_s


def chunk(sequence: int, num_tokens: int) -> Prefill:
    return Prefill(sequence, (0,) * num_tokens, 0, False)


def test_one_pass_runs_all_work() -> None:
    """3 rows, 4 + 1 + 5 = 10 tokens, a context of (10 + 20 + 0) / 3 = 10, at 1 s and 0.1 s per row
    and token of context: 1 + 3 x 10 x 0.1 = 4 s, and 0.5 s of the host."""
    table = PassTable((1,), (1, 16), ((1.0, 1.0),), context_s=0.1)
    work = [Verify(1, Draft((0,) * 3)), Decode(2, 1), chunk(3, 5)]
    (verified, decoded, read), seconds = polled(CostModel(table, host_s=0.5), (10, 20), work)
    assert (verified.num_drafted, verified.num_accepted, len(verified.tokens)) == (3, 2, 3)
    assert (len(decoded.tokens), read.tokens) == (1, ())
    assert seconds == pytest.approx(4.5)
    assert verified.pass_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("is_decoding", "chunks", "seconds"),
    [
        (True, (), 4.0),  # two rows with 15 tokens of context each: 1 + 15 x 2 x 0.1
        (True, (5,), 4.0 + 2.0),
        (True, (3, 4), 4.0 + 4.0),  # as 7 tokens of one prompt
        (False, (5,), 1.0 + 2.0),  # the pass of one row without context
        (False, (1,), 1.0),
    ],
)
def test_prompt_tokens_are_charged_as_measured(
    is_decoding: bool, chunks: tuple[int, ...], seconds: float
) -> None:
    """Prompt tokens beyond the first take 0.5 s each up to 5, and 1 s each from there. They are not
    charged like drafts, which would take 10 s each."""
    table = PassTable((1, 2), (1, 3, 4), ((1.0, 1.0, 11.0),) * 2, context_s=0.1)
    cost = CostModel(table, host_s=0.5, prompt=PassTable((1,), (1, 5, 9), ((2.0, 4.0, 8.0),)))
    work: list[Work] = [Verify(1, Draft((0,) * 3)), Decode(2, 1)] if is_decoding else []
    work += [chunk(sequence, num) for sequence, num in enumerate(chunks, start=3)]
    events, took_s = polled(cost, (10, 20), work)
    assert [event.pass_s for event in events] == pytest.approx([seconds] * len(work))
    assert took_s == pytest.approx(seconds + 0.5)


def test_drafting_takes_its_passes_and_its_prefill() -> None:
    """Lengths 3, 1 and 3 of three sequences: a pass of 3 rows and two of 2. All 10 + 6 + 8 known
    tokens but the last of each are prefilled: 21, in a pass of all three before. Draft passes take
    1 s and 0.5 s per row."""
    cost = CostModel(FLAT, draft=PassTable((1, 3), (1,), ((1.5,), (2.5,))), draft_prefill_s=0.01)
    clock = VirtualClock()
    proposer = SimProposer(DRAFT_MODEL, {}, 7, cost, clock)
    lengths = {1: (10, 3), 2: (6, 1), 3: (8, 3)}
    assert [proposer.draft_prefill_len(s, n) for s, (n, _) in lengths.items()] == [9, 5, 7]
    drafts = proposer.propose(
        [DraftTask(SequenceStart(s, [0] * n, 4, SAMPLING), k) for s, (n, k) in lengths.items()]
    )
    assert [len(draft.tokens) for draft in drafts] == [3, 1, 3]
    assert clock.now() == pytest.approx(2.5 + 2.5 + 2 * 2.0 + 21 * 0.01)
    proposer.observe(1, 3)  # all accepted: the last draft was never computed, and one token came
    proposer.observe(2, 0)
    assert [proposer.draft_prefill_len(*pair) for pair in ((1, 14), (2, 7), (2, 9))] == [1, 0, 2]


def test_the_counterfactual_is_what_the_target_accepts() -> None:
    """2 drafts at the second position are right; 3 tokens were generated by other means."""
    request = SimRequest(1, 0.0, 8, 20, {PROMPT_LOOKUP: [0, 2] * 10})
    lookup = SimProposer(PROMPT_LOOKUP, {1: request}, 7, CostModel(FLAT), VirtualClock())
    assert lookup.counterfactual(1, [0] * 9, [0]) == (1, 1)
    assert lookup.counterfactual(1, [0] * 9, [0, 0, 0]) == (3, 2)
    assert lookup.counterfactual(1, [0] * 10, [0]) == (1, 0)
