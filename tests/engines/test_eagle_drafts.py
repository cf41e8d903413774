"""The drafts of the EAGLE proposer, chains and trees, in a random sequence of steps; and the hidden
states of the target that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import EAGLE, OF_TARGET, VOCAB, own, weights, write
from eagle_driver import PaddedEagleRunner, TreeDriver, driver_of, runner_of
from local_models import MAX_DRAFT_LEN, poll
from step_driver import GREEDY

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, Prefill, SequenceStart
from smartspec_py.engines.cache.blocks import OutOfBlocksError
from smartspec_py.engines.draft import NO_DRAFT
from smartspec_py.engines.drafts.eagle import proposer as eagle_proposer
from smartspec_py.engines.drafts.eagle.openvino import OpenVinoEagleRunner
from smartspec_py.engines.drafts.eagle.proposer import EagleProposer
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import Runner, RunnerConfig

pytestmark = pytest.mark.usefixtures("without_triton")


def with_openvino(config: RunnerConfig) -> Runner:
    from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner

    return load_openvino_runner(config)


def with_graphs(config: RunnerConfig) -> Runner:
    runner = load_runner(config, GraphRunner)
    runner.warm()
    return runner


@pytest.mark.parametrize(
    "load",
    [load_runner, with_graphs, with_openvino],
    ids=lambda f: f.__name__,
)
def test_drafts_do_not_depend_on_the_steps_before(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner]
) -> None:
    """Six sequences through three rows. The last three find a prefix of 12 tokens in both caches,
    the first two in that of the target only."""
    kinds = {with_openvino: OpenVinoEagleRunner, with_graphs: PaddedEagleRunner}
    driver = driver_of(tmp_path, load=load, runner=kinds.get(load, EagleRunner))
    target = driver.target
    shared = [(7 * i) % VOCAB for i in range(12)]
    other = [(5 * i + 1) % VOCAB for i in range(12)]
    target.begin(SequenceStart(99, other, 12, GREEDY))
    poll(target, Prefill(99, tuple(other), 0, True))
    target.release(99)
    todo = [[*other, 8], [*other, 9], [*shared, 1, 2], [*shared, 3], [*shared, 4, 4], shared]
    firsts, cached = {}, []
    for sequence, prompt in enumerate(todo):
        driver.begin(sequence, prompt)
        cached.append(driver.num_cached[sequence])
        while len(driver.unread) == 3 or (sequence == 5 and driver.unread):
            driver.step()
            for number in [n for n in driver.unread if len(driver.tokens[n]) > 30]:
                firsts[number] = driver.first[number]
                driver.end(number)
    assert cached == [12, 12, 0, 12, 12, 11]
    assert firsts == {0: 13, 1: 13, 2: 1, 3: 1, 4: 1, 5: 1}
    assert driver.zeros == {3: 12, 4: 12}
    assert driver.num_drafts > 60
    assert driver.num_accepted > 30


def test_trees_are_the_most_probable_paths(tmp_path: Path) -> None:
    """Of trees of different depths in the same passes; rows begin late if states are missing."""
    driver = driver_of(tmp_path, TreeDriver, max_len=128)
    for sequence in range(3):
        driver.begin(sequence, [(5 * i + sequence) % VOCAB for i in range(12)])
    while min(len(tokens) for tokens in driver.tokens.values()) < 24:
        driver.step()
    assert driver.num_drafts > 300
    driver.proposer.time_drafts(3)
    alone_s, together_s = driver.proposer.capabilities.tree_s
    assert 0.0 <= together_s < 1.0
    assert 0.0 <= alone_s < 1.0


def test_drafts_are_timed_until_the_device_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, like trees, are complete when a copy to the host has waited for them."""
    head, config = write(tmp_path, EAGLE, weights("midlayer")), own(tmp_path)
    monkeypatch.setattr(EagleRunner, "is_asynchronous", True)
    config = replace(config, max_len=128)
    proposer = EagleProposer(
        runner_of(head, config), 3, MAX_DRAFT_LEN, states_width=3 * OF_TARGET, tree_context_len=128
    )
    copied, num_timed = list[torch.Tensor](), 0
    to_host = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        copied.append(tensor)
        return to_host(tensor)

    def timed(draft: Callable[[], object], prepare: Callable[[], object]) -> float:
        nonlocal num_timed
        prepare()
        copied.clear()
        draft()
        assert copied
        num_timed += 1
        return 0.0

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(eagle_proposer, "fastest_s", timed)
    proposer.time_drafts(3)
    assert num_timed == 4


