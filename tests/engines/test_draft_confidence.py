"""What the draft model says of its drafts, against Transformers; and who stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch_models import MAX_DRAFT_LEN, VOCAB_SIZE, make_model, make_proposer

from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import Draft, DraftTask

KIND = "llama"
GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.9, seed=5)
PENALISED = SamplingParams(temperature=0.7, seed=6, repetition_penalty=1.4, top_k=20)
REJECTED = replace(COUPLED, verification=Verification.REJECTION)
PROMPT = [7, 3, 11, 40, 2, 9]


class Rule:
    """lengths: passes for each sequence. Keeps what it was asked and told."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.asked: list[list[int]] = []
        self.told: list[list[tuple[int, float]]] = []

    def going_on(self, members: Sequence[int]) -> list[bool]:
        self.asked.append(list(members))
        return [self.lengths[member] > len(self.told) for member in members]

    def hear(self, members: Sequence[int], confidences: Sequence[float]) -> None:
        self.told.append(list(zip(members, confidences, strict=True)))


def tasks(*samplings: SamplingParams, draft_len: int = MAX_DRAFT_LEN) -> list[DraftTask]:
    return [
        DraftTask(i, [*PROMPT, 20 + i], len(PROMPT), draft_len, sampling)
        for i, sampling in enumerate(samplings)
    ]


def expected_log_odds(task: DraftTask, draft: Draft) -> list[float]:
    """One full pass without cache; log-odds as p / (1 - p) of the plain softmax, in float64."""
    known = [*task.tokens, *draft.tokens]
    with torch.inference_mode():
        logits = make_model(KIND, noise=0.02)(torch.tensor([known]), use_cache=False).logits[0]
    first = len(task.tokens) - 1
    probs = logits[first:-1, :VOCAB_SIZE].double().softmax(-1)
    chosen = probs[torch.arange(len(draft.tokens)), torch.tensor(draft.tokens)]
    found: list[float] = (chosen / (1 - chosen)).log().tolist()
    return found


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PENALISED])
def test_confidence_is_the_log_odds_of_the_drafted_token(sampling: SamplingParams) -> None:
    (task,) = tasks(sampling)
    rule = Rule(MAX_DRAFT_LEN)
    (draft,) = make_proposer(KIND).propose([task], rule)
    assert len(draft.tokens) == MAX_DRAFT_LEN
    assert draft.confidences == pytest.approx(expected_log_odds(task, draft), abs=1e-3)
    assert [told for ((_, told),) in rule.told] == list(draft.confidences)


def test_a_rule_shortens_drafts_and_changes_none_of_them() -> None:
    """Three sequences of which one has no pass, one two and one all; the last asked for 4."""
    asked = tasks(GREEDY, COUPLED, GREEDY, COUPLED)
    asked[3] = asked[3]._replace(draft_len=4)
    whole = make_proposer(KIND).propose(asked)
    rule = Rule(0, 2, MAX_DRAFT_LEN, MAX_DRAFT_LEN)
    proposer = make_proposer(KIND)
    found = proposer.propose(asked, rule)
    assert [len(draft.tokens) for draft in found] == [0, 2, MAX_DRAFT_LEN, 4]
    for short, long in zip(found, whole, strict=True):
        assert short.tokens == long.tokens[: len(short.tokens)]
        assert len(short.confidences) == len(short.tokens)
        assert long.confidences == (), "nobody asked"
    assert rule.asked[:4] == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3], [2, 3]]
    assert rule.asked[4] == [2], "who has all it asked for is not asked about"


def test_a_sequence_that_was_stopped_drafts_on_as_if_nothing_had_happened() -> None:
    """Two drafts, one of them kept, and another token; then as a proposer that never drafted."""
    (task,) = tasks(GREEDY)
    proposer = make_proposer(KIND)
    (draft,) = proposer.propose([task], Rule(2))
    proposer.observe(task.sequence, 1)
    known = [*task.tokens, draft.tokens[0], 33]
    later = task._replace(tokens=known)
    assert proposer.propose([later], Rule(0))[0].tokens == ()
    assert proposer.propose([later]) == make_proposer(KIND).propose([later])


def test_drafts_verified_by_rejection_leave_without_confidences() -> None:
    """So that nobody can leave one out for what it is. The rule still hears how sure they were."""
    rule = Rule(3, 3)
    by_rejection, coupled = make_proposer(KIND).propose(tasks(REJECTED, COUPLED), rule)
    assert by_rejection.confidences == ()
    assert by_rejection.probs.shape == (3, VOCAB_SIZE)
    assert len(by_rejection.tokens) == len(coupled.confidences) == 3
    assert [len(told) for told in rule.told] == [2, 2, 2]


def test_who_drafted_the_end_token_is_not_asked_about_again() -> None:
    (task,) = tasks(GREEDY)
    (whole,) = make_proposer(KIND).propose([task])
    ends = task._replace(sampling=SamplingParams(end_tokens=(whole.tokens[1],)))
    rule = Rule(MAX_DRAFT_LEN)
    (draft,) = make_proposer(KIND).propose([ends], rule)
    assert draft.tokens == whole.tokens[: len(draft.tokens)]
    assert draft.tokens[-1] == whole.tokens[1]
    assert len(rule.told) == len(draft.tokens) == len(rule.asked)
