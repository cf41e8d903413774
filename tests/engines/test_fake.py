"""The prompt (3, 4) sums to 7; with 50 tokens in the vocabulary its text is worked out below.

position  2   3   4   5   6   7            8             9
7 + 7 t   21  28  35  42  49  56 -> 6      63 -> 13      70 -> 20
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import Decode, Event, Prefill, SequenceStart, Verify
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.proposer import DraftTask
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import FAKE_CAPABILITIES, FakeTarget, fake_token
from smartspec_testing.fake_proposer import FakeProposer

PROMPT = (3, 4)
TEXT = (21, 28, 35, 42, 49, 6, 13, 20)
GREEDY = SamplingParams()
CAPABILITIES = replace(
    FAKE_CAPABILITIES, vocab_size=50, max_sequences=2, max_draft_len=4, max_prefill_tokens=8
)

COST = CostModel(
    target=PassTable(rows=(1, 2), tokens_per_row=(1, 4), seconds=((1.0, 4.0), (2.0, 8.0))),
    draft=PassTable(rows=(1, 2), tokens_per_row=(1,), seconds=((0.1,), (0.3,))),
    draft_prefill_s=0.01,
)
"""A target pass takes 1 s a token, a draft pass 0.1 s for one sequence and 0.3 s for two."""


def prefill(sequence=1, tokens=PROMPT, start=0, is_last=True):
    return Prefill(sequence, tokens, start, is_last)


def begun(*prompts, capabilities=CAPABILITIES, sampling=GREEDY, **options):
    """A target at which sequences 1, 2, .. have begun with these prompts."""
    target = FakeTarget(capabilities, **options)
    for sequence, prompt in enumerate(prompts, start=1):
        assert target.begin(SequenceStart(sequence, prompt, len(prompt), sampling)) == 0
    return target


def prefilled(capabilities=CAPABILITIES, sampling=GREEDY, **options):
    """A target that has read PROMPT as sequence 1 and drawn 21."""
    target = begun(PROMPT, capabilities=capabilities, sampling=sampling, **options)
    target.submit([prefill()])
    assert target.poll(0.0)[0].tokens == TEXT[:1]
    return target


@pytest.mark.parametrize(
    ("sampling", "position", "token"),
    [
        (GREEDY, 2, 21),
        (GREEDY, 7, 6),
        (SamplingParams(temperature=1.0, seed=5), 2, 26),
        (SamplingParams(temperature=1.0, seed=5, top_k=1), 2, 21),
    ],
)
def test_tokens_follow_the_rule(sampling, position, token):
    assert fake_token(PROMPT, position, 50, sampling) == token


def test_a_prompt_may_come_in_chunks():
    target = begun(PROMPT)
    target.submit([prefill(tokens=(3,), is_last=False)])
    assert target.poll(0.0) == [Event(1)]
    target.submit([prefill(tokens=(4,), start=1)])
    assert target.poll(0.0) == [Event(1, (21,))]


@pytest.mark.parametrize(
    ("end_tokens", "drafts", "tokens", "num_accepted", "finish"),
    [
        ((), (28, 35), (28, 35, 42), 2, None),
        ((), (28, 36), (28, 35), 1, None),
        ((), (29, 35), (28,), 0, None),
        # The end token was drafted, and is accepted; the draft behind it is not put to the test.
        ((35,), (28, 35, 42), (28,), 2, FinishReason.STOP),
        ((35,), (28, 36), (28,), 1, FinishReason.STOP),
        ((28,), (29,), (), 0, FinishReason.STOP),
        ((9, 35, 28), (29,), (), 0, FinishReason.STOP),
        ((9, 8, 42), (28, 35), (28, 35), 2, FinishReason.STOP),
    ],
)
def test_verify_keeps_the_accepted_drafts_and_adds_one(
    end_tokens, drafts, tokens, num_accepted, finish
):
    target = prefilled(sampling=SamplingParams(end_tokens=end_tokens))
    target.submit([Verify(1, Draft(drafts))])
    assert target.poll(0.0) == [Event(1, tokens, len(drafts), num_accepted, finish=finish)]
    target.check_integrity()


def test_a_burst_brings_a_token_a_poll_until_it_is_cancelled():
    target = prefilled(replace(CAPABILITIES, max_decode_tokens=8))
    target.submit([Decode(1, 2)])
    assert target.poll(0.0) == [Event(1, (28,), is_last=False)]
    assert target.poll(0.0) == [Event(1, (35,))]
    target.submit([Decode(1, 8)])
    target.poll(0.0)
    target.cancel(1)
    assert target.poll(0.0) == [Event(1, (49,))]
    assert target.poll(0.0) == []
    target.submit([Verify(1, Draft((6,)))])
    assert target.poll(0.0)[0].tokens == (6, 13)


def test_a_poll_lasts_its_passes():
    """Sequence 1 verifies 1 draft, 2 tokens: 2 s. The prompt of sequence 2 has 3 tokens: 3 s."""
    clock = VirtualClock()
    target = prefilled(cost=COST, clock=clock)
    assert clock.now() == pytest.approx(2.0)  # the prompt (3, 4)
    target.begin(SequenceStart(2, (1, 2, 3), 3, GREEDY))
    target.submit([Verify(1, Draft((28,))), prefill(2, (1, 2, 3))])
    assert [event.pass_s for event in target.poll(0.0)] == pytest.approx([2.0, 3.0])
    assert clock.now() == pytest.approx(7.0)
    assert target.time_pass(batch_size=2, tokens_per_row=4, context_len=0) == pytest.approx(8.0)
    assert clock.now() == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (Verify(9, Draft((28,))), KeyError),
        (Verify(1, Draft()), AssertionError),
        (Verify(1, Draft((28,) * 5)), AssertionError),
        (Verify(1, Draft((50,))), AssertionError),
        (Decode(1, 2), AssertionError),
        (prefill(1), AssertionError),
        (prefill(2, (5,)), AssertionError),  # sequence 2 began with 6
        (prefill(2, (6,)), AssertionError),  # nine more follow: it is not the last
        (prefill(2, (6,), is_last=False, start=1), AssertionError),
        (prefill(2, (6,) * 9, is_last=False), AssertionError),
    ],
)
def test_wrong_work_raises(work, error):
    """Sequence 2 has begun with ten tokens; chunks of 8 are the largest."""
    target = prefilled()
    target.begin(SequenceStart(2, (6,) * 10, 10, GREEDY))
    with pytest.raises(error):
        target.submit([work])


def test_a_sequence_that_was_preempted_begins_again_with_what_it_has():
    """Released at 3, 4, 21, 28: it reads those four anew, and the text goes on with 35."""
    target = prefilled()
    target.submit([Decode(1, 1)])
    target.poll(0.0)
    target.release(1)
    assert target.begin(SequenceStart(1, (3, 4, 21, 28), 2, GREEDY)) == 0
    target.submit([prefill(1, (3, 4, 21, 28))])
    assert target.poll(0.0) == [Event(1, (35,))]
    target.check_integrity()


def test_a_poisoned_prompt_fails_alone():
    target = begun((1, 13), PROMPT, poison_token=13)
    target.submit([prefill(1, (1, 13)), prefill(2)])
    failed, fine = target.poll(0.0)
    assert "token 13" in failed.failure.reason
    assert fine.tokens == (21,)
    target.release(1)
    target.check_integrity()


def proposer(accept_prob, **options):
    return FakeProposer(accept_prob, vocab_size=50, max_draft_len=4, **options)


def task(num_known, draft_len, sequence=1):
    """All of PROMPT and TEXT up to num_known tokens."""
    return DraftTask(
        SequenceStart(sequence, (PROMPT + TEXT)[:num_known], len(PROMPT), GREEDY), draft_len
    )


def drafted(guess, *tasks):
    return [draft.tokens for draft in guess.propose(tasks)]


def test_drafts_are_the_text_or_one_beside_it():
    assert drafted(proposer(1.0), task(3, 4), task(5, 0)) == [(28, 35, 42, 49), ()]
    assert drafted(proposer(0.0), task(3, 4)) == [(29, 36, 43, 50 % 50)]
    by_position = proposer(lambda _, position: float(position < 5))
    assert drafted(by_position, task(3, 4)) == [(28, 35, 43, 0)]


@given(st.integers(0, 2**40), st.integers(1, 4), st.integers(3, 6))
def test_a_draft_is_the_same_for_every_draft_length_and_start(seed, draft_len, num_known):
    """Drafts at positions 3 to 9, asked for at once or from a later start."""
    guess = FakeProposer(0.5, vocab_size=50, max_draft_len=7, seed=seed)
    (whole,) = drafted(guess, task(3, 7))
    (part,) = drafted(guess, task(num_known, draft_len, sequence=2))
    assert part == whole[num_known - 3 :][:draft_len]


def test_draft_prefill_is_what_was_not_read():
    """The numbers of FakeProposer's docstring."""
    guess = proposer(0.5)
    assert guess.draft_prefill_len(1, 3) == 3
    guess.propose([task(3, 4)])
    guess.observe(1, num_accepted=2)
    assert guess.draft_prefill_len(1, 6) == 0
    assert guess.draft_prefill_len(1, 11) == 5
    assert guess.num_sequences == 1
    with pytest.raises(KeyError):
        guess.observe(2, num_accepted=0)
    guess.release(1)
    guess.release(1)
    assert guess.num_sequences == 0
    assert guess.draft_prefill_len(1, 11) == 11


def test_a_proposal_lasts_its_passes_and_the_prefill():
    """Lengths 1 and 3: one pass of 2 rows, two of 1: 0.3 + 0.1 + 0.1; 7 tokens to prefill: 0.07."""
    clock = VirtualClock()
    guess = proposer(0.5, cost=COST, clock=clock)
    guess.propose([task(3, 1), task(4, 3, sequence=2)])
    assert clock.now() == pytest.approx(0.57)
    assert guess.time_pass(batch_size=2, tokens_per_row=1, context_len=0) == pytest.approx(0.3)
