"""Trees of drafts: the same text as without drafts, with every sampling and mixture of work."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from local_models import CONFIGS, MAX_LEN, VOCAB_SIZE, check_cache, make_target, poll
from step_driver import Driver, prompts

from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.base import Decode, Event, Prefill, SequenceStart, Verify
from smartspec_py.engines.decoding.sampling import (
    DraftRequest,
    VerifyRequest,
    best_guesses,
    draft_tokens,
    verify,
)
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.draft import Draft, Tree
from smartspec_py.engines.drafts.growing import TreeTensors
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.runner import RowInput

NUM_TOKENS = 30
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=6, log_probs=True),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=1.3, seed=7, bad_words=((3,), (9, 4), (9, 4, 7)), min_p=0.01),
)


def random_tree(rng: random.Random, expected: Sequence[int], most: int) -> Draft:
    """Up to `most` drafts. expected: the tokens that follow; more than half of the drafts are one
    of these, if the drafts before them are."""
    drafts: list[int] = []
    parents: list[int] = []
    right = {0: 0}  # nodes on the path of expected tokens, with their depth
    for node in range(1, rng.randint(2, most) + 1):
        parent = rng.choice([*right, rng.randrange(node)])
        siblings = [t for t, p in zip(drafts, parents, strict=True) if p == parent]
        depth, token = right.get(parent, NUM_TOKENS), rng.randrange(VOCAB_SIZE)
        if depth < len(expected) and rng.random() < 0.7:
            token = expected[depth]
        while token in siblings:
            token = rng.randrange(VOCAB_SIZE)
        if depth < len(expected) and token == expected[depth]:
            right[node] = depth + 1
        drafts.append(token)
        parents.append(parent)
    return Draft(tuple(drafts), tree=Tree(tuple(parents)))


def test_places_of_a_tree() -> None:
    """Tokens 1 and 3 follow the first one, 2 and 5 follow 1, 4 follows 2. Or the first
    one is in the row: tokens 0 and 2 follow it."""
    item = RowInput(1, 7, [9] * 6, 6, tree=Tree((0, 1, 0, 2, 1)))
    assert list(item.slots) == [7, 8, 9, 10, 11, 12]
    assert item.positions == [7, 8, 9, 8, 10, 9]
    apart = RowInput(1, 7, [9] * 4, 4, tree=Tree((0, 1, 0, 3)))
    assert apart.positions == [7, 8, 7, 8]


def plain_text(target: LocalTarget, prompt: list[int], sampling: SamplingParams) -> tuple:
    """The text without drafts, and its log-probabilities."""
    target.begin(SequenceStart(99, prompt, len(prompt), sampling, reuses_prefix=False))
    events = poll(target, Prefill(99, tuple(prompt), 0, True))
    for _ in range(NUM_TOKENS + 8):
        events += poll(target, Decode(99, 1))
    target.release(99)
    return (
        [token for event in events for token in event.tokens],
        [entry.log_prob for event in events for entry in event.log_probs],
    )


class TreeDriver(Driver):
    """Drafts are random trees, and some chains, with tokens of the expected texts, by sequence."""

    def __init__(self, target: LocalTarget, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(target, None, seed=1)
        self.texts = texts
        self.drafts: dict[int, Draft] = {}
        self.log_probs: list[list[float]] = [[] for _ in texts]
        self.num_moved = 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.drafts = {task.sequence: self.draft(task) for task in tasks}
        return [*self.drafts.values()]

    def draft(self, task: DraftTask) -> Draft:
        follows = self.texts[task.sequence][len(task.tokens) - self.num_prompt[task.sequence] :]
        kind = self.rng.choice(("tree", "tree", "tree", "chain", "none"))
        if kind == "tree":
            return random_tree(self.rng, follows, 20)
        right = follows[: self.rng.randint(1, 3)]
        return Draft((*right, self.rng.randrange(VOCAB_SIZE)) if kind == "chain" else ())

    def take(self, event: Event) -> None:
        self.tokens[event.sequence] += event.tokens
        self.log_probs[event.sequence] += [entry.log_prob for entry in event.log_probs]
        draft = self.drafts.get(event.sequence)
        if draft and draft.tree:
            self.num_accepted += event.num_accepted
            self.num_moved += event.tokens[:-1] != draft.tokens[: event.num_accepted]

    def release(self, sequence: int) -> None:
        self.target.release(sequence)


@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_with_trees_are_those_without(kind: str) -> None:
    """Five sequences with different samplings. A step mixes trees, chains, single tokens and
    prompt chunks; sequences are preempted and begin again with their text so far."""
    rng, target = random.Random(1), make_target(kind)
    starts = prompts(len(SAMPLINGS), seed=1)
    expected = [plain_text(target, p, s) for p, s in zip(starts, SAMPLINGS, strict=True)]
    driver = TreeDriver(target, [text for text, _ in expected])
    for number, start in enumerate(starts):
        driver.begin(number, start, SAMPLINGS[number])
    texts = {}
    while driver.tokens:
        driver.step()
        for number, start in enumerate(starts):
            if len(driver.tokens.get(number, ())) >= len(start) + NUM_TOKENS:
                texts[number] = driver.end(number)[len(start) :]
            elif not driver.unread.get(number, True) and rng.random() < 0.05:
                driver.begin(number, driver.end(number), SAMPLINGS[number], len(start))
        check_cache(target)
    for number, (plain, log_probs) in enumerate(expected):
        assert texts[number][:NUM_TOKENS] == plain[:NUM_TOKENS]
        found = driver.log_probs[number]
        torch.testing.assert_close(found, log_probs[: len(found)], atol=1e-4, rtol=1e-4)
    assert driver.num_accepted > 40, "the trees were not accepted"
    assert driver.num_moved > 10, "no keys were moved"
    assert any(driver.num_cached.values()), "no prefix was reused"


def test_sampled_trees_follow_the_distribution() -> None:
    """Chi-square of the emitted tokens against the distribution at each position. The drafts depend
    on the noise that the target draws with: the two best guesses of another distribution, and two
    tokens after the first of them."""
    logits = torch.tensor(
        [[0.5, 1.0, 0.0, 0.7], [0.1, 0.4, 1.2, 0.2], [1.0, 0.3, 0.2, 0.9], [0.6, 0.1, 0.8, 0.4]]
    )
    num, seen = 20_000, [Counter[int]() for _ in logits]
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(num)]
    guesses, _ = best_guesses(
        logits[3:].expand(num, -1), [DraftRequest(sampling, 10) for sampling in params], 2
    )
    drafts = [(best, other, 2, 0) for best, other in guesses.tolist()]
    requests = [
        VerifyRequest(sampling, 10, draft=Draft(each, tree=Tree((0, 0, 1, 1))))
        for sampling, each in zip(params, drafts, strict=True)
    ]
    rows = logits[[0, 1, 1, 2, 3]]  # the last two follow the drafts 2 and 0
    counts = Counter[int]()
    for result, each in zip(verify(rows.repeat(num, 1), requests), drafts, strict=True):
        for token, row in zip(result.tokens, result.nodes, strict=True):
            seen[(0, 1, 1, 2, 3)[row]][token] += 1
        counts[each.index(result.tokens[0]) if result.tokens[0] in each[:2] else -1] += 1
    assert min(counts[0], counts[1], counts[-1]) > 500, "each guess is right, or none"
    chi = 0.0
    for of_row, p in zip(seen, logits.softmax(-1).tolist(), strict=True):
        total = of_row.total()
        chi += sum((of_row[t] - total * p[t]) ** 2 / (total * p[t]) for t in range(4))
    assert chi < 32.9, "beyond the 0.1 % quantile with 12 degrees of freedom"


def test_trees_are_not_verified_by_rejection() -> None:
    sampling = SamplingParams(temperature=1.0, verification=Verification.REJECTION)
    with pytest.raises(AssertionError, match="rejection"):
        verify(
            torch.zeros(3, 9), [VerifyRequest(sampling, 3, draft=Draft((1, 2), tree=Tree((0, 0))))]
        )


def test_a_tree_may_fill_the_row() -> None:
    target = make_target("llama")
    prompt = [5] * (MAX_LEN - 6)
    target.begin(SequenceStart(1, prompt, len(prompt), SamplingParams()))
    token = poll(target, Prefill(1, tuple(prompt), 0, True))[0].tokens[0]
    [event] = poll(target, Verify(1, Draft((1, 2, 3, 4, token), tree=Tree((0, 1, 0, 2, 0)))))
    assert 1 <= len(event.tokens) <= 4
    assert event.num_drafted == 3, "a tree counts as a draft of its longest path"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_best_guess_is_the_draft_of_a_chain(sampling: SamplingParams) -> None:
    torch.manual_seed(1)
    history = TokenHistory(2)
    history.extend([4, 9, 5])
    logits = torch.randn(6, VOCAB_SIZE)
    requests = [DraftRequest(sampling, 3 + row, history, (1,) * row) for row in range(6)]
    tokens, log_probs = best_guesses(logits, requests, 8)
    assert tokens[:, 0].tolist() == draft_tokens(logits, requests)[0].tolist()
    assert (log_probs.diff() <= 0).all()
    assert (log_probs <= 0).all()
    few = SamplingParams(temperature=1.0, top_k=3)
    assert best_guesses(logits, [DraftRequest(few, 3)] * 6, 8)[1].isfinite().sum() == 18


def test_growing_trees() -> None:
    """Two trees of width 2. In the second, one guess has no second best."""
    inf, log = torch.inf, torch.tensor
    trees = TreeTensors(2, torch.device("cpu"))
    ends = trees.grow(log([[[5, 6]], [[7, 8]]]), log([[[-0.1, -2.0]], [[0.0, -inf]]]))
    assert [each.tolist() for each in ends] == [[[5, 6], [7, 8]], [[0, 0], [0, 0]]]
    guesses = log([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    ends = trees.grow(guesses, log([[[-3.0, -4.0], [-0.5, -0.7]], [[0.0, -5.0], [0.0, -1.0]]]))
    assert ends[0][0].tolist() == [3, 4, 1, 2]
    assert ends[1][0].tolist() == [1, 1, 0, 0]
    first, second = trees.drafts([4, 9])
    assert first == Draft((5, 6, 3, 4), tree=Tree((0, 0, 2, 2)))
    assert second == Draft((7, 1, 2), tree=Tree((0, 1, 1)))


@pytest.mark.parametrize(("far", "best"), [(0, 0.0), (0, -1e-5), (5e3, -1e-4), (0, torch.nan)])
def test_a_tree_has_the_parents_of_its_nodes(far: float, best: float) -> None:
    """Guesses that are certain, that float32 adds to a path without a change, or that are no
    numbers: every number of nodes is a tree, and no path is longer than the planned depth."""
    torch.manual_seed(3)
    depth, width = 5, 8
    trees = TreeTensors(3, torch.device("cpu"))
    for level in range(depth):
        shape = (3, trees.num_ends, width)
        log_probs = torch.randn(shape).sub(8).mul(100).sort(-1, descending=True).values
        log_probs[:2, :, 0] = best
        trees.grow(torch.arange(width).expand(shape), log_probs - (far if level == 0 else 0.0))
    for num in range(1, 40):
        for draft in trees.drafts([num, num // 2, num]):
            lengths = [0]
            for place, parent in enumerate(draft.tree.parents, start=1):
                assert parent < place
                lengths.append(1 + lengths[parent])
            assert max(lengths) <= depth
            pairs = set(zip(draft.tree.parents, draft.tokens, strict=True))
            assert len(pairs) == len(draft.tokens)
