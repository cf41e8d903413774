"""Makes oracle traces of finished texts: one pass of the draft model over each, and a look-up at
every position. What a trace says, and its file, is `traces`.

A draft model is asked for the token at each position given the *true* text before it. That is what
it drafts there in a step of any length, as long as the drafts before were right: its noise is a
function of seed and position, and its penalties count right drafts as the text that they are. So
its passes over the whole text can be packed, where drafting takes one for each token.

Exact as far as the text and the drafts are: in float32, and elsewhere up to near-ties. A text that
was verified by rejection depends on what was drafted, and cannot be traced. Limits that a server
sets while it runs, such as a full cache, shorten drafts and are not in a trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from smartspec_py.core.types import FinishReason, SamplingParams, Verification
from smartspec_py.engines.base import DraftTask, Proposer
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.runner import Runner
from smartspec_py.engines.torch.sampling import DraftRequest, draft_tokens, guess_tokens
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.proposers.draft_model import DraftModelProposer
from smartspec_py.proposers.heads import Heads, HeadsProposer
from smartspec_py.serving.config import DRAFT_MODEL, HEADS, PROMPT_LOOKUP
from smartspec_py.serving.request import GenerateParams, Request, RequestError
from smartspec_py.serving.server import Engine, Server
from smartspec_sim.acceptance import HEADS_WIDTH, NO_RANK, GuessRanks
from smartspec_sim.traces.files import TraceError
from smartspec_sim.traces.oracle import OracleSequence, ProposerTrace, run_lengths
from smartspec_testing.local import LocalSink

PROMPT_CHUNK = 512
"""Prompt tokens that are read in a pass."""

DRAW_CHUNK = 64
"""Positions that are drawn in a pass: bounds the logits that are held, [64, vocab]."""

WAIT_S = 3600.0
"""For one text, those before it in its batch included."""


@dataclass(frozen=True, slots=True)
class FinishedText:
    """drawn: the generated tokens, and the end token where it was drawn."""

    prompt: tuple[int, ...]
    drawn: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    finish: FinishReason


def finished_text(
    request: Request, drawn: Sequence[int], finish: FinishReason | None
) -> FinishedText:
    """The text that a server gave in answer to the request. drawn: with its end token, if any.

    Raises TraceError where it depends on what was drafted, or ends where the target did not.
    """
    if request.sampling.verification is not Verification.COUPLED:
        raise TraceError("verification: rejection: such a text depends on what was drafted")
    if finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise TraceError(f"the text was cut short: {finish}")
    prompt = tuple(request.tokens[: request.num_prompt])
    return FinishedText(prompt, tuple(drawn), request.max_tokens, request.sampling, finish)


def write_texts(
    server: Server, requests: Sequence[GenerateParams], num_at_once: int
) -> Iterator[FinishedText | RequestError]:
    """Serve the requests, so many together; for each its text, or why it was refused, in order.

    Raises TraceError where a request failed, or what it asked for cannot be traced.
    """
    for start in range(0, len(requests), num_at_once):
        batch = requests[start : start + num_at_once]
        sinks = [_submitted(server, params) for params in batch]
        for params, sink in zip(batch, sinks, strict=True):
            if isinstance(sink, RequestError):
                yield sink
                continue
            if params.stop_words:
                raise TraceError("stop_words: what the target draws behind them is not in the text")
            sink.wait(WAIT_S)
            if sink.error is not None:
                raise TraceError(f"a text could not be generated: {sink.error[1]}")
            seeded = replace(params, seed=sink.seed)
            request = server.intake.receive(seeded, sink).request
            yield finished_text(request, sink.drawn, sink.finish_reason)


def _submitted(server: Server, params: GenerateParams) -> LocalSink | RequestError:
    sink = LocalSink()
    try:
        server.submit(params, sink)
    except RequestError as error:
        return error
    return sink


def trace_text(
    engine: Engine, text: FinishedText, workload: str, max_draft_len: int
) -> OracleSequence:
    """The text with a trace of each proposer. The engine must serve nobody: it is overwritten."""
    draft = engine.proposers.get(DRAFT_MODEL)
    traces = {}
    if draft is not None:
        assert isinstance(draft, DraftModelProposer)
        traces[DRAFT_MODEL] = trace_draft_model(text, draft.runner, max_draft_len)
    lookup = engine.proposers[PROMPT_LOOKUP]
    traces[PROMPT_LOOKUP] = trace_lookup(text, lookup, max_draft_len)
    heads = engine.proposers.get(HEADS)
    if heads is not None:
        assert isinstance(heads, HeadsProposer)
        assert isinstance(engine.target, TorchTarget)
        traces[HEADS] = trace_heads(text, engine.target.runner, heads.heads, max_draft_len)
    return OracleSequence(
        workload=workload,
        num_prompt=len(text.prompt),
        max_tokens=text.max_tokens,
        num_generated=len(text.drawn) - (text.finish is FinishReason.STOP),
        finish=text.finish,
        sampling=text.sampling,
        proposers=traces,
    )


def trace_draft_model(text: FinishedText, runner: Runner, max_draft_len: int) -> ProposerTrace:
    """Acceptance of a draft model. Overwrites row 0 of its cache."""
    drafts = _drafts_given_text(text, runner)
    is_match = [draft == true for draft, true in zip(drafts, text.drawn, strict=True)]
    return ProposerTrace(run_lengths(is_match, max_draft_len, text.max_tokens))


def _drafts_given_text(text: FinishedText, runner: Runner) -> Iterator[int]:
    """What the draft model draws at each position of `drawn`."""
    known = [*text.prompt, *text.drawn]
    last_of_prompt, num_read = len(text.prompt) - 1, len(known) - 1
    _read(runner, known[:last_of_prompt])
    history = TokenHistory(len(text.prompt))
    history.extend(text.prompt)
    for start in range(last_of_prompt, num_read, DRAW_CHUNK):
        chunk = known[start : min(start + DRAW_CHUNK, num_read)]
        logits = runner.forward([RowInput(0, start, chunk, len(chunk))]).logits
        # To shape a row, what follows the history counts as drafts that were right so far.
        written = tuple(known[start + 1 : start + 1 + len(chunk)])
        requests = [
            DraftRequest(text.sampling, start + 1 + i, history, written[:i])
            for i in range(len(chunk))
        ]
        yield from draft_tokens(logits, requests)[0]
        history.extend(written)


def trace_heads(
    text: FinishedText, runner: Runner, heads: Heads, max_draft_len: int
) -> ProposerTrace:
    """Acceptance of heads on the target's last hidden state. runner: the target's; overwrites row 0
    of its cache. At position 0 there is no state yet, so no guess is right."""
    ranks = [bytes([NO_RANK] * heads.num_heads)]
    known, num_prompt = [*text.prompt, *text.drawn], len(text.prompt)
    _read(runner, known[: num_prompt - 1])
    history = TokenHistory(num_prompt)
    history.extend(text.prompt)
    for start in range(num_prompt - 1, len(known) - 2, DRAW_CHUNK):
        chunk = known[start : min(start + DRAW_CHUNK, len(known) - 2)]
        states = runner.forward([RowInput(0, start, chunk, len(chunk))]).hidden
        assert states is not None, "the target does not return hidden states"
        for logits in heads.logits(states.float()):
            history.extend(known[len(history) : len(history) + 1])
            ranks.append(_ranks(text, logits, history, known[len(history) :]))
    is_right = GuessRanks(np.array([list(one) for one in ranks], dtype=np.uint8))
    most = [min(max_draft_len, text.max_tokens - pos - 1) for pos in range(len(ranks))]
    accepted = [is_right.accepted(pos, max(0, num)) for pos, num in enumerate(most)]
    available = [min(max_draft_len, heads.num_heads)] * len(ranks)
    return ProposerTrace(bytes(accepted), bytes(available), tuple(ranks))


def _ranks(
    text: FinishedText, logits: torch.Tensor, history: TokenHistory, true: Sequence[int]
) -> bytes:
    """The right guess of each head, or NO_RANK. logits: [num_heads, vocab]. true: the tokens after
    the history."""
    best: tuple[int, ...] = ()
    found = bytearray()
    for depth in range(len(logits)):
        request = DraftRequest(text.sampling, len(history) + depth, history, best)
        (guesses,), _ = guess_tokens(logits[depth : depth + 1], [request], HEADS_WIDTH)
        is_there = depth < len(true) and true[depth] in guesses
        found.append(guesses.index(true[depth]) if is_there else NO_RANK)
        best = (*best, guesses[0])
    return bytes(found)


def _read(runner: Runner, tokens: Sequence[int]) -> None:
    """Let row 0 of the cache begin with these tokens."""
    for start in range(0, len(tokens), PROMPT_CHUNK):
        runner.forward([RowInput(0, start, tokens[start : start + PROMPT_CHUNK], 0)])


def trace_lookup(text: FinishedText, proposer: Proposer, max_draft_len: int) -> ProposerTrace:
    """Acceptance of a proposer that looks at the tokens alone and drafts all at once.

    A shorter draft must begin the longer one, and what it proposes may depend on nothing but the
    known tokens. The proposer must not serve anybody else.
    """
    known = list(text.prompt)
    accepted, available = bytearray(), bytearray()
    for pos, true in enumerate(text.drawn):
        drafts = _look_up(text, proposer, known, min(max_draft_len, text.max_tokens - pos - 1))
        available.append(len(drafts))
        accepted.append(_num_equal(drafts, text.drawn[pos:]))
        known.append(true)
    proposer.release(_SEQUENCE)
    return ProposerTrace(bytes(accepted), bytes(available))


_SEQUENCE = 0
"""Never the number of a request."""


def _look_up(
    text: FinishedText, proposer: Proposer, known: Sequence[int], draft_len: int
) -> tuple[int, ...]:
    if draft_len <= 0 or not proposer.num_available(_SEQUENCE, known):
        return ()
    task = DraftTask(_SEQUENCE, known, len(text.prompt), draft_len, text.sampling)
    return proposer.propose([task])[0].tokens


def _num_equal(drafts: Sequence[int], true: Sequence[int]) -> int:
    pairs = enumerate(zip(drafts, true, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(true)))
