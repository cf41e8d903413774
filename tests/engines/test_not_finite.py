"""A sequence whose logits overflow fails alone; the others, and the next one in its row, go on."""

from __future__ import annotations

import pytest
import torch
from local_models import (
    MAX_LEN,
    MAX_SEQUENCES,
    OPENVINO,
    VOCAB_SIZE,
    expected_text,
    make_model,
    make_runner,
    poll,
)

from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import Prefill, SequenceStart, TargetCapabilities, Verify, Work
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.local.target import LocalTarget

KIND = "llama, grouped keys"
POISON = 5
"""A token whose embedding is infinite, as after an overflow."""

BAD = [1, 2, 3, POISON, *range(10, 40)]
GOOD = [(7 * i + 1) % 80 + 10 for i in range(30)]


def make_target(kind: str) -> LocalTarget:
    model = make_model(KIND)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.inf
    runner = make_runner(model, with_openvino=kind.startswith(OPENVINO))
    capabilities = TargetCapabilities(MAX_SEQUENCES, MAX_LEN, 6, 1, MAX_LEN, True, VOCAB_SIZE)
    return LocalTarget(runner, capabilities)


@pytest.mark.parametrize("kind", [KIND, OPENVINO + KIND])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(log_probs=True, num_top_log_probs=2),
        SamplingParams(temperature=0.8, min_p=0.1, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(temperature=0.8, top_k=3, repetition_penalty=1.3, seed=1),
    ],
    ids=["greedy", "log-probabilities", "min_p", "top_p", "top_k and penalty"],
)
def test_only_the_sequence_that_overflows_fails(kind: str, sampling: SamplingParams) -> None:
    target = make_target(kind)
    target.begin(SequenceStart(0, GOOD, len(GOOD), SamplingParams()))
    target.begin(SequenceStart(1, BAD, len(BAD), sampling))
    good, bad = poll(
        target, Prefill(0, tuple(GOOD), 0, True), Prefill(1, tuple(BAD), 0, True)
    )  # fmt: skip
    assert bad.failure is not None
    assert "not finite" in bad.failure.reason
    assert bad.is_last
    assert not bad.tokens
    target.release(1)
    other = GOOD[::-1]
    assert target.begin(SequenceStart(2, other, len(other), SamplingParams())) == 0
    work: list[Work] = [Verify(0, Draft()), Prefill(2, tuple(other), 0, True)]
    texts: dict[int, list[int]] = {0: list(good.tokens), 2: []}
    for _ in range(8):
        for event in poll(target, *work):
            texts[event.sequence] += event.tokens
        work = [Verify(0, Draft()), Verify(2, Draft())]
    assert texts[0] == expected_text(KIND, GOOD, 9)
    assert texts[2] == expected_text(KIND, other, 8)


@pytest.mark.parametrize("kind", [KIND, OPENVINO + KIND])
@pytest.mark.parametrize("verification", Verification)
def test_a_draft_that_overflows_is_rejected(kind: str, verification: Verification) -> None:
    """And the text goes on as without it."""
    sampling = SamplingParams(temperature=0.7, seed=2, verification=verification)
    texts = []
    for drafts in ((), (POISON, 9)):
        target = make_target(kind)
        target.begin(SequenceStart(0, GOOD, len(GOOD), sampling))
        [event] = poll(target, Prefill(0, tuple(GOOD), 0, True))
        text = list(event.tokens)
        for verified in (drafts, (), ()):
            [event] = poll(target, Verify(0, Draft(verified)))
            assert event.failure is None
            assert len(event.tokens) == 1
            text += event.tokens
        texts.append(text)
    if verification is Verification.COUPLED:
        assert texts[0] == texts[1]
