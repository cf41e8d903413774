"""Draws tokens and verifies drafts. Both ways to verify keep the target's distribution exactly.

`processors` and `truncation` first process a row of logits: shaping, temperature, truncation.
Greedy rows (temperature 0 or top_k 1) take the best token of the shaped row.

*Coupled* verification (the default): the same seed gives the same text. The token at absolute
position t is the argmax of

    log p(token) + gumbel(seed, t, token)

over the tokens that truncation keeps. By the Gumbel-max rule, this is an exact draw from p. The
draft model draws with the same noise, and a draft is accepted if it equals the target's own draw.
So the text depends neither on the draft model nor on the draft lengths (Daliri et al., "Coupling
without communication and drafter-invariant speculative decoding", 2024).

*Rejection* verification: a draft x that was drawn from q is accepted with probability
min(1, p(x) / q(x)). A rejected draft is replaced by a draw from max(p - q, 0), normalised
(Leviathan et al., "Fast inference from transformers via speculative decoding", 2023). This accepts
1 - TV(p, q) of the drafts, the maximum for any rule, but the text depends on the drafts. Greedy
rows are verified as in coupled verification.

Drafts can be a tree. The target's own draw after a draft is what it would be after the same tokens
in a chain, because the noise depends on the position only. If a child of the draft is that token,
the child is accepted. So coupled verification of a tree also gives the same text.

Noise is computed only for the tokens that truncation keeps. Its integer hashing gives the same
result on every device. If logits differ slightly, near-ties of the scores can still give another
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from smartspec_py.core.types import (
    NO_TOKEN,
    ROOT,
    SamplingParams,
    TokenLogProb,
    Verification,
)
from smartspec_py.engines.torch.noise import Stream, noise_key, uniform_noise
from smartspec_py.engines.torch.processors import ShapedLogits, Span, TokenHistory
from smartspec_py.engines.torch.tree import accepted_path, depths, path_to
from smartspec_py.engines.torch.truncation import Candidates, best_tokens, truncate, truncation_kind

_MAX_SCORES = 1 << 24
"""Scores held at once: 128 MiB of float64. Intermediate results take a few times as much."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One sequence of a target's pass: len(drafts) + 1 rows of logits.

    position: absolute position of the first token to draw.
    history: the tokens before it; required if sampling.shapes_logits.
    parents: if the drafts are a tree, see `tree`; row i + 1 of the logits follows draft i. Empty
        for a chain. Drafts that are verified by rejection must be a chain.
    draft_probs: [len(drafts), vocab], the distribution of each draft; None if the drafts were not
        sampled. Pass every sampled draft, even an unlikely one: dropping a draft because of its
        value would bias the text. Ending the drafts after a token because of its value is safe.
    """

    sampling: SamplingParams
    position: int
    history: TokenHistory | None = None
    drafts: tuple[int, ...] = ()
    draft_probs: torch.Tensor | None = None
    parents: tuple[int, ...] = ()

    @property
    def depths(self) -> Sequence[int]:
        """Of each row of logits: how many drafts are before its token."""
        return depths(self.parents) if self.parents else range(len(self.drafts) + 1)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """tokens: the accepted drafts and one more token; empty if the logits of the latter are not
    finite. path: indices of the accepted drafts. log_probs: of each token; empty unless requested.
    """

    tokens: tuple[int, ...]
    path: Sequence[int]
    log_probs: tuple[TokenLogProb, ...] = ()

    @property
    def num_accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One token to draft.

    position: absolute. history: the tokens before the drafts of this step; required if
    sampling.shapes_logits. provisional: drafts of this step before this token.
    """

    sampling: SamplingParams
    position: int
    history: TokenHistory | None = None
    provisional: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draw:
    """One token to draw from a row of logits. draft: the draft at this position, for rejection."""

    row: int
    sampling: SamplingParams
    position: int
    draft: int = NO_TOKEN
    draft_probs: torch.Tensor | None = None  # [vocab]


