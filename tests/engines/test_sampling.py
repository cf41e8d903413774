"""The coupled draw: exact distribution, fixed noise, truncation, and no view of the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch

from smartspec_py.core.types import NO_TOKEN, SamplingParams, Verification
from smartspec_py.engines.decoding.noise import Stream, gumbel_noise, noise_key, uniform_noise
from smartspec_py.engines.decoding.sampling import DraftRequest, VerifyRequest, draft_tokens, verify
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.draft import Draft

GOLDEN_KEY = -4616330145664149646
GOLDEN_NOISE = [-0.08938146483572, -0.37376167543762, -1.12426811749081, 0.29255260274069]

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])


def draw_tokens(logits: torch.Tensor, requests: list[VerifyRequest]) -> list[int]:
    """The one token of each request, none of which has drafts."""
    return [token for result in verify(logits, requests) for token in result.tokens]


def draw_seeds(params: dict[str, Any], count: int) -> list[int]:
    """The token of each seed at one position."""
    requests = [VerifyRequest(SamplingParams(seed=seed, **params), 7) for seed in range(count)]
    return draw_tokens(LOGITS.repeat(count, 1), requests)


def test_positions_are_independent() -> None:
    """Pairs of draws at neighbouring positions of one seed: within 5 standard errors of p * p."""
    count = 8000
    logits = torch.zeros(3)
    requests = [
        VerifyRequest(SamplingParams(temperature=1.0, seed=seed), position)
        for seed in range(count)
        for position in (10, 11)
    ]
    tokens = torch.tensor(draw_tokens(logits.repeat(2 * count, 1), requests)).view(count, 2)
    pairs = torch.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9) / count
    error = 5 * (1 / 9 * 8 / 9 / count) ** 0.5
    assert ((pairs - 1 / 9).abs() <= error).all(), pairs


def test_noise_is_fixed_for_ever() -> None:
    """Stored texts would change with these numbers."""
    keys = torch.tensor([noise_key(1, 0), noise_key(2**64 - 1, 5)])
    noise = gumbel_noise(keys, torch.tensor([[0, 2047]]))
    assert noise_key(1, 0) == noise_key(1, 0, Stream.TARGET) == GOLDEN_KEY
    assert noise.flatten().tolist() == pytest.approx(GOLDEN_NOISE, abs=1e-12)


def test_streams_are_uniform_and_independent_of_one_another() -> None:
    """For each pair of streams, 20,000 keys: the correlation of their uniforms has the standard
    error 1 / sqrt(n), and each mean 1 / sqrt(12 n); within 5, or fails once in 10^5 runs."""
    count = 20_000
    numbers = torch.stack(
        [
            uniform_noise(torch.tensor([noise_key(seed, 3, stream) for seed in range(count)]))
            for stream in Stream
        ]
    )
    assert ((numbers > 0) & (numbers < 1)).all()
    assert ((numbers.mean(-1) - 0.5).abs() < 5 / math.sqrt(12 * count)).all()
    off_diagonal = torch.corrcoef(numbers) - torch.eye(len(Stream))
    assert (off_diagonal.abs() < 5 / math.sqrt(count)).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 1}])
def test_greedy_takes_the_best_whatever_the_seed(params: dict[str, Any]) -> None:
    assert set(draw_seeds(params, 50)) == {0}


def kinds() -> list[VerifyRequest]:
    """A check of every kind: each truncation, shaped or not, with and without drafts."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 2},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "min_p": 0.05},
    ]
    shapes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "bad_words": ((3, 4), (5,))},
    ]
    probs = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)).softmax(-1)
    history = TokenHistory(4)
    history.extend([1, 2, 3, 4, 5, 6, 3])
    requests = []
    for i, (param, shape, verification) in enumerate(product(params, shapes, Verification)):
        sampling = SamplingParams(
            seed=i, verification=verification, log_probs=i % 3 == 0, **param, **shape
        )
        requests += [
            VerifyRequest(sampling, 7, history),
            VerifyRequest(sampling, 7, history, draft=Draft((4, 7, 9))),
            VerifyRequest(sampling, 7, history, draft=Draft((4, 7, 9), probs=probs)),
        ]
    return requests


def test_a_verification_does_not_depend_on_its_neighbours() -> None:
    """Each alone, beside each other one, and in a batch of all kinds: verified the same."""
    requests = kinds()
    firsts = list(accumulate((request.num_rows for request in requests), initial=0))
    logits = 3 * torch.randn(firsts[-1], 50, generator=torch.Generator().manual_seed(0))
    parts = [logits[a:b] for a, b in pairwise(firsts)]
    alone = [verify(part, [request])[0] for part, request in zip(parts, requests, strict=True)]
    assert verify(logits, requests) == alone
    for i, j in product(range(0, len(requests), 16), range(len(requests))):
        pair = verify(torch.cat([parts[i], parts[j]]), [requests[i], requests[j]])
        assert pair == [alone[i], alone[j]], (requests[i], requests[j])


