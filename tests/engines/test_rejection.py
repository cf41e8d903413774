"""Draft and judge in a loop: the text has exactly the target's distribution, however it is judged.

A toy target and a different toy draft, tables of logits by the last token, write over five tokens.
The joint distribution of the first three tokens is compared with its enumeration, which
`reference_probs` works out on its own in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.decoding.noise import Stream, noise_key
from smartspec_py.engines.decoding.sampling import (
    DraftRequest,
    VerifyRequest,
    VerifyResult,
    draft_tokens,
    verify,
)
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.draft import Draft

pytestmark = pytest.mark.slow  # so that they run beside the others

VOCAB_SIZE = 5
NUM_TOKENS = 3
PROMPT = (0, 1)
TARGET = 1.5 * torch.randn(5, 5, generator=torch.Generator().manual_seed(11))
DRAFT = 1.5 * torch.randn(5, 5, generator=torch.Generator().manual_seed(12))
UNSURE = 4
"""Drafting ends at this token: how many drafts there are depends on what they are. It is the last
of them, or left out; a draft that was sampled for rejection must be passed."""

LEAST_P_VALUE = 1e-6
NUM_SEEDS = 2000

MODES: dict[str, tuple[Verification, bool]] = {
    "coupled": (Verification.COUPLED, True),
    "rejection of draws": (Verification.REJECTION, True),
    "rejection of choices": (Verification.REJECTION, False),
}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all truncations": {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "repetition": {"repetition_penalty": 3.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "bias": {"logit_bias": ((2, 1.5), (0, -1.0))},
    "bad words": {"bad_words": ((3,), (1, 2), (2, 0, 1))},
    "min_tokens": {"min_tokens": 2, "end_tokens": (2,)},
    "all": {
        "temperature": 1.3,
        "top_p": 0.95,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": ((4, 0.7),),
        "bad_words": ((0, 0),),
        "min_tokens": 1,
        "end_tokens": (3, 0),
    },
}

LESS_ALIKE = ("plain", "all truncations", "bad words", "all")
"""What shapes logits is the same for every mode: beside coupled, cases that shape them each in
another way will do."""


class Sequences:
    """Runs of the loop that differ by seed only, advanced side by side."""

    def __init__(self, params: dict[str, Any], seeds: Sequence[int], is_drawn: bool) -> None:
        self.samplings = [SamplingParams(seed=seed, **params) for seed in seeds]
        self.tokens = [list(PROMPT) for _ in seeds]
        self.histories = [TokenHistory(len(PROMPT)) for _ in seeds]
        for history in self.histories:
            history.extend(PROMPT)
        self.is_drawn = is_drawn

    def step(self, indices: Sequence[int], draft_lens: Sequence[int]) -> list[VerifyResult]:
        proposed = self._draft(indices, draft_lens) if any(draft_lens) else {}
        requests, contexts = [], []
        for i in indices:
            drafts, probs = proposed.get(i, ([], []))
            requests.append(
                VerifyRequest(
                    self.samplings[i],
                    len(self.tokens[i]),
                    self.histories[i],
                    draft=Draft(tuple(drafts), probs=torch.stack(probs) if probs else None),
                )
            )
            contexts += [self.tokens[i][-1], *drafts]
        results = verify(TARGET[contexts], requests)
        for i, result in zip(indices, results, strict=True):
            self.tokens[i] += result.tokens
            self.histories[i].extend(result.tokens)
        return results

    def _draft(
        self, indices: Sequence[int], draft_lens: Sequence[int]
    ) -> dict[int, tuple[list[int], list[torch.Tensor]]]:
        """Drafts and what they were drawn from (nothing, where coupled or chosen) by sequence."""
        proposed: dict[int, tuple[list[int], list[torch.Tensor]]] = {i: ([], []) for i in indices}
        wanted = dict(zip(indices, draft_lens, strict=True))
        active = [i for i in indices if wanted[i]]
        while active:
            if self.is_drawn:
                tokens, probs = self._guess(active, proposed)
            else:
                tokens = [(3 * (self.tokens[i] + proposed[i][0])[-1] + 1) % 5 for i in active]
                probs = [None] * len(active)
            going_on = []
            for i, token, drawn_from in zip(active, tokens, probs, strict=True):
                if token == UNSURE and drawn_from is None:
                    continue
                proposed[i][0].append(token)
                if drawn_from is not None:
                    proposed[i][1].append(drawn_from)
                if len(proposed[i][0]) < wanted[i] and token != UNSURE:
                    going_on.append(i)
            active = going_on
        return proposed

    def _guess(
        self, active: Sequence[int], proposed: dict[int, tuple[list[int], list[torch.Tensor]]]
    ) -> tuple[list[int], list[torch.Tensor | None]]:
        known = [self.tokens[i] + proposed[i][0] for i in active]
        requests = [
            DraftRequest(self.samplings[i], len(tokens), self.histories[i], tuple(proposed[i][0]))
            for i, tokens in zip(active, known, strict=True)
        ]
        tokens, probs = draft_tokens(DRAFT[[tokens[-1] for tokens in known]], requests)
        return tokens.tolist(), probs


def write(
    params: dict[str, Any],
    mode: str,
    seeds: Sequence[int] = range(NUM_SEEDS),
    max_draft_len: int = 3,
) -> list[tuple[int, ...]]:
    """The first tokens of each seed's text; draft lengths go through 0..max_draft_len."""
    verification, is_drawn = MODES[mode]
    params = {"temperature": 1.0, **params, "verification": verification}
    sequences = Sequences(params, seeds, is_drawn)
    step = 0
    while active := [
        i for i, t in enumerate(sequences.tokens) if len(t) < len(PROMPT) + NUM_TOKENS
    ]:
        draft_lens = [(seeds[i] + step) % (max_draft_len + 1) for i in active]
        sequences.step(active, draft_lens)
        step += 1
    return [tuple(t[len(PROMPT) : len(PROMPT) + NUM_TOKENS]) for t in sequences.tokens]


