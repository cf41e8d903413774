"""The proposer with a draft model: what it reads, where it stops, and drafts that stay on the
device until they are verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_models import MAX_DRAFT_LEN, expected_text, make_proposer, make_target, poll
from step_driver import GREEDY, prompts

from smartspec_py.core.types import NO_TOKEN, SamplingParams, Verification
from smartspec_py.engines.base import Prefill, SequenceStart, Verify
from smartspec_py.engines.cache.blocks import OutOfBlocksError
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.guarded import GuardedProposer
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner

pytestmark = pytest.mark.slow  # so that they run beside the others


def test_draft_prefill_is_what_was_not_read() -> None:
    """Unknown: all but the last of 9 tokens. After 3 drafts of which 1 was kept, 11 are known and
    10 were read: nothing is missed. After 5 tokens without drafts, 5 are."""
    proposer = make_proposer("llama")
    tokens = list(range(9))
    assert proposer.draft_prefill_len(0, 9) == 8
    (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, 9, GREEDY), 3)])
    assert len(draft.tokens) == 3
    proposer.observe(0, 1)
    assert proposer.draft_prefill_len(0, 11) == 0
    assert proposer.draft_prefill_len(0, 16) == 5
    proposer.release(0)
    assert proposer.draft_prefill_len(0, 16) == 15
    assert proposer.num_available(0, tokens, SamplingParams()) == MAX_DRAFT_LEN


def test_a_long_draft_prefill_gives_the_same_drafts() -> None:
    """A cache that missed 30 tokens proposes what one that read all of them proposes."""
    tokens = prompts(1, seed=9)[0] + [1, 2, 3] * 11
    fresh, stale = make_proposer("llama"), make_proposer("llama")
    stale.propose([DraftTask(SequenceStart(0, tokens[:3], 3, GREEDY), 2)])
    stale.observe(0, 0)
    expected = fresh.propose([DraftTask(SequenceStart(0, tokens, 3, GREEDY), 4)])
    assert len(expected[0].tokens) == 4
    assert stale.propose([DraftTask(SequenceStart(0, tokens, 3, GREEDY), 4)]) == expected


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_pass_leaves_no_keys_that_were_not_computed(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass reads the missed tokens, the second one drafts. Each task is then tried alone,
    and a later sequence takes over what they have read."""
    calls = 0
    forward = PyTorchRunner.forward

    def failing_once(self: PyTorchRunner, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 + failing:
            raise OutOfBlocksError
        return forward(self, *arguments)

    shared = [(7 * i) % 90 for i in range(30)]
    tasks = [DraftTask(SequenceStart(i, [*shared, i, 5], 32, GREEDY), 3) for i in range(3)]
    expected = make_proposer("llama", reuses_prefixes=False).propose(tasks)
    proposer = make_proposer("llama")
    monkeypatch.setattr(PyTorchRunner, "forward", failing_once)
    guarded = GuardedProposer("draft_model", proposer)
    assert guarded.propose(tasks[:2]) == expected[:2]
    for sequence in range(2):
        guarded.release(sequence)
    assert guarded.propose(tasks[2:]) == expected[2:]
    assert proposer._sequences[2].table.num_cached > 30


def test_the_draft_stops_at_the_end_token() -> None:
    """What would follow the end of the text is not worth a pass."""
    proposer = make_proposer("llama")
    tokens = prompts(1, seed=3)[0]
    (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, len(tokens), GREEDY), 6)])
    ending = SamplingParams(end_tokens=(999, draft.tokens[2]))
    first = draft.tokens.index(draft.tokens[2])
    other = make_proposer("llama")
    (ended,) = other.propose([DraftTask(SequenceStart(0, tokens, len(tokens), ending), 6)])
    assert ended.tokens == draft.tokens[: first + 1]


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_drafts_on_the_device_are_those_of_the_host(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several lengths, greedy and sampled. What follows an end token is drafted in vain. With a
    penalty, a draft depends on the ones before, which the host must know."""
    rejection = Verification.REJECTION
    first = (
        make_proposer("llama")
        .propose([DraftTask(SequenceStart(0, [5, 6, 7], 3, GREEDY), 6)])[0]
        .tokens[0]
    )
    samplings = [
        GREEDY,
        SamplingParams(temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, seed=2, verification=rejection, frequency_penalty=penalty),
        SamplingParams(end_tokens=(first,)),
    ]
    tasks = [
        DraftTask(SequenceStart(i, [5, 6, 7], 3, sampling), num)
        for i, (num, sampling) in enumerate(zip((2, 6, 3, 5), samplings, strict=True))
    ]
    on_host = make_proposer("llama").propose(tasks)
    monkeypatch.setattr(PyTorchRunner, "is_asynchronous", True)
    given = []
    forward = PyTorchRunner.forward

    def noted(self: PyTorchRunner, inputs: Any, token_ids: Any = None) -> Any:
        given.append(None if token_ids is None else len(token_ids))
        return forward(self, inputs, token_ids)

    monkeypatch.setattr(PyTorchRunner, "forward", noted)
    on_device = make_proposer("llama").propose(tasks)
    assert [len(draft.tokens) for draft in on_host] == [2, 6, 3, 1]
    torch.testing.assert_close(on_device[2].probs, on_host[2].probs)
    if penalty:
        assert [draft.tokens for draft in on_device] == [draft.tokens for draft in on_host]
        assert given == [None] * 6
        return
    assert [draft.tokens for draft in on_device] == [(NO_TOKEN,) * num for num in (2, 6, 3, 5)]
    for draft, known in zip(on_device, on_host, strict=True):
        assert tuple(draft.on_device[: len(known.tokens)].tolist()) == known.tokens
    assert given == [None, 4, 3, 2, 2, 1]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_drafts_on_the_device_are_verified_like_others(
    is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside drafts that the host knows, and a chunk of a prompt. The host waits for the device
    once, but twice where the target is on a CPU and the draft model is not."""
    first, second, prompt = [1, 2, 3, 4], [9, 8, 7], tuple(range(10, 30))
    drafts = tuple(expected_text("llama", first, 5)[1:])
    events, copies = [], 0
    to_host = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return to_host(tensor)

    for given in (None, torch.tensor(drafts)):
        monkeypatch.setattr(PyTorchRunner, "is_asynchronous", is_asynchronous and given is not None)
        target = make_target("llama")
        for i, tokens in enumerate((first, second, list(prompt))):
            target.begin(SequenceStart(i, tokens, len(tokens), GREEDY))
        poll(target, *(Prefill(i, tuple(t), 0, True) for i, t in enumerate((first, second))))
        known = drafts if given is None else (NO_TOKEN,) * 4
        work = [
            Prefill(2, prompt[:12], 0, False),
            Verify(1, Draft((5, 6, 7))),
            Verify(0, Draft(known, on_device=given)),
        ]
        copies = 0
        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        events.append([event._replace(pass_s=0.0) for event in poll(target, *work)])
        monkeypatch.undo()
        assert copies == (1 if given is None or is_asynchronous else 2)
    assert events[0] == events[1]
    assert events[0][2].num_accepted == 4