def test_a_long_prefill_of_the_head_takes_several_steps(tmp_path: Path) -> None:
    """It lacks 20 tokens, and one more after each step. It reads 6 in each. When it lacks 4, the
    pass that drafts reads them, and drafts the same as if it had read all at once."""
    driver = driver_of(tmp_path)
    target, proposer = driver.target, driver.proposer
    proposer.max_prefill_len = 6
    driver.begin(0, [(7 * i) % VOCAB for i in range(21)])
    tokens, missed, draft = driver.tokens[0], list[int](), NO_DRAFT
    work: Prefill | Decode = Prefill(0, tuple(tokens), 0, True)
    while not draft.tokens:
        (event,) = poll(target, work)
        proposer.observe(0, 0, event.hidden)
        tokens += event.tokens
        missed.append(proposer.draft_prefill_len(0, len(tokens)))
        (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, 21, GREEDY), 3)])
        work = Decode(0, 1)
    assert missed == [20, 15, 10]
    driver.first[0] = 1
    assert list(draft.tokens) == driver.expected(0, 3)


def test_states_that_were_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 states wait, so after a chunk of 9 tokens and 6 decoded ones, the head begins at
    token 16 - 4 = 12."""
    monkeypatch.setattr(eagle_proposer, "KEPT_STATES", 4)
    driver = driver_of(tmp_path)
    target, proposer = driver.target, driver.proposer
    driver.begin(0, list(range(9)))
    tokens = driver.tokens[0]
    assert proposer.num_available(0, tokens, SamplingParams()) == 0
    assert proposer.draft_prefill_len(0, 9) == 8
    for work in (Prefill(0, tuple(tokens), 0, True), *[Decode(0, 1)] * 6):
        (event,) = poll(target, work)
        proposer.observe(0, 0, event.hidden)
        tokens += event.tokens
    assert len(tokens) == 16
    assert proposer.num_available(0, tokens, SamplingParams()) == MAX_DRAFT_LEN
    assert proposer.draft_prefill_len(0, 16) == 3
    driver.first[0] = 12
    (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, 9, GREEDY), 3)])
    assert list(draft.tokens) == driver.expected(0, 3)
    assert proposer.num_cached(0, 16) > 0
    proposer.release(0)
    proposer.observe(0, 0, event.hidden)
    assert (proposer.draft_prefill_len(0, 16), proposer.num_cached(0, 16)) == (0, 0), (
        "nothing is cached"
    )


def test_a_pass_that_fails_leaves_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are lost, so the head begins at the next token, and shares nothing."""
    driver = driver_of(tmp_path)
    target, proposer, forward = driver.target, driver.proposer, EagleRunner.forward
    driver.begin(0, list(range(3, 15)))
    tokens = driver.tokens[0]

    def propose() -> list[int]:
        (draft,) = proposer.propose([DraftTask(SequenceStart(0, tokens, 12, GREEDY), 3)])
        return list(draft.tokens)

    def fails(*_: Any) -> Any:
        raise OutOfBlocksError

    for is_failing, work in ((True, Prefill(0, tuple(tokens), 0, True)), (False, Decode(0, 1))):
        (event,) = poll(target, work)
        proposer.observe(0, 0, event.hidden)
        tokens += event.tokens
        monkeypatch.setattr(EagleRunner, "forward", fails if is_failing else forward)
        if is_failing:
            with pytest.raises(OutOfBlocksError):
                propose()
    driver.first[0] = 13
    assert propose() == driver.expected(0, 3)
    proposer.release(0)
    assert proposer.pool.num_used == 0, "keys of a text without its beginning"


def test_states_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_proposer, "KEPT_STATES", 4)
    monkeypatch.setattr(eagle_proposer, "MAX_PARTS", 3)
    states, last = eagle_proposer._States(), 0
    for num in (10, *[1] * 50):
        states.add(torch.arange(last, last + num)[:, None])
        last += num
        assert 4 <= states.num <= 10 + 3
    num = states.num
    assert num <= 4 + 3
    assert states.take(num)[:, 0].tolist() == [*range(last - num, last)]
