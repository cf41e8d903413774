"""The adapter over the fake; the texts are those of `fake_engine`.

The prompt (3, 4) sums to 7; with 1000 tokens in the vocabulary its text is 7 + 7 t:
position  2   3   4   5   6   7   8
token     21  28  35  42  49  56  63
"""

from dataclasses import replace
from datetime import timedelta
from math import exp, log1p

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import (
    Decode,
    Event,
    Prefill,
    SequenceStart,
    TargetCapabilities,
    Verify,
)
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.trtllm.requests import request_seed
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_executor import EngineLimits, Executor

PROMPT = (3, 4)
GREEDY = SamplingParams()
CAPABILITIES = TargetCapabilities(
    max_sequences=8,
    max_context_len=64,
    max_draft_len=8,
    max_decode_tokens=8,
    max_prefill_tokens=None,
    verifies_sampling=False,
    vocab_size=1000,
)


class RecordingExecutor(Executor):
    """Keeps the requests and the timeouts."""

    def __init__(self, limits=EngineLimits(), **options):  # noqa: B008 - it is frozen
        super().__init__(limits, **options)
        self.requests = []
        self.timeouts = []

    def enqueue_requests(self, requests):
        self.requests += requests
        return super().enqueue_requests(requests)

    def await_responses(self, timeout):
        self.timeouts.append(timeout)
        return super().await_responses(timeout)


def make(capabilities=CAPABILITIES, **options):
    """On a virtual clock."""
    clock = VirtualClock()
    executor = RecordingExecutor(clock=clock, **options)
    target = TrtllmTarget(executor, fake_executor, capabilities, clock.now)
    return target, executor


def begin(target, sequence, prompt, sampling=GREEDY):
    """Begin a sequence, and submit its prompt."""
    assert target.begin(SequenceStart(sequence, prompt, len(prompt), sampling)) == 0
    target.submit([Prefill(sequence, prompt, 0, True)])


def prefilled(capabilities=CAPABILITIES, sampling=GREEDY, **options):
    """A target that has read PROMPT as sequence 1 and drawn its first token."""
    target, executor = make(capabilities, **options)
    begin(target, 1, PROMPT, sampling)
    (event,) = target.poll(1.0)
    assert event.is_last
    assert event.finish is None
    return target, executor


def drain(target):
    events = []
    while found := target.poll(1.0):
        events += found
    return events


@pytest.mark.parametrize(
    ("end_tokens", "drafts", "tokens", "num_accepted", "finish"),
    [
        ((), (28, 35), (28, 35, 42), 2, None),  # LENGTH there: the step is done, no more
        ((), (28, 36), (28, 35), 1, None),
        ((), (29, 35), (28,), 0, None),
        ((35,), (28, 35, 42), (28,), 2, FinishReason.STOP),
        ((35,), (28, 36), (28,), 1, FinishReason.STOP),
        ((28,), (29,), (), 0, FinishReason.STOP),
        # Any of a set ends it, whichever comes first.
        ((9, 35, 28), (29,), (), 0, FinishReason.STOP),
        ((9, 35), (28, 35, 42), (28,), 2, FinishReason.STOP),
        ((9, 8, 42), (28, 35), (28, 35), 2, FinishReason.STOP),
    ],
)
def test_verify_says_what_the_fake_engine_says(end_tokens, drafts, tokens, num_accepted, finish):
    expected = [Event(1, tokens, len(drafts), num_accepted, finish=finish)]
    sampling = SamplingParams(end_tokens=end_tokens)
    target, _ = prefilled(sampling=sampling)
    fake = FakeTarget()
    begin(fake, 1, PROMPT, sampling)
    fake.poll(0.0)
    for engine in (target, fake):
        engine.submit([Verify(1, Draft(drafts))])
        assert engine.poll(1.0) == expected
    assert target.poll(1.0) == []


