"""Trees of drafts: the same text as without drafts, with every engine, sampling and mixture."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch_models import CONFIGS, MAX_LEN, VOCAB_SIZE, check_rows, make_target, poll

from smartspec_py.core.types import ROOT, SamplingParams, Verification
from smartspec_py.engines.base import Decode, Prefill, Verify, Work
from smartspec_py.engines.torch.sampling import VerifyRequest, verify
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.engines.torch.tree import accepted_path, depths, path_to, visibility

NUM_TOKENS = 30
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=6, log_probs=True),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=1.3, seed=7, bad_words=((3,), (9, 4), (9, 4, 7)), min_p=0.01),
)


@dataclass
class Tree:
    drafts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


def random_tree(rng: random.Random, expected: list[int], most: int) -> Tree:
    """Up to `most` drafts. expected: the tokens that follow; more than half of the drafts are one
    of these, if the drafts before them are."""
    tree, right = Tree(), {ROOT: 0}  # drafts that are right, with their depth
    for index in range(rng.randint(1, most)):
        parent = rng.choice([*right, rng.randrange(ROOT, index)])
        depth = right.get(parent)
        token = rng.randrange(VOCAB_SIZE)
        if depth is not None and depth < len(expected) and rng.random() < 0.7:
            token = expected[depth]
        siblings = [t for t, p in zip(tree.drafts, tree.parents, strict=True) if p == parent]
        while token in siblings:
            token = rng.randrange(VOCAB_SIZE)
        if depth is not None and depth < len(expected) and token == expected[depth]:
            right[index] = depth + 1
        tree.drafts.append(token)
        tree.parents.append(parent)
    return tree


def test_shape_of_a_tree() -> None:
    parents = (ROOT, 0, ROOT, 1, 0)
    assert depths(parents) == [0, 1, 2, 1, 3, 2]
    assert path_to(3, parents) == [0, 1, 3]
    assert path_to(ROOT, parents) == []
    assert [row.nonzero()[0].tolist() for row in visibility(parents)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 3],
        [0, 1, 2, 4],
        [0, 1, 5],
    ]
    drafts = (7, 8, 9, 5, 6)
    assert accepted_path(drafts, parents, [7, 6, 0, 0, 0, 1]) == [0, 4]
    assert accepted_path(drafts, parents, [9, 0, 0, 7, 0, 0]) == [2]
    assert accepted_path(drafts, parents, [4, 0, 0, 0, 0, 0]) == []


def plain_text(target: TorchTarget, prompt: list[int], sampling: SamplingParams) -> tuple:
    """Text, its log-probabilities, without drafts."""
    target.begin(99, prompt, len(prompt), sampling, reuses_prefix=False)
    events = poll(target, Prefill(99, tuple(prompt), 0, True))
    for _ in range(NUM_TOKENS + 8):
        events += poll(target, Decode(99, 1))
    target.release(99)
    return (
        [token for event in events for token in event.tokens],
        [one.log_prob for event in events for one in event.log_probs],
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_with_trees_are_those_without(kind: str) -> None:
    """Five sequences with different samplings. A step mixes trees, chains, single tokens and
    prompt chunks; sequences are cancelled and begin again with their text so far."""
    rng = random.Random(1)
    target = make_target(kind)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 40))] for _ in SAMPLINGS]
    expected = [plain_text(target, p, s) for p, s in zip(prompts, SAMPLINGS, strict=True)]
    texts: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    unread: dict[int, list[int]] = {}
    done: set[int] = set()
    counts: Counter[str] = Counter()

    def begin(number: int) -> None:
        known = prompts[number] + texts[number]
        num_cached = target.begin(number, known, len(prompts[number]), SAMPLINGS[number])
        unread[number] = known[num_cached:]

    def work_of(number: int) -> Work:
        if unread[number]:
            start = len(prompts[number]) + len(texts[number]) - len(unread[number])
            size = min(len(unread[number]), rng.randint(1, 12))
            chunk, unread[number] = unread[number][:size], unread[number][size:]
            return Prefill(number, tuple(chunk), start, not unread[number])
        follows = expected[number][0][len(texts[number]) :]
        kind = rng.choice(("tree", "tree", "tree", "chain", "none"))
        if kind == "none":
            return Decode(number, 1)
        if kind == "chain":
            return Verify(number, (*follows[: rng.randint(1, 3)], rng.randrange(VOCAB_SIZE)))
        tree = random_tree(rng, follows, 20)
        return Verify(number, tuple(tree.drafts), None, tuple(tree.parents))

    for number in range(len(prompts)):
        begin(number)
    while len(done) < len(prompts):
        work = [work_of(number) for number in range(len(prompts)) if number not in done]
        rng.shuffle(work)
        for event, one in zip(poll(target, *work), work, strict=True):
            number = event.sequence
            texts[number] += event.tokens
            log_probs[number] += [one.log_prob for one in event.log_probs]
            if isinstance(one, Verify) and one.parents:
                counts["accepted"] += event.num_accepted
                counts["moved"] += list(event.path) != list(range(event.num_accepted))
                assert [one.drafts[i] for i in event.path] == list(event.tokens[:-1])
        for number in range(len(prompts)):
            if number not in done and len(texts[number]) >= NUM_TOKENS:
                target.release(number)
                done.add(number)
            elif number not in done and not unread[number] and rng.random() < 0.05:
                target.release(number)  # preempted
                begin(number)
        check_rows(target)
    for text, values, (plain, plain_values) in zip(texts, log_probs, expected, strict=True):
        assert text[:NUM_TOKENS] == plain[:NUM_TOKENS]
        torch.testing.assert_close(values, plain_values[: len(values)], atol=1e-4, rtol=1e-4)
    assert counts["accepted"] > 40, "the trees were not accepted"
    assert counts["moved"] > 10, "no keys were moved"


def test_sampled_trees_follow_the_distribution() -> None:
    """Chi-square of the emitted tokens against the distribution. The tree branches at depths 1 and
    2; the noise of the drafts is that of the target, so the drafts depend on it."""
    logits = torch.tensor(
        [[0.5, 1.0, 0.0, 0.7], [0.1, 0.4, 1.2, 0.2], [1.0, 0.3, 0.2, 0.9], [0.6, 0.1, 0.8, 0.4]]
    )
    # Rows: the root, after 1, after 3, after (1, 2), after (1, 0).
    rows = logits[[0, 1, 2, 3, 3]]
    drafts, parents = (1, 3, 2, 0), (ROOT, ROOT, 0, 0)
    seen: Counter[tuple[int, ...]] = Counter()
    num = 20_000
    requests = [
        VerifyRequest(SamplingParams(temperature=1.0, seed=s), 10, None, drafts, None, parents)
        for s in range(num)
    ]
    for result in verify(rows.repeat(num, 1), requests):
        seen[result.tokens] += 1
    p = logits.softmax(-1)
    expected = {(t,): p[0, t] for t in (0, 2)}
    expected |= {(3, t): p[0, 3] * p[2, t] for t in range(4)}
    expected |= {(1, t): p[0, 1] * p[1, t] for t in (1, 3)}
    expected |= {(1, d, t): p[0, 1] * p[1, d] * p[3, t] for d in (2, 0) for t in range(4)}
    assert sum(expected.values()) == pytest.approx(1.0)
    assert seen.keys() <= expected.keys()
    chi = sum((seen[k] - num * float(v)) ** 2 / (num * float(v)) for k, v in expected.items())
    assert chi < 37.7, "beyond the 0.1 % quantile with 15 degrees of freedom"


def test_trees_are_not_verified_by_rejection() -> None:
    sampling = SamplingParams(temperature=1.0, verification=Verification.REJECTION)
    request = VerifyRequest(sampling, 3, None, (1, 2), None, (ROOT, ROOT))
    with pytest.raises(AssertionError, match="rejection"):
        verify(torch.zeros(3, VOCAB_SIZE), [request])
    greedy = replace(request, sampling=replace(sampling, temperature=0.0))
    assert verify(torch.eye(3, VOCAB_SIZE), [greedy])[0].tokens == (0,)


def test_a_tree_may_fill_the_row() -> None:
    target = make_target("llama")
    prompt = [5] * (MAX_LEN - 6)
    target.begin(1, prompt, len(prompt), SamplingParams())
    token = poll(target, Prefill(1, tuple(prompt), 0, True))[0].tokens[0]
    [event] = poll(target, Verify(1, (1, 2, 3, 4, token), None, (ROOT, 0, ROOT, 1, ROOT)))
    assert 1 <= len(event.tokens) <= 4
