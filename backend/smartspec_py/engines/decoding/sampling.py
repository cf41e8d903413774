"""Draws tokens and verifies drafts. Both ways to verify keep the target's distribution exactly.

`shaping` and `truncation` first process a row of logits: shaping, temperature, truncation.
Greedy rows (temperature 0 or top_k 1) take the best token of the shaped row.

*Coupled* verification (the default): the same seed gives the same text. The token at absolute
position t is the argmax of

    log p(token) + gumbel(seed, t, token)

over the tokens that truncation keeps. By the Gumbel-max rule, this is an exact draw from p. The
draft model draws with the same noise, and a draft is accepted if it equals the target's own draw.
So the text depends neither on the draft model nor on the draft lengths (Daliri et al., "Coupling
without communication and drafter-invariant speculative decoding", 2024). Drafts can be a tree: the
noise depends on the position, not on the path, so the token drawn after a draft is the same as in
a chain. If a child of the draft is that token, it is accepted.

*Rejection* verification: a draft x that was drawn from q is accepted with probability
min(1, p(x) / q(x)). A rejected draft is replaced by a draw from max(p - q, 0), normalised
(Leviathan et al., "Fast inference from transformers via speculative decoding", 2023). This accepts
1 - TV(p, q) of the drafts, the maximum for any rule, but the text depends on the drafts. Greedy
rows are verified as in coupled verification.

Noise is computed only for the tokens that truncation keeps. Its integer hashing gives the same
result on every device. If logits differ slightly, near-ties of the scores can still give another
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch

from smartspec_py.core.types import NO_TOKEN, SamplingParams, TokenLogProb, Verification
from smartspec_py.engines.base import Failure
from smartspec_py.engines.decoding.noise import Stream, noise_key, uniform_noise
from smartspec_py.engines.decoding.shaping import Shaping, TokenHistory, shape_logits
from smartspec_py.engines.decoding.truncation import (
    Candidates,
    best_tokens,
    truncate,
    truncation_kind,
)
from smartspec_py.engines.device import on_device
from smartspec_py.engines.draft import NO_DRAFT, Draft

NOT_FINITE = Failure(
    "the model's logits are not finite: its numbers overflow in this precision; use a wider dtype "
    "or another checkpoint"
)

_MAX_SCORES = 1 << 24
"""Scores held at once: 128 MiB of float64. Intermediate results take a few times as much."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One sequence of a target's pass. It has a row of logits after each node of its draft.

    position: absolute position of the first token to draw.
    history: the tokens before it; required if sampling.shapes_logits.
    """

    sampling: SamplingParams
    position: int
    history: TokenHistory | None = None
    draft: Draft = NO_DRAFT

    @property
    def num_rows(self) -> int:
        return len(self.draft.tokens) + 1


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """tokens: the accepted drafts and one more token; empty if that could not be drawn, and then
    `failure` says why. log_probs: of each token; empty unless requested. nodes: of the draft, after
    which each token was drawn."""

    tokens: tuple[int, ...]
    log_probs: tuple[TokenLogProb, ...] = ()
    failure: Failure | None = None
    nodes: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.tokens) - 1)


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
    """One token to draw from a row of logits, at an absolute position. draft: the draft at this
    position, [], if rejection decides on it; draft_probs: its distribution, [vocab]."""

    row: int
    sampling: SamplingParams
    position: int
    draft: torch.Tensor | None = None
    draft_probs: torch.Tensor | None = None


def verify(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    """Verify the requests with their rows of logits [sum of num_rows, vocab], float32.

    A token is drawn from each row, and drafts that equal the drawn tokens are accepted. A row with
    NaN, or whose maximum is infinite, or whose grammar has failed, draws NO_TOKEN, which equals no
    draft.
    """
    firsts = list(accumulate((request.num_rows for request in requests), initial=0))[:-1]
    pairs = list(zip(requests, firsts, strict=True))
    shaped, failures = shape_logits(logits, [row for pair in pairs for row in _shapings(*pair)])
    tokens = best_tokens(shaped, 1)[:, 0]
    draws = [draw for pair in pairs for draw in _draws(*pair, device=logits.device)]
    for group in _groups(draws, logits):
        tokens[_index(group, logits)] = _drawn(shaped, group)
    is_finite = logits.amax(-1).isfinite()
    on_devices = [request.draft.on_device for request in requests]
    unknown = [drafts for drafts in on_devices if drafts is not None]
    # One copy to the host: it waits for the device.
    copied = torch.cat([torch.where(is_finite, tokens, NO_TOKEN), *unknown]).tolist()
    drawn_tokens, drafts = copied[: len(logits)], iter(copied[len(logits) :])
    requests = [_known(request, drafts) for request in requests]
    failures |= {row: NOT_FINITE for row, token in enumerate(drawn_tokens) if token == NO_TOKEN}
    for row in failures:
        drawn_tokens[row] = NO_TOKEN
    results = []
    for request, first in zip(requests, firsts, strict=True):
        drawn = drawn_tokens[first : first + request.num_rows]
        nodes = (0, *request.draft.accepted(drawn))
        if failure := failures.get(first + nodes[-1]):
            results.append(VerifyResult((), failure=failure))
        else:
            results.append(VerifyResult(tuple([drawn[node] for node in nodes]), nodes=nodes))
    return _with_log_probs(results, logits, requests, firsts)


def _known(request: VerifyRequest, drafts: Iterator[int]) -> VerifyRequest:
    """The request with its draft, whose tokens are the next ones if only the device knew them."""
    draft = request.draft
    if draft.on_device is None:
        return request
    return replace(request, draft=draft._replace(tokens=tuple(islice(drafts, len(draft.tokens)))))


def draft_tokens(
    logits: torch.Tensor, requests: Sequence[DraftRequest]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """One token from each row of logits [len(requests), vocab], float32, on their device.

    Also the distribution that it was drawn from, [vocab] float32. It is None for greedy tokens and
    for draws with the target's noise.
    """
    shaped, draws = _prepared(logits, requests)
    tokens = best_tokens(shaped, 1)[:, 0]
    probs: list[torch.Tensor | None] = [None] * len(requests)
    for group in _groups(draws, logits):
        candidates = _candidates(shaped, group)
        if group[0].sampling.verification is Verification.COUPLED:
            stream = Stream.TARGET
        else:
            stream = Stream.DRAFT
            for draw, drawn_from in zip(group, candidates.spread(logits.shape[-1]), strict=True):
                probs[draw.row] = drawn_from
        tokens[_index(group, logits)] = candidates.draw(_keys(group, stream, logits))
    return tokens, probs


def best_guesses(
    logits: torch.Tensor, requests: Sequence[DraftRequest], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best guesses after each row of logits [n, vocab], float32, for trees: tokens, and their
    log-probabilities; both [n, width], best first, and -inf where there are fewer.

    They are ranked by what coupled verification draws from, the noise included. So the first is
    that of `draft_tokens`, and the probabilities are those after the noise is known.
    """
    shaped, draws = _prepared(logits, requests)
    width = min(width, logits.shape[-1])
    log_probs, tokens = shaped.log_softmax(-1).topk(width)
    for group in _groups(draws, logits):
        index, candidates = _index(group, logits), _candidates(shaped, group)
        found = candidates.best(_keys(group, Stream.TARGET, logits), width)
        num = found.tokens.shape[-1]
        log_probs[index] = -torch.inf
        tokens[index, :num], log_probs[index, :num] = found.tokens, found.scores.float()
    return tokens, log_probs