def reference_probs(row: list[float], tokens: Sequence[int], s: SamplingParams) -> list[float]:
    """The distribution of the next token after these, by the rules of `shaping`."""
    scores, generated = list(row), tokens[len(PROMPT) :]
    for token, bias in s.logit_bias:
        scores[token] += bias
    for *start, last in s.bad_words:
        if list(tokens[len(tokens) - len(start) :]) == start:
            scores[last] = -math.inf
    if len(generated) < s.min_tokens:
        for token in s.end_tokens:
            scores[token] = -math.inf
    for token in set(tokens):
        factor = s.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(generated):
        scores[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
    weights = [math.exp(score / s.temperature) for score in scores]
    order = sorted(range(VOCAB_SIZE), key=lambda token: -weights[token])[: s.top_k or VOCAB_SIZE]
    total, before, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if before < s.top_p * total and weights[token] >= s.min_p * max(weights):
            kept.append(token)
        before += weights[token]
    left = sum(weights[token] for token in kept)
    return [weights[t] / left if t in kept else 0.0 for t in range(VOCAB_SIZE)]


def joint_probs(params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of every text of NUM_TOKENS tokens."""
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    joint = {}
    for text in product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
        prob, tokens = 1.0, list(PROMPT)
        for token in text:
            prob *= reference_probs(TARGET[tokens[-1]].tolist(), tokens, sampling)[token]
            tokens.append(token)
        joint[text] = prob
    return joint


def p_value(texts: Sequence[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square statistic; cells that expect fewer than 5 are pooled, 0.0 for a text that
    cannot be."""
    found = dict.fromkeys(joint, 0)
    for text in texts:
        found[text] += 1
    cells: list[tuple[float, int]] = []
    pool_expected, pool_found = 0.0, 0
    for text, prob in joint.items():
        if prob == 0.0 and found[text]:
            return 0.0
        if prob * len(texts) >= 5:
            cells.append((prob * len(texts), found[text]))
        else:
            pool_expected, pool_found = pool_expected + prob * len(texts), pool_found + found[text]
    if pool_expected >= 5:
        cells.append((pool_expected, pool_found))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    half_df = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_df, torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, mode) for case in CASES for mode in MODES if mode == "coupled" or case in LESS_ALIKE],
)
def test_texts_have_the_distribution_of_the_target(case: str, mode: str) -> None:
    """2,000 seeds; a right sampler fails once in 10^6 choices of the seeds, which are fixed. Where
    draws are coupled, the text of each seed does not depend on its drafts."""
    is_coupled = mode == "coupled"
    texts = write(CASES[case], mode, max_draft_len=0 if is_coupled else 3)
    assert p_value(texts, joint_probs(CASES[case])) > LEAST_P_VALUE
    if is_coupled:
        assert write(CASES[case], mode, range(300)) == texts[:300]


def share_streams(monkeypatch: pytest.MonkeyPatch, stream: Stream, same_as: Stream) -> None:
    """Make one stream's noise another's."""

    def shared(seed: int, position: int, of: Stream = Stream.TARGET) -> int:
        return noise_key(seed, position, same_as if of is stream else of)

    monkeypatch.setattr("smartspec_py.engines.decoding.sampling.noise_key", shared)


P = torch.tensor([0.5, 0.3, 0.1, 0.1])
Q = torch.tensor([0.2, 0.3, 0.4, 0.1])
NUM_SINGLE = 5_000


