"""The rule of the fake engine's text, and the calls that it refuses.

The prompt (3, 4) sums to 7; with 50 tokens in the vocabulary its text is 7 + 7 t modulo 50. What a
verification, a burst or a preemption brings is tested through the loop and beside TensorRT-LLM's
adapter.
"""

from dataclasses import replace

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, Prefill, SequenceStart, Verify
from smartspec_py.engines.draft import Draft
from smartspec_testing.fake_engine import FAKE_CAPABILITIES, FakeTarget, fake_token

PROMPT = (3, 4)
GREEDY = SamplingParams()
CAPABILITIES = replace(
    FAKE_CAPABILITIES, vocab_size=50, max_sequences=2, max_draft_len=4, max_prefill_tokens=8
)


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


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (Verify(9, Draft((28,))), KeyError),
        (Verify(1, Draft()), AssertionError),
        (Verify(1, Draft((28,) * 5)), AssertionError),
        (Verify(1, Draft((50,))), AssertionError),
        (Decode(1, 2), AssertionError),
        (Prefill(1, PROMPT, 0, True), AssertionError),
        (Prefill(2, (5,), 0, True), AssertionError),  # sequence 2 began with 6
        (Prefill(2, (6,), 0, True), AssertionError),  # nine more follow: it is not the last
        (Prefill(2, (6,), 1, False), AssertionError),
        (Prefill(2, (6,) * 9, 0, False), AssertionError),
    ],
)
def test_wrong_work_raises(work, error):
    """Sequence 1 has read its prompt; sequence 2 has begun with ten tokens; chunks of 8 are the
    largest."""
    target = FakeTarget(CAPABILITIES)
    target.begin(SequenceStart(1, PROMPT, 2, GREEDY))
    target.submit([Prefill(1, PROMPT, 0, True)])
    target.poll(0.0)
    target.begin(SequenceStart(2, (6,) * 10, 10, GREEDY))
    with pytest.raises(error):
        target.submit([work])