def _prepared(
    logits: torch.Tensor, requests: Sequence[DraftRequest]
) -> tuple[torch.Tensor, list[_Draw]]:
    """The shaped logits, and a draw for each row that is not greedy."""
    shapings = [
        Shaping(row, request.sampling, _history(request), request.provisional)
        for row, request in enumerate(requests)
        if request.sampling.shapes_logits
    ]
    draws = [
        _Draw(row, request.sampling, request.position)
        for row, request in enumerate(requests)
        if not request.sampling.is_greedy
    ]
    return shape_logits(logits, shapings)[0], draws


def _shapings(request: VerifyRequest, first: int) -> list[Shaping]:
    """For each row of a request, if its logits are shaped. The drafts before a row are known."""
    if not request.sampling.shapes_logits:
        return []
    history = _history(request)
    return [
        Shaping(first + row, request.sampling, history, path)
        for row, path in enumerate(request.draft.paths)
    ]


def _history(request: VerifyRequest | DraftRequest) -> TokenHistory:
    assert request.history is not None, "shaping logits needs the history"
    return request.history


def _draws(request: VerifyRequest, first: int, device: torch.device) -> list[_Draw]:
    """One draw for each row. Greedy text needs none."""
    sampling, judged = request.sampling, request.draft.on_device
    if sampling.is_greedy:
        return []
    if sampling.verification is not Verification.REJECTION:
        judged = None
    elif judged is None:
        assert request.draft.tree is None, "a tree cannot be verified by rejection"
        judged = on_device(request.draft.tokens, device)
    draws = []
    for row, path in enumerate(request.draft.paths):
        draft, probs = None, None
        if judged is not None and row < len(judged):
            draft = judged[row]
            probs = None if request.draft.probs is None else request.draft.probs[row]
        position = request.position + len(path)
        draws.append(_Draw(first + row, sampling, position, draft, draft_probs=probs))
    return draws