def test_each_work_is_one_request_with_all_tokens():
    """First token 21; drafts 28, 29 bring 28, 35; a burst of 2 brings 42, 49."""
    target, executor = prefilled()
    target.submit([Verify(1, Draft((28, 29)))])
    target.poll(1.0)
    target.submit([Decode(1, 2)])
    assert drain(target) == [Event(1, (42,), is_last=False), Event(1, (49,))]
    made = [(r.input_token_ids, r.max_tokens, r.streaming) for r in executor.requests]
    assert made == [
        ([3, 4], 1, False),
        ([3, 4, 21], 3, False),
        ([3, 4, 21, 28, 35], 2, True),
    ]
    drafts = [r.external_draft_tokens_config for r in executor.requests]
    assert [d and d.tokens for d in drafts] == [None, [28, 29], None]


def test_a_burst_is_in_flight_while_others_verify():
    target, _ = prefilled()
    target.begin(SequenceStart(2, (5,), 1, GREEDY))
    target.submit([Decode(1, 3), Prefill(2, (5,), 0, True)])
    assert target.poll(1.0) == [Event(1, (28,), is_last=False), Event(2, (12,))]
    target.submit([Verify(2, Draft((19,)))])  # 5 + 7 * 2
    assert target.poll(1.0) == [Event(1, (35,), is_last=False), Event(2, (19, 26), 1, 1)]
    assert drain(target) == [Event(1, (42,))]


TOKEN_S = 0.01
BY_TOKENS = CostModel(PassTable((1, 2), (1, 8), ((TOKEN_S, 8 * TOKEN_S), (0.02, 0.16))))
"""Of what is cached, the last token alone is computed again: k drafts take k + 1 tokens."""


def test_each_work_has_its_own_time():
    """5 s between the steps are drafting and host time; each step has another number of drafts.
    Of a burst only the first token has a time: others come while other work is timed."""
    target, executor = prefilled(cost=BY_TOKENS)
    for k in (1, 4, 2, 7):
        executor._clock.sleep(5.0)
        target.submit([Verify(1, Draft((999,) * k))])
        (event,) = target.poll(1.0)
        assert event.pass_s == pytest.approx((k + 1) * TOKEN_S)
    executor._clock.sleep(5.0)
    target.submit([Decode(1, 3)])
    assert [event.pass_s for event in drain(target)] == pytest.approx([TOKEN_S, 0.0, 0.0])


def test_all_iterations_of_a_step_are_in_its_time():
    """Two verifications of 4 and 2 tokens, of which one fits into an iteration of 5 tokens."""
    target, _ = make(cost=BY_TOKENS, limits=EngineLimits(max_num_tokens=5))
    for sequence in (1, 2):
        begin(target, sequence, (sequence,))
        target.poll(1.0)
    target.submit([Verify(1, Draft((998, 999))), Verify(2, Draft((999,)))])
    events = target.poll(1.0)
    assert [event.pass_s for event in events] == pytest.approx([3 * TOKEN_S, 5 * TOKEN_S])


def test_texts_are_read_once_for_all_passes_that_are_timed_on_them():
    """Of 100 tokens. Later passes read the last one again, and a text more where there are more
    rows; each text has a pass behind it of 1 token, or of 3 or 5."""
    target, executor = make(cost=BY_TOKENS)
    for rows, tokens, num_read in ((1, 3, 100), (2, 3, 101), (2, 5, 2), (2, 3, 2)):
        start_s = executor._clock.now()
        pass_s = target.time_pass(rows, tokens, 100)
        assert pass_s == pytest.approx(rows * tokens * TOKEN_S)
        assert executor._clock.now() - start_s == pytest.approx(num_read * TOKEN_S + pass_s)


def test_late_tokens_of_a_cancelled_burst_are_kept():
    target, executor = prefilled()
    target.submit([Decode(1, 8)])
    target.poll(1.0)
    target.cancel(1)
    assert target.poll(1.0) == [Event(1, (35,), is_last=False), Event(1)]
    target.cancel(1)  # nothing is in flight
    target.submit([Verify(1, Draft((42,)))])
    assert target.poll(1.0) == [Event(1, (42, 49), 1, 1)]
    assert executor.requests[-1].input_token_ids == [3, 4, 21, 28, 35]


