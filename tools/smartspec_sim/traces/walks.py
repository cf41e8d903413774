"""What a fixed draft length would have made of traced texts: steps, and rates over them.

A walk visits the positions at which a server with that draft length would begin a step. Rates are
over those, so that they are what such a server counts; a step begins behind a token that a draft
got wrong more often than a position chosen at random does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smartspec_sim.goodput import accept_trials
from smartspec_sim.traces.oracle import OracleSequence


@dataclass(frozen=True, slots=True)
class WalkStep:
    """A step of one text that begins where `pos` tokens were generated."""

    pos: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one proposer on some texts. accept_probs: by position in a step of as many drafts as may
    be, given that the drafts before were accepted; None where none was tried.

    mean_acceptance_len: by draft length, tokens of a decoding step, its own included.
    """

    num_texts: int
    num_tokens: int
    accept_probs: tuple[float | None, ...]
    mean_acceptance_len: Mapping[int, float]


def walk(sequence: OracleSequence, proposer: str, draft_len: int) -> Iterator[WalkStep]:
    """The decoding steps of a server that always asks for draft_len drafts, 0 included."""
    pos = 1
    while pos < sequence.num_positions:
        num_drafted = sequence.drafted(proposer, pos, draft_len)
        num_accepted = sequence.accepted(proposer, pos, num_drafted)
        yield WalkStep(pos, num_drafted, num_accepted)
        pos += num_accepted + 1


def rates(
    sequences: Sequence[OracleSequence],
    proposer: str,
    max_draft_len: int,
    draft_lens: Sequence[int],
) -> Rates:
    """Acceptance by position at max_draft_len, and what each of draft_lens gains."""
    return Rates(
        num_texts=len(sequences),
        num_tokens=sum(sequence.num_generated for sequence in sequences),
        accept_probs=_accept_probs(_steps(sequences, proposer, max_draft_len), max_draft_len),
        mean_acceptance_len={k: _mean_len(_steps(sequences, proposer, k)) for k in draft_lens},
    )


def _steps(sequences: Sequence[OracleSequence], proposer: str, draft_len: int) -> list[WalkStep]:
    return [step for sequence in sequences for step in walk(sequence, proposer, draft_len)]


def _accept_probs(steps: Sequence[WalkStep], num_positions: int) -> tuple[float | None, ...]:
    """Drafts behind a rejected one were not tried."""
    trials, accepted = [0] * num_positions, [0] * num_positions
    for step in steps:
        for i in range(accept_trials(step.num_drafted, step.num_accepted)):
            trials[i] += 1
            accepted[i] += i < step.num_accepted
    return tuple(a / t if t else None for a, t in zip(accepted, trials, strict=True))


def _mean_len(steps: Sequence[WalkStep]) -> float:
    """1.0 where there is no step."""
    return 1.0 + sum(step.num_accepted for step in steps) / max(1, len(steps))
