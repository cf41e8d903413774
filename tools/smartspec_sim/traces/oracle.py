"""Oracle traces: how many drafts would be accepted, at every position and for every draft length.

Under coupled verification a finished text does not depend on what was drafted. So one look at it
tells, for each proposer and each number of tokens `pos` that were generated, how many drafts would
be right if it drafted as many as it may; a shorter draft begins with the same tokens. A simulation
that replays a trace has the acceptance of a real pair, and its best draft length in hindsight.

Positions: `pos` tokens were generated, and the token at index `pos` is drawn next. Position 0
follows the prompt: there the server of this project draws without drafts, so a walk begins at 1.
The last drawn token is the end token where the text ended by it; it is drawn, and may be drafted
and accepted, but is not generated. Nothing is accepted past what max_tokens leaves: the last token
always is the target's own.

Files are JSON lines, a header and one line a text; docs/reference/traces.md has the fields. Pure
but for the file: no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.step_trace import tupled
from smartspec_sim.goodput import survival
from smartspec_sim.traces.files import TraceError, naming, read_lines, write_lines

ORACLE_FORMAT = "smartspec oracle trace"
ORACLE_VERSION = 2
"""Raise it when the meaning of a stored number changes."""


@dataclass(frozen=True, slots=True)
class OracleHeader:
    """What the texts come from. model, draft: names. seed: keys prompts and sampling.

    date: ISO, as the caller has it. settings: whatever else the numbers depend on.
    """

    model: str
    draft: str
    dtype: str
    max_draft_len: int
    seed: int
    date: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProposerTrace:
    """Of one proposer and one text, an entry a position; bytes, as small arrays of counts.

    accepted: leading drafts that are right when it drafts as many as it may.
    available: drafts that it has there; None where it always has as many as it may.
    ranks: of heads, for each position and head the right guess, see `acceptance.GuessRanks`; then
        accepted is about the chain of best guesses. None for other proposers.
    """

    accepted: bytes
    available: bytes | None = None
    ranks: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class OracleSequence:
    """One finished text. proposers: by name, each of num_positions entries.

    num_generated: tokens of the text. finish: STOP is by its end token, else LENGTH.
    """

    workload: str
    num_prompt: int
    max_tokens: int
    num_generated: int
    finish: FinishReason
    sampling: SamplingParams
    proposers: Mapping[str, ProposerTrace]

    def __post_init__(self) -> None:
        """Raises TraceError where the arrays do not have an entry for each position."""
        for name, one in self.proposers.items():
            for counts in (one.accepted, one.available, one.ranks):
                if counts is not None and len(counts) != self.num_positions:
                    raise TraceError(f"{name}: {len(counts)} positions, not {self.num_positions}")

    @property
    def num_positions(self) -> int:
        """Draws of the target: the generated tokens, and the end token where it was drawn."""
        return self.num_generated + (self.finish is FinishReason.STOP)

    def accepted(self, proposer: str, pos: int, draft_len: int) -> int:
        """Drafts accepted by a step that asks for draft_len of them at this position."""
        return min(draft_len, self.proposers[proposer].accepted[pos])

    def drafted(self, proposer: str, pos: int, draft_len: int) -> int:
        """Drafts of such a step: what max_tokens and the proposer leave of draft_len, none of them
        behind the text's end token.

        A draft model also ends a draft where it draws the end token wrongly, which the trace does
        not know of. It was rejected there anyway, so what is accepted is never different.
        """
        trace = self.proposers[proposer]
        most = min(draft_len, self.max_tokens - pos - 1)
        if trace.available is not None:
            return max(0, min(most, trace.available[pos]))
        if self.finish is FinishReason.STOP and trace.accepted[pos] == self.num_positions - pos:
            most = min(most, trace.accepted[pos])
        return max(0, most)

    @classmethod
    def from_probabilities(
        cls,
        rng: np.random.Generator,
        accept_probs: Sequence[float],
        length: int,
        *,
        num_prompt: int = 1,
        proposer: str = DRAFT_MODEL,
        workload: str = "synthetic",
    ) -> Self:
        """A text of `length` tokens that nobody wrote.

        accept_probs: by position in a step, given that the drafts before were accepted. Each
        position is drawn by itself, so that every policy sees these probabilities exactly; runs of
        neighbouring positions do not hang together as those of a real text do.
        """
        survivals = survival(accept_probs)
        drawn = (rng.random(length)[:, None] < survivals).sum(axis=1)
        left = np.arange(length - 1, -1, -1)
        accepted = np.minimum(drawn, left).astype(np.uint8).tobytes()
        return cls(
            workload=workload,
            num_prompt=num_prompt,
            max_tokens=length,
            num_generated=length,
            finish=FinishReason.LENGTH,
            sampling=SamplingParams(),
            proposers={proposer: ProposerTrace(accepted)},
        )


def run_lengths(is_match: Sequence[bool], max_draft_len: int, max_tokens: int) -> bytes:
    """`ProposerTrace.accepted` of one that drafts a token at a time from the known text.

    is_match: whether what it drafts at each position, given the true text, is the true token. As
    long as its drafts are right they are the true text, so a run of matches is a run of drafts.
    """
    found = bytearray(len(is_match))
    run = 0
    for pos in reversed(range(len(is_match))):
        run = run + 1 if is_match[pos] else 0
        found[pos] = max(0, min(run, max_draft_len, max_tokens - pos - 1))
    return bytes(found)


def write_oracle(path: Path, header: OracleHeader, sequences: Iterable[OracleSequence]) -> None:
    """Written beside and then renamed, so that a reader never sees half a file."""
    write_lines(path, ORACLE_FORMAT, ORACLE_VERSION, asdict(header), map(_to_json, sequences))


def read_oracle(path: Path) -> tuple[OracleHeader, list[OracleSequence]]:
    """Raises TraceError, naming the line, for what is no trace of this version."""
    header, lines = read_lines(path, ORACLE_FORMAT, ORACLE_VERSION)
    with naming(f"{path.name}, line 1"):
        found = OracleHeader(**header)
    sequences = []
    for number, raw in lines:
        with naming(f"{path.name}, line {number}"):
            sequences.append(_from_json(raw))
    return found, sequences


def _to_json(sequence: OracleSequence) -> dict[str, Any]:
    proposers = {
        name: {"accepted": list(one.accepted)}
        | ({} if one.available is None else {"available": list(one.available)})
        | ({} if one.ranks is None else {"ranks": list(map(list, one.ranks))})
        for name, one in sequence.proposers.items()
    }
    return {
        "workload": sequence.workload,
        "num_prompt": sequence.num_prompt,
        "max_tokens": sequence.max_tokens,
        "num_generated": sequence.num_generated,
        "finish": sequence.finish,
        "sampling": _changed(sequence.sampling),
        "proposers": proposers,
    }


def _from_json(raw: dict[str, Any]) -> OracleSequence:
    proposers = {
        name: ProposerTrace(
            bytes(one["accepted"]),
            bytes(one["available"]) if "available" in one else None,
            tuple(map(bytes, one["ranks"])) if "ranks" in one else None,
        )
        for name, one in raw.pop("proposers").items()
    }
    sampling = SamplingParams(**{name: tupled(v) for name, v in raw.pop("sampling").items()})
    finish = FinishReason(raw.pop("finish"))
    return OracleSequence(finish=finish, sampling=sampling, proposers=proposers, **raw)


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    """What is not at its default."""
    default = SamplingParams()
    pairs = [(f.name, getattr(sampling, f.name)) for f in fields(sampling)]
    return {name: value for name, value in pairs if value != getattr(default, name)}