def verify(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    """Verify the requests with their rows of logits [sum of len(drafts) + 1, vocab], float32.

    A row with NaN, or whose maximum is infinite, draws NO_TOKEN, which equals no draft.
    """
    firsts = _first_rows(requests)
    rows = _shaped(logits, requests, firsts)
    accepted = _verify_by_rejection(rows, requests, firsts)
    draws, replacements = _plan_draws(requests, firsts, accepted)
    tokens = rows.argmax()
    for group in _groups(draws, logits):
        drawn = _candidates(rows, group).draw(_keys(group, Stream.TARGET, logits))
        tokens[_index(group, logits)] = drawn
    for group in _groups(replacements, logits):
        tokens[_index(group, logits)] = _replace(rows, group)
    tokens.masked_fill_(~logits.amax(-1).isfinite(), NO_TOKEN)
    results, drawn_tokens = [], tokens.tolist()
    for request, first in zip(requests, firsts, strict=True):
        drawn_here = drawn_tokens[first : first + len(request.drafts) + 1]
        path = _accepted(request, drawn_here, accepted.get(first))
        last = path[-1] + 1 if path else 0
        emitted = (*(request.drafts[i] for i in path), drawn_here[last])
        results.append(VerifyResult(() if drawn_here[last] == NO_TOKEN else emitted, path))
    return _with_log_probs(results, logits, requests, firsts)


def guess_tokens(
    logits: torch.Tensor, requests: Sequence[DraftRequest], width: int
) -> tuple[list[list[int]], list[torch.Tensor | None]]:
    """The `width` best guesses from each row of logits [len(requests), vocab], float32.

    The first guess is the draft. The others are the next best ones with the same noise; NO_TOKEN if
    there is none, as for draws from the row's own distribution. That distribution is also returned,
    [vocab] float32. It is None for greedy tokens and for draws with the target's noise.
    """
    spans = [
        Span(row, 1, one.sampling, one.position, _history(one), one.provisional)
        for row, one in enumerate(requests)
        if one.sampling.shapes_logits
    ]
    rows = ShapedLogits(logits, spans)
    sampled = [(row, one) for row, one in enumerate(requests) if not one.sampling.is_greedy]
    draws = [_Draw(row, one.sampling, one.position) for row, one in sampled]
    tokens = logits.new_full((len(requests), width), NO_TOKEN, dtype=torch.long)
    tokens[:, 0] = rows.argmax()
    greedy = [row for row, one in enumerate(requests) if one.sampling.is_greedy]
    if width > 1 and greedy:
        tokens[greedy] = best_tokens(rows.take(greedy), width)
    probs: list[torch.Tensor | None] = [None] * len(requests)
    for group in _groups(draws, logits):
        candidates = _candidates(rows, group)
        is_coupled = group[0].sampling.verification is Verification.COUPLED
        if is_coupled:
            keys = _keys(group, Stream.TARGET, logits)
            drawn = candidates.best(keys, width)
            tokens[_index(group, logits), : drawn.shape[-1]] = drawn
        else:
            drawn = candidates.draw(_keys(group, Stream.DRAFT, logits))
            tokens[_index(group, logits), 0] = drawn
            for draw, drawn_from in zip(group, candidates.spread(logits.shape[-1]), strict=True):
                probs[draw.row] = drawn_from
    guesses: list[list[int]] = tokens.tolist()
    return guesses, probs


def _accepted(
    request: VerifyRequest, drawn: Sequence[int], num_by_rejection: int | None
) -> Sequence[int]:
    """Indices of the accepted drafts. drawn: the token drawn from each of the request's rows."""
    if num_by_rejection is not None:
        return range(num_by_rejection)
    if request.parents:
        return accepted_path(request.drafts, request.parents, drawn)
    return range(_count_equal(request.drafts, drawn))


def _first_rows(requests: Sequence[VerifyRequest]) -> list[int]:
    return list(accumulate((len(request.drafts) + 1 for request in requests), initial=0))[:-1]


def _shaped(
    logits: torch.Tensor, requests: Sequence[VerifyRequest], firsts: Sequence[int]
) -> ShapedLogits:
    spans = [
        span
        for one, first in zip(requests, firsts, strict=True)
        if one.sampling.shapes_logits
        for span in _spans(one, first)
    ]
    return ShapedLogits(logits, spans)


def _spans(one: VerifyRequest, first: int) -> list[Span]:
    """One span for a chain. In a tree each row has its own drafts before it, so its own span."""
    history = _history(one)
    if not one.parents:
        return [Span(first, len(one.drafts) + 1, one.sampling, one.position, history, one.drafts)]
    found = []
    for draft, depth in enumerate(one.depths, start=ROOT):
        before = tuple(one.drafts[i] for i in path_to(draft, one.parents))
        row = first + draft + 1
        found.append(Span(row, 1, one.sampling, one.position + depth, history, before))
    return found


def _history(one: VerifyRequest | DraftRequest) -> TokenHistory:
    assert one.history is not None, "shaping logits needs the history"
    return one.history


def _verify_by_rejection(
    rows: ShapedLogits, requests: Sequence[VerifyRequest], firsts: Sequence[int]
) -> dict[int, int]:
    """Number of accepted drafts, by first row, for requests that are verified by rejection.

    This waits for the device once. In return, only one row per request needs noise afterwards.
    """
    drafted = {
        first: _drafted(request, first)
        for request, first in zip(requests, firsts, strict=True)
        if request.sampling.verification is Verification.REJECTION
        and request.drafts
        and not request.sampling.is_greedy
    }
    assert not any(
        request.parents and first in drafted
        for request, first in zip(requests, firsts, strict=True)
    ), "a tree cannot be verified by rejection"
    if not drafted:
        return {}
    is_accepted = torch.zeros(len(rows.raw), dtype=torch.bool, device=rows.raw.device)
    for group in _groups([draw for draws in drafted.values() for draw in draws], rows.raw):
        is_accepted[_index(group, rows.raw)] = _accept(rows, group)
    flags = is_accepted.tolist()
    return {
        first: _count_equal([True] * len(draws), flags[first : first + len(draws)])
        for first, draws in drafted.items()
    }


def _drafted(request: VerifyRequest, first: int) -> list[_Draw]:
    """One draw per draft."""
    probs = request.draft_probs
    return [
        _Draw(
            first + i,
            request.sampling,
            request.position + i,
            draft,
            None if probs is None else probs[i],
        )
        for i, draft in enumerate(request.drafts)
    ]


def _accept(rows: ShapedLogits, group: Sequence[_Draw]) -> torch.Tensor:
    """Whether each draft is accepted: u q(x) < p(x). A draft without draft_probs has q(x) = 1."""
    candidates = _candidates(rows, group)
    p = (candidates.probs() * (candidates.tokens == _drafts(group, rows.raw))).sum(-1)
    u = uniform_noise(_keys(group, Stream.ACCEPT, rows.raw))
    q = [draw.draft_probs[draw.draft] for draw in group if draw.draft_probs is not None]
    return (u * torch.stack(q) if q else u) < p


def _replace(rows: ShapedLogits, group: Sequence[_Draw]) -> torch.Tensor:
    """Tokens [n] for rejected drafts, from max(p - q, 0); from p if rounding makes this all 0."""
    candidates = _candidates(rows, group)
    p = candidates.probs()
    probs = [draw.draft_probs for draw in group if draw.draft_probs is not None]
    if probs:
        q = torch.stack(probs).gather(-1, candidates.tokens.expand_as(p))
    else:
        q = (candidates.tokens == _drafts(group, rows.raw)).to(p)
    excess = (p - q).clamp_(min=0.0)
    excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)
    left = Candidates(excess.double().log(), candidates.tokens)
    return left.draw(_keys(group, Stream.RESIDUAL, rows.raw))


