"""Log-probabilities of the PyTorch target: of prompts in chunks, and of text with drafts."""

from __future__ import annotations

import random

import pytest
from local_models import OPENVINO, VOCAB_SIZE, make_target, poll

from smartspec_py.core.types import SamplingParams, TokenLogProb
from smartspec_py.engines.base import Decode, Event, Prefill, SequenceStart, Verify
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.local.target import LocalTarget

SAMPLING = SamplingParams(log_probs=True, num_top_log_probs=3, prompt_log_probs=True)
NUM_TOKENS = 12


def of_prompt(target: LocalTarget, sequence: int, tokens: list[int], chunk: int) -> list[Event]:
    """The events of a prompt that is read in chunks, each beside a chunk of another prompt."""
    target.begin(SequenceStart(sequence, tokens, len(tokens), SAMPLING, reuses_prefix=False))
    target.begin(SequenceStart(sequence + 1, [3] * 40, 40, SamplingParams(), reuses_prefix=False))
    events = []
    for start in range(0, len(tokens), chunk):
        part = tuple(tokens[start : start + chunk])
        work = Prefill(sequence, part, start, start + chunk >= len(tokens))
        events.append(poll(target, Prefill(sequence + 1, (3, 3), start // chunk * 2, False), work))
    target.release(sequence + 1)
    assert all(other.prompt_log_probs is None for other, _ in events)
    return [event for _, event in events]


KIND = "llama, grouped keys"


@pytest.mark.parametrize("kind", [KIND, OPENVINO + KIND])
def test_a_text_has_the_same_log_probs_as_prompt_and_as_answer(kind: str) -> None:
    """Generated without drafts, with drafts, and read as part of a prompt in chunks."""
    target = make_target(kind)
    source = random.Random(3)
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(9)]
    found = of_prompt(target, 1, prompt, 4)[-1].log_probs
    while len(found) < NUM_TOKENS:
        found += poll(target, Decode(1, 1))[0].log_probs
    target.release(1)
    text = [one.token for one in found]
    assert [one.top[0][0] for one in found] == text, "greedy: the best token was taken"

    drafted = of_prompt(target, 1, prompt, 100)[-1].log_probs
    while len(drafted) < NUM_TOKENS:
        num = len(drafted)
        (event,) = poll(
            target, Verify(1, Draft((*text[num : num + 2], (text[-1] + 1) % VOCAB_SIZE)))
        )
        drafted += event.log_probs
    assert_close(drafted[:NUM_TOKENS], found)
    target.release(1)

    whole = prompt + text
    read = [event.prompt_log_probs for event in of_prompt(target, 1, whole, 5)]
    assert [part.first for part in read if part] == [1, 6, 11, 16]
    values = [one for part in read if part for one in part.values]
    assert [one.token for one in values] == whole[1:]
    assert_close(values[len(prompt) - 1 :], found)


def assert_close(some: list[TokenLogProb], others: list[TokenLogProb]) -> None:
    assert [one.token for one in some] == [one.token for one in others]
    for one, other in zip(some, others, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-4)