def judge_single(
    p: torch.Tensor, q: torch.Tensor, verification: Verification, chosen: int | None = None
) -> list[VerifyResult]:
    """For each seed, one draft of q, or the chosen one, judged under p."""
    samplings = [
        SamplingParams(temperature=1.0, seed=seed, verification=verification)
        for seed in range(NUM_SINGLE)
    ]
    drafts = [Draft((chosen,))] * NUM_SINGLE if chosen is not None else []
    if not drafts:
        asked = [DraftRequest(sampling, 9) for sampling in samplings]
        tokens, probs = draft_tokens(q.log().repeat(NUM_SINGLE, 1), asked)
        drafts = [
            Draft((token,), probs=None if prob is None else prob[None])
            for token, prob in zip(tokens.tolist(), probs, strict=True)
        ]
    requests = [VerifyRequest(s, 9, draft=d) for s, d in zip(samplings, drafts, strict=True)]
    return verify(p.log().repeat(2 * NUM_SINGLE, 1), requests)


@pytest.mark.parametrize(
    ("shared", "q"),
    [
        # The draft's own noise decides on the draft.
        ((Stream.ACCEPT, Stream.DRAFT), (0.3, 0.01, 0.59, 0.1)),
        # What lost against the draft comes back less often.
        ((Stream.RESIDUAL, Stream.DRAFT), (0.3, 0.01, 0.59, 0.1)),
        # A rejection tells of the noise.
        ((Stream.RESIDUAL, Stream.ACCEPT), (0.1, 0.01, 0.3, 0.59)),
    ],
)
def test_streams_that_meet_in_one_decision_must_not_be_shared(
    shared: tuple[Stream, Stream], q: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of 5,000 seeds has the distribution p, and with shared noise has not."""
    p = torch.tensor([0.4, 0.4, 0.1, 0.1])
    expected = {(token,): prob for token, prob in enumerate(p.tolist())}
    for is_right in (True, False):
        if not is_right:
            share_streams(monkeypatch, *shared)
        results = judge_single(p, torch.tensor(q), Verification.REJECTION)
        found = p_value([result.tokens[:1] for result in results], expected)
        assert (found > LEAST_P_VALUE) == is_right


@pytest.mark.parametrize(
    ("verification", "chosen", "expected"),
    [
        # TV = (.3 + .3) / 2.
        (Verification.REJECTION, None, 0.7),
        # Both draws are x with probability 1 / sum over y of max(p_y / p_x, q_y / q_x):
        # x = 0: 1 / (1 + 3/2 + 2 + 1/2) = 1/5;       x = 1: 1 / (5/3 + 1 + 4/3 + 1/3) = 3/13;
        # x = 2: 1 / (5 + 3 + 1 + 1) = 1/10;          x = 3: 1 / (5 + 3 + 4 + 1) = 1/13.
        (Verification.COUPLED, None, 1 / 5 + 3 / 13 + 1 / 10 + 1 / 13),
        # A chosen draft is accepted as often as the target draws it.
        (Verification.REJECTION, 1, 0.3),
        (Verification.COUPLED, 1, 0.3),
    ],
)
def test_drafts_are_accepted_as_often_as_theory_says(
    verification: Verification, chosen: int | None, expected: float
) -> None:
    """Within 5 standard errors, or fails once in 10^6 choices of the seeds, which are fixed."""
    results = judge_single(P, Q, verification, chosen)
    share = sum(result.num_accepted for result in results) / NUM_SINGLE
    error = 5 * math.sqrt(expected * (1 - expected) / NUM_SINGLE)
    assert share == pytest.approx(expected, abs=error)


def test_equal_distributions_are_always_accepted() -> None:
    """p = q leaves nothing to replace a rejected draft with, so there must be none."""
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(4))
    samplings = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=seed, verification=Verification.REJECTION)
        for seed in range(500)
    ]
    drafts, probs = draft_tokens(logits, [DraftRequest(sampling, 9) for sampling in samplings])
    requests = [
        VerifyRequest(sampling, 9, draft=Draft((draft,), probs=prob[None]))
        for sampling, draft, prob in zip(samplings, drafts.tolist(), probs, strict=True)
        if prob is not None
    ]
    results = verify(logits.repeat_interleave(2, 0), requests)
    assert [result.num_accepted for result in results] == [1] * 500


@pytest.mark.parametrize("draft", [3, 4])
def test_a_draft_that_truncation_cuts_is_rejected(draft: int) -> None:
    """Top-k leaves 0 and 1 only, drawn from what is left of p after q."""
    sampling = SamplingParams(temperature=1.0, top_k=2, seed=5, verification=Verification.REJECTION)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).repeat(2, 1)
    for probs in (None, torch.full((1, 5), 0.2)):
        (result,) = verify(logits, [VerifyRequest(sampling, 9, draft=Draft((draft,), probs=probs))])
        assert result.num_accepted == 0
        assert result.tokens[0] in (0, 1)