def test_a_verification_cancelled_before_it_ran_drafted_nothing():
    """The burst of sequence 1 fills the batch, so the verification of sequence 2 never runs."""
    target, _ = make(limits=EngineLimits(max_batch_size=1))
    begin(target, 1, PROMPT)
    target.poll(1.0)
    begin(target, 2, (5,))
    target.poll(1.0)
    target.submit([Decode(1, 8), Verify(2, Draft((19,)))])
    target.cancel(2)
    assert target.poll(1.0) == [Event(1, (28,), is_last=False), Event(2)]


@pytest.mark.parametrize(
    ("max_context_len", "max_seq_len", "tokens"),
    [
        (5, 4096, [28, 35]),  # of 5 tokens 3 are known
        (64, 12, [28]),  # 3 tokens and a reserve of 8 leave 1 of 12: the executor stops after it
    ],
)
def test_the_context_limit_ends_the_sequence(max_context_len, max_seq_len, tokens):
    capabilities = replace(CAPABILITIES, max_context_len=max_context_len)
    target, _ = prefilled(capabilities, limits=EngineLimits(max_seq_len=max_seq_len))
    target.submit([Decode(1, 5 if max_seq_len == 12 else 2)])
    events = drain(target)
    assert [token for event in events for token in event.tokens] == tokens
    assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [FinishReason.LENGTH]


def test_failures_concern_one_sequence():
    """9 tokens never fit into 8, and 9 drafts are more than 8: both are error responses."""
    target, _ = prefilled(limits=EngineLimits(max_num_tokens=8))
    target.begin(SequenceStart(2, range(9), 9, GREEDY))
    target.begin(SequenceStart(3, (5,), 1, GREEDY))
    target.submit(
        [
            Verify(1, Draft((28,) * 9)),
            Prefill(2, tuple(range(9)), 0, True),
            Prefill(3, (5,), 0, True),
        ]
    )
    events = {event.sequence: event for event in drain(target)}
    assert "max_draft_len" in events[1].failure.reason
    assert "max_num_tokens" in events[2].failure.reason
    assert events[3] == Event(3, (12,))
    for sequence in (1, 2, 3):
        target.release(sequence)
    assert not target._held


def test_a_request_that_the_bindings_reject_fails_alone(monkeypatch):
    """Their constructors throw. The event is returned at once; others are not waited for."""
    target, executor = make()
    begin(target, 1, PROMPT)
    executor.timeouts.clear()

    def reject(*args):
        raise TypeError("incompatible arguments")

    with monkeypatch.context() as patch:
        patch.setattr(target, "_request", reject)
        begin(target, 2, PROMPT)
    assert [event.sequence for event in target.poll(1.0)] == [2, 1]
    assert executor.timeouts == [timedelta(0)]
    target.release(2)
    target.submit([Decode(1, 1)])
    assert target.poll(1.0) == [Event(1, (28,))]


def test_sampled_requests_differ_in_their_seed():
    """Seed 5, first tokens at positions 2 and 3; the fake adds the request's seed to the rule.

    5 * 0x9E3779B97F4A7C15 modulo 2^64 is 1663341875487337577, plus 2 ends in 579, so the first
    token is 7 + 579 + 14 = 600.
    """
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    target, executor = prefilled(sampling=sampling)
    target.submit([Decode(1, 1)])
    target.poll(1.0)
    configs = [request.sampling_config for request in executor.requests]
    assert [config.seed for config in configs] == [request_seed(5, 2), request_seed(5, 3)]
    assert request_seed(5, 2) == 1663341875487337579
    assert (configs[0].temperature, configs[0].top_k, configs[0].top_p) == (0.8, None, 0.9)
    assert executor.requests[1].input_token_ids == [3, 4, 600]


@pytest.mark.parametrize("lengths", [(6,), (1,) * 6, (3, 3), (1, 2, 4)])
def test_bad_words_never_come_wherever_the_text_is_cut(lengths):
    """The executor finds the beginning of a word in the prompt, which has the text so far."""
    target, _ = prefilled(sampling=SamplingParams(bad_words=((28,), (49, 56))))
    for length in lengths:
        target.submit([Decode(1, length)])
        drain(target)
    assert tuple(target._held[1].tokens[2:9]) == (21, 29, 35, 42, 49, 57, 63)