def _plan_draws(
    requests: Sequence[VerifyRequest], firsts: Sequence[int], accepted: dict[int, int]
) -> tuple[list[_Draw], list[_Draw]]:
    """The draws from p, and the draws that replace a rejected draft. Greedy rows need neither."""
    draws, replacements = [], []
    for request, first in zip(requests, firsts, strict=True):
        sampling, num_drafts = request.sampling, len(request.drafts)
        if sampling.is_greedy:
            continue
        num_accepted = accepted.get(first)
        if num_accepted is not None and num_accepted < num_drafts:
            replacements.append(_drafted(request, first)[num_accepted])
            continue
        skipped = num_accepted or 0
        draws += [
            _Draw(first + skipped + i, sampling, request.position + depth)
            for i, depth in enumerate(request.depths[skipped:])
        ]
    return draws, replacements


def _groups(draws: Sequence[_Draw], logits: torch.Tensor) -> Iterator[list[_Draw]]:
    """Groups of draws that use the same operations, limited in size by memory."""
    groups: dict[object, list[_Draw]] = {}
    for draw in draws:
        kind = truncation_kind(draw.sampling)
        key = (kind, draw.sampling.verification, draw.draft_probs is None)
        groups.setdefault(key, []).append(draw)
    size = max(1, _MAX_SCORES // logits.shape[-1])
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _candidates(rows: ShapedLogits, group: Sequence[_Draw]) -> Candidates:
    return truncate(rows.take([draw.row for draw in group]), [draw.sampling for draw in group])


def _index(group: Sequence[_Draw], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor([draw.row for draw in group], device=logits.device)


def _drafts(group: Sequence[_Draw], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor([draw.draft for draw in group], device=logits.device)[:, None]


def _keys(group: Sequence[_Draw], stream: Stream, logits: torch.Tensor) -> torch.Tensor:
    keys = [noise_key(draw.sampling.seed, draw.position, stream) for draw in group]
    return torch.tensor(keys, device=logits.device)


def _count_equal(expected: Sequence[int], found: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    while count < min(len(expected), len(found)) and expected[count] == found[count]:
        count += 1
    return count


def _with_log_probs(
    results: list[VerifyResult],
    logits: torch.Tensor,
    requests: Sequence[VerifyRequest],
    firsts: Sequence[int],
) -> list[VerifyResult]:
    wanted = [i for i, one in enumerate(requests) if one.sampling.log_probs and results[i].tokens]
    if not wanted:
        return results
    rows = [firsts[i] + row for i in wanted for row in (0, *(d + 1 for d in results[i].path))]
    tokens = [token for i in wanted for token in results[i].tokens]
    num_top = [requests[i].sampling.num_top_log_probs for i in wanted for _ in results[i].tokens]
    index = torch.tensor(rows, device=logits.device)
    found = iter(token_log_probs(logits[index], tokens, num_top))
    for i in wanted:
        tokens_of = results[i].tokens
        log_probs = tuple(next(found) for _ in tokens_of)
        results[i] = VerifyResult(tokens_of, results[i].path, log_probs)
    return results


def token_log_probs(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogProb]:
    """The log-probability of each token in its row of logits [len(tokens), vocab], with the num_top
    most probable tokens of the row."""
    found = []
    size = max(1, _MAX_SCORES // logits.shape[-1])
    for first in range(0, len(tokens), size):
        part, counts = tokens[first : first + size], num_top[first : first + size]
        scores = logits[first : first + size].log_softmax(-1)
        chosen = torch.tensor(part, device=logits.device)[:, None]
        values = scores.gather(-1, chosen)[:, 0].tolist()
        best = scores.topk(min(max(counts), scores.shape[-1]))
        tops = zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
        found += [
            TokenLogProb(token, value, tuple(zip(ids[:num], probs[:num], strict=True)))
            for token, value, (ids, probs, num) in zip(part, values, tops, strict=True)
        ]
    return found
