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
from smartspec_py.engines.cache.blocks import BlockPool, OutOfBlocksError
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.drafts.guarded import GuardedProposer
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner
from smartspec_py.serving.request import Request
from smartspec_py.serving.source import Source

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


def test_what_the_draft_cache_holds_is_not_planned_as_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first has 33 tokens to read. The second has 30 of them and 10 others, of which the last
    is read by the first pass that drafts: also once the first has ended. It is looked for only
    when a sequence enters or leaves the cache."""
    proposer, num_searches = make_proposer("llama"), 0
    source = Source("draft_model", proposer)
    search = BlockPool.num_found

    def counted(*arguments: Any) -> int:
        nonlocal num_searches
        num_searches += 1
        return search(*arguments)

    monkeypatch.setattr(BlockPool, "num_found", counted)
    head = [(7 * i) % 90 for i in range(30)]

    def planned(number: int, tail: list[int], **more: Any) -> int:
        tokens = [*head, *tail]
        of_one = Request(number, tokens, len(tokens), 9, GREEDY, "goodput", 3, **more)
        return source.options([of_one], {}, 1)[number][0].draft_prefill_len

    assert planned(1, [1, 2, 3]) == 32
    proposer.propose([DraftTask(SequenceStart(1, [*head, 1, 2, 3], 33, GREEDY), 3)])
    assert planned(1, [1, 2, 3]) == 0
    for _ in range(3):
        assert planned(2, [5] * 10) == 9
    assert num_searches == 2
    proposer.observe(1, 3)
    proposer.release(1)
    assert planned(2, [5] * 10) == 9
    assert planned(3, [5] * 10, adapter="other") == 39
    assert planned(4, [5] * 10, reuses_prefix=False) == 39
    reads = []
    forward = PyTorchRunner.forward

    def noted(self: PyTorchRunner, inputs: Any, token_ids: Any = None) -> Any:
        reads.append(len(inputs[0].tokens))
        return forward(self, inputs, token_ids)

    monkeypatch.setattr(PyTorchRunner, "forward", noted)
    proposer.propose([DraftTask(SequenceStart(2, [*head, *[5] * 10], 40, GREEDY), 1)])
    assert reads == [9, 1]
    assert planned(2, [5] * 10) == 0


def test_drafts_in_flight_are_not_found() -> None:
    """Three drafts after 12 tokens: the third is not read. None of them is verified yet."""
    proposer, tokens = make_proposer("llama"), list(range(12))
    (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, 12, GREEDY), 3)])
    others = [*tokens, *draft.tokens, 1]
    tokens += draft.tokens
    assert proposer.num_reusable(SequenceStart(1, others, 16, GREEDY)) == 12


def test_a_long_draft_prefill_takes_several_steps() -> None:
    """16 tokens in each. The one that lacks 9 drafts at once; the other lacks 44, reads 7 beside
    it, 16 and 16, and drafts after the last 5, what it drafts in one step without a limit."""
    long, short = [(5 * i + 1) % 90 for i in range(45)], list(range(10))
    tasks = [
        DraftTask(SequenceStart(n, each, 3, GREEDY), 4) for n, each in enumerate((long, short))
    ]
    expected = make_proposer("llama").propose(tasks)
    proposer = make_proposer("llama")
    proposer.max_prefill_len = 16
    assert proposer.propose(tasks) == [NO_DRAFT, expected[1]]
    proposer.observe(1, 0)
    assert proposer.draft_prefill_len(0, 45) == 37
    for left in (21, 5):
        assert proposer.propose(tasks[:1]) == [NO_DRAFT]
        assert proposer.draft_prefill_len(0, 45) == left
    assert proposer.propose(tasks[:1]) == expected[:1]
    proposer.release(0)
    assert proposer.draft_prefill_len(0, 45) == 44


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


def test_a_sequence_that_fails_after_its_drafts_were_planned_keeps_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(sequence: int, context_len: int) -> int:
        raise ValueError("a fault")

    tasks = [
        DraftTask(SequenceStart(sequence, tokens, len(tokens), GREEDY), 3)
        for sequence, tokens in enumerate(prompts(2, seed=4))
    ]
    expected = make_proposer("llama").propose(tasks)
    proposer = make_proposer("llama")
    guarded = GuardedProposer("draft_model", proposer)
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "draft_prefill_len", failing)
        assert guarded.draft_prefill_len(0, len(tasks[0].tokens)) == 0
    assert guarded.propose(tasks) == [NO_DRAFT, expected[1]]
    guarded.release(0)
    assert list(proposer._sequences) == [1]


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