def test_processors_become_fields_of_the_request():
    """Penalties are divided by the temperature, because the executor subtracts them after dividing
    the logits by it. The bias is a tensor over the vocabulary, added before both. The tokenizer may
    have more tokens than the engine has logits: those are left out."""
    sampling = SamplingParams(
        temperature=0.5,
        presence_penalty=1.0,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((28, -20.0), (500, 10.5), (1000, 5.0)),
        bad_words=((35, 1000), (28,)),
    )
    _, executor = prefilled(sampling=sampling)
    config = executor.requests[0].sampling_config
    found = (config.presence_penalty, config.frequency_penalty, config.repetition_penalty)
    assert found == (2.0, 0.6, 1.2)
    bias = executor.requests[0].embedding_bias
    assert bias.shape == (1000,)
    assert (bias[28], bias[500], bias.abs().sum()) == (-20.0, 10.5, 30.5)
    assert executor.requests[0].bad_words == [[28]]
    assert not CAPABILITIES.can_verify(sampling)


@pytest.mark.parametrize("end_tokens", [(42,), (28, 42), (7, 8, 42, 28)])
def test_no_end_token_comes_before_min_tokens(end_tokens):
    """3 of the tokens 21, 28, 35, 42 are to come first. `min_tokens` of the executor keeps its
    end_id away alone, so a burst of 8 asks for the 2 that are left, and then for 8."""
    sampling = SamplingParams(end_tokens=end_tokens, min_tokens=3)
    target, executor = prefilled(sampling=sampling)
    second = 29 if 28 in end_tokens else 28
    target.submit([Decode(1, 8)])
    assert drain(target) == [Event(1, (second,), is_last=False), Event(1, (35,))]
    target.submit([Decode(1, 8)])
    assert drain(target) == [Event(1, (), finish=FinishReason.STOP)]
    assert [request.max_tokens for request in executor.requests] == [1, 2, 8]


def test_log_probs_are_the_model_s():
    """Logits are 0, and a peak on the rule's token, which may not be the one that is drawn. A burst
    is short, because the executor pins max_tokens x vocabulary x 4 bytes for them."""
    sampling = SamplingParams(log_probs=True, num_top_log_probs=2, bad_words=((28,),))
    target, executor = make()
    begin(target, 1, PROMPT, sampling)
    events = target.poll(1.0)
    target.submit([Decode(1, 2)])
    events += drain(target)
    assert [event.tokens for event in events] == [(21,), (29,), (35,)]
    others = log1p(999 * exp(-10))
    for event, value in zip(events, (-others, -10 - others, -others), strict=True):
        (found,) = event.log_probs
        assert found.token == event.tokens[0]
        assert found.log_prob == pytest.approx(value, abs=1e-5)
        assert found.top[0][1] > found.top[1][1]
    assert events[1].log_probs[0].top[0][0] == 28
    target.submit([Decode(1, 1000)])
    assert executor.requests[-1].max_tokens == 16
    assert "log-probabilities" in CAPABILITIES.why_unverified(SamplingParams(log_probs=True))


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (Verify(9, Draft((28,))), KeyError),
        (Decode(9, 1), KeyError),
        (Prefill(9, PROMPT, 0, True), KeyError),
        (Prefill(2, (3,), 0, False), AssertionError),  # prompts come whole
        (Prefill(2, (3, 5), 0, True), AssertionError),  # and are what the sequence began with
        (Verify(1, Draft((28,))), AssertionError),  # sampled text is not verified
    ],
)
def test_misuse_raises(work, error):
    target, _ = prefilled(sampling=SamplingParams(temperature=1.0))
    target.begin(SequenceStart(2, PROMPT, 2, GREEDY))
    with pytest.raises(error):
        target.submit([work])


def test_one_work_at_a_time_one_release_and_nothing_after_the_end():
    target, executor = prefilled()
    target.submit([Decode(1, 1)])
    with pytest.raises(AssertionError, match="one piece of work"):
        target.submit([Decode(1, 1)])
    with pytest.raises(AssertionError, match="work in flight"):
        target.release(1)
    target.poll(1.0)
    target.release(1)
    target.cancel(1)
    with pytest.raises(KeyError):
        target.release(1)
    target.close()
    assert not executor.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="takes no requests"):
        begin(target, 1, PROMPT)