def test_drafts_that_only_the_device_knows_are_verified_like_others() -> None:
    """Beside others, by both verifications. Shaping needs drafts that the host knows."""

    def unknown(draft: Draft) -> Draft:
        return draft._replace(tokens=(NO_TOKEN,) * 3, on_device=torch.tensor(draft.tokens))

    requests = [request for request in kinds() if not request.sampling.shapes_logits]
    on_device = [
        replace(request, draft=unknown(request.draft))
        if request.draft.tokens and i % 4
        else request
        for i, request in enumerate(requests)
    ]
    num_rows = sum(request.num_rows for request in requests)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, 50, generator=generator)
    rows = iter(logits)
    for request in requests:
        for draft, row in zip(request.draft.tokens, rows, strict=False):
            row[draft] += 7.0  # so that some drafts are accepted
        next(rows)
    expected = verify(logits, requests)
    assert verify(logits, on_device) == expected
    assert len({result.num_accepted for result in expected}) > 2


def test_a_guess_does_not_depend_on_its_neighbours() -> None:
    requests = [DraftRequest(c.sampling, 7, c.history) for c in kinds()]
    logits = 3 * torch.randn(len(requests), 50, generator=torch.Generator().manual_seed(0))
    tokens, probs = draft_tokens(logits, requests)
    for i, one in enumerate(requests):
        (token,), (prob,) = draft_tokens(logits[i : i + 1], [one])
        assert token == tokens[i]
        assert (prob is None) == (probs[i] is None)
        if prob is not None:
            assert torch.equal(prob, probs[i])
            assert prob.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_large_batches_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [VerifyRequest(SamplingParams(temperature=1.0, seed=seed), 3) for seed in range(20)]
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    whole = verify(logits, requests)
    monkeypatch.setattr("smartspec_py.engines.decoding.sampling._MAX_SCORES", 3 * 50)
    assert verify(logits, requests) == whole


@pytest.mark.parametrize(
    ("drafts", "tokens", "num_accepted"),
    [
        ((), (0,), 0),
        ((1, 1), (0,), 0),
        ((0, 1), (0, 2), 1),
        ((0, 2), (0, 2, 4), 2),
        ((1, 2), (0,), 0),  # a draft that equals the draw behind a rejected one does not count
    ],
)
@pytest.mark.parametrize("verification", list(Verification))
def test_the_longest_prefix_that_equals_the_draws_is_kept(
    drafts: tuple[int, ...], tokens: tuple[int, ...], num_accepted: int, verification: Verification
) -> None:
    """The best tokens of the rows are 0, 2 and 4; greedy, so both verifications agree."""
    logits = torch.eye(5)[[0, 2, 4]][: len(drafts) + 1]
    sampling = SamplingParams(verification=verification)
    (result,) = verify(logits, [VerifyRequest(sampling, 7, draft=Draft(drafts))])
    assert (result.tokens, result.num_accepted) == (tokens, num_accepted)
    assert result.log_probs == ()


def test_log_probs_are_of_the_unprocessed_logits() -> None:
    """Softmax of ln 1, ln 2, ln 5 is 1/8, 2/8, 5/8; the bias moves the choice, not these."""
    logits = torch.tensor([1.0, 2.0, 5.0]).log().repeat(3, 1)
    history = TokenHistory(1)
    history.extend([0])
    biased = SamplingParams(logit_bias=((0, 9.0),), log_probs=True)
    plain = SamplingParams(log_probs=True, num_top_log_probs=2)
    results = verify(
        logits, [VerifyRequest(biased, 1, history, draft=Draft((0,))), VerifyRequest(plain, 1)]
    )
    assert [v.tokens for v in results] == [(0, 0), (2,)]
    assert [one.token for one in results[0].log_probs] == [0, 0]
    assert [one.log_prob for one in results[0].log_probs] == pytest.approx([math.log(1 / 8)] * 2)
    assert [one.top for one in results[0].log_probs] == [(), ()]
    (last,) = results[1].log_probs
    assert [token for token, _ in last.top] == [2, 1]
    values = [last.log_prob, *(value for _, value in last.top)]
    assert values == pytest.approx([math.log(5 / 8), math.log(5 / 8), math.log(2 / 8)])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}]
)
@pytest.mark.parametrize("verification", list(Verification))
def test_a_row_without_any_token_left_is_drawn_all_the_same(
    params: dict[str, Any], verification: Verification
) -> None:
    """All is banned: the unprocessed best, whatever was drafted; never an error."""
    words = tuple((token,) for token in range(5))
    sampling = SamplingParams(bad_words=words, verification=verification, **params)
    history = TokenHistory(1)
    history.extend([0])
    logits = LOGITS.repeat(3, 1)
    (result,) = verify(logits, [VerifyRequest(sampling, 1, history, draft=Draft((0, 3)))])
    assert result.tokens == (0, 0)
    tokens, probs = draft_tokens(logits[:1], [DraftRequest(sampling, 2, history, (0,))])
    assert tokens.tolist() == [0]
    assert probs[0] is None or probs[0].tolist() == [1, 0, 0, 0, 0]


def test_nothing_to_draw() -> None:
    assert verify(torch.empty(0, 5), []) == []
    tokens, probs = draft_tokens(torch.empty(0, 5), [])
    assert (tokens.tolist(), probs) == ([], [])