def _drawn(shaped: torch.Tensor, group: Sequence[_Draw]) -> torch.Tensor:
    """The target's tokens [n] for these draws. If rejection decides on drafts, a token is the draft
    if u q(x) < p(x), and otherwise from max(p - q, 0); from p if rounding makes this all 0."""
    candidates = _candidates(shaped, group)
    judged = [draw.draft for draw in group if draw.draft is not None]
    if not judged:
        return candidates.draw(_keys(group, Stream.TARGET, shaped))
    p = candidates.probs()
    drafts = torch.stack(judged)
    is_draft = candidates.tokens == drafts[:, None]
    given = [draw.draft_probs for draw in group if draw.draft_probs is not None]
    if given:
        whole = torch.stack(given)
        q, q_of_draft = (
            whole.gather(-1, candidates.tokens.expand_as(p)),
            whole.gather(-1, drafts[:, None])[:, 0],
        )
    else:
        q, q_of_draft = is_draft.to(p), torch.ones_like(p[:, 0])
    u = uniform_noise(_keys(group, Stream.ACCEPT, shaped))
    is_accepted = u * q_of_draft < (p * is_draft).sum(-1)
    excess = (p - q).clamp_(min=0.0)
    excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)
    left = Candidates(excess.double().log(), candidates.tokens)
    return torch.where(is_accepted, drafts, left.draw(_keys(group, Stream.RESIDUAL, shaped)))


def _groups(draws: Sequence[_Draw], logits: torch.Tensor) -> Iterator[list[_Draw]]:
    """Groups of draws that use the same operations, limited in size by memory."""
    groups: dict[object, list[_Draw]] = {}
    for draw in draws:
        is_judged, has_probs = draw.draft is not None, draw.draft_probs is not None
        key = truncation_kind(draw.sampling), draw.sampling.verification, is_judged, has_probs
        groups.setdefault(key, []).append(draw)
    size = max(1, _MAX_SCORES // logits.shape[-1])
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _candidates(shaped: torch.Tensor, group: Sequence[_Draw]) -> Candidates:
    return truncate(shaped[_index(group, shaped)], [draw.sampling for draw in group])


def _index(group: Sequence[_Draw], logits: torch.Tensor) -> torch.Tensor:
    return on_device([draw.row for draw in group], logits.device)


def _keys(group: Sequence[_Draw], stream: Stream, logits: torch.Tensor) -> torch.Tensor:
    keys = [noise_key(draw.sampling.seed, draw.position, stream) for draw in group]
    return on_device(keys, logits.device)


def _with_log_probs(
    results: list[VerifyResult],
    logits: torch.Tensor,
    requests: Sequence[VerifyRequest],
    firsts: Sequence[int],
) -> list[VerifyResult]:
    wanted = [
        i for i, request in enumerate(requests) if request.sampling.log_probs and results[i].tokens
    ]
    if not wanted:
        return results
    rows = [firsts[i] + row for i in wanted for row in results[i].nodes]
    tokens = [token for i in wanted for token in results[i].tokens]
    num_top = [requests[i].sampling.num_top_log_probs for i in wanted for _ in results[i].tokens]
    index = torch.tensor(rows, device=logits.device)
    scored = iter(token_log_probs(logits[index], tokens, num_top))
    for i in wanted:
        log_probs = tuple(next(scored) for _ in results[i].tokens)
        results[i] = replace(results[i], log_probs=log_probs)
    return results


def token_log_probs(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogProb]:
    """The log-probability of each token in its row of logits [len(tokens), vocab], with the num_top
    most probable tokens of the row."""
    log_probs = []
    size = max(1, _MAX_SCORES // logits.shape[-1])
    for first in range(0, len(tokens), size):
        part, counts = tokens[first : first + size], num_top[first : first + size]
        scores = logits[first : first + size].log_softmax(-1)
        chosen = torch.tensor(part, device=logits.device)[:, None]
        values = scores.gather(-1, chosen)[:, 0].tolist()
        best = scores.topk(min(max(counts), scores.shape[-1]))
        tops = zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
        log_probs += [
            TokenLogProb(token, value, tuple(zip(ids[:num], probs[:num], strict=True)))
            for token, value, (ids, probs, num) in zip(part, values, tops, strict=True)
        ]
    return log_probs
