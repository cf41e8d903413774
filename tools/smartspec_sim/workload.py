"""Which requests come when, how long they are, and how well they draft.

Either drawn from a spec (kinds of requests, and phases of time with a rate and a mixture of kinds)
or read from a record. Request i of a seed is the same whatever the rate, the policy and the other
requests are, so that comparisons are of pairs.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from smartspec_py.core.types import SequenceId
from smartspec_py.serving.config import DRAFT_MODEL, HEADS
from smartspec_sim.acceptance import Acceptance, DraftRuns, GuessRanks, draw_ranks, draw_runs
from smartspec_sim.arrivals import RatePhase, arrival_times, pattern_gaps
from smartspec_sim.engine import PROPOSERS
from smartspec_sim.traces.oracle import OracleSequence, ProposerTrace

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Rate = Annotated[float, Field(ge=0, le=1e5)]
Share = Annotated[float, Field(ge=0, le=1)]

ARRIVAL_STREAM = 1
REQUEST_STREAM = 2
TEXT_STREAM = 3
"""Keys that keep the random numbers of arrivals, requests and texts apart."""


class WorkloadError(ValueError):
    """A spec or a record cannot be used; the message names the file, the place and the reason."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. Times are seconds from the start; deadline_s counts from arrival. tpot_slo_ms:
    target for a generated token, which the planner minds; None is none.

    acceptances: of the first of `engine.PROPOSERS`; None for one that does not draft for it.
    prefix: name of the shared prefix that the prompt begins with, of prefix_len tokens; None is
    none.
    """

    sequence: SequenceId
    arrival_s: float
    prompt_len: int
    output_len: int
    acceptances: tuple[Acceptance | None, ...]
    cohort: str = ""
    policy: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    tpot_slo_ms: float | None = None
    prefix: str | None = None
    prefix_len: int = 0

    @property
    def proposers(self) -> tuple[str, ...]:
        """Those that draft for it."""
        pairs = zip(PROPOSERS, self.acceptances, strict=False)
        return tuple(name for name, acceptance in pairs if acceptance is not None)

    @property
    def context_len(self) -> int:
        return self.prompt_len + self.output_len


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LengthSpec(_Layer):
    """A number of tokens, log-normal with this mean and standard deviation, in 1..most."""

    mean: Annotated[float, Field(ge=1, le=1e6)]
    sd: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    most: Annotated[int, Field(ge=1, le=1_000_000)] = 8192

    def draw(self, rng: np.random.Generator) -> int:
        """With variance v of the logarithm: v = ln(1 + (sd / mean)^2), and mean e^(m + v/2)."""
        normal = float(rng.standard_normal())  # always drawn: what follows must not shift
        variance = math.log1p((self.sd / self.mean) ** 2)
        value = self.mean * math.exp(math.sqrt(variance) * normal - variance / 2)
        return max(1, min(self.most, round(value)))


class KindSpec(_Layer):
    """A kind of request. Defaults are ShareGPT's lengths and acceptance as SmartSpec reports them.

    accept: probability that a draft is right, given that those before it were; accept_sd: spread of
    it over requests (a beta distribution). persistence: see `sim.acceptance.draw_runs`. With heads,
    accept is that of the first head, and there is no persistence.
    policy: None is the simulated one. deadline_s: from arrival. tpot_slo_ms: see `SimRequest`.
    prefix_len: tokens of a shared prefix, such as a system prompt, in front of `prompt`; 0 is none.
    num_prefixes: different ones; each request has one of them, with equal probability.
    """

    name: str = "chat"
    prompt: LengthSpec = LengthSpec(mean=227, sd=264, most=2048)
    output: LengthSpec = LengthSpec(mean=250, sd=200, most=1024)
    accept: Share = 0.7
    accept_sd: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    persistence: Annotated[float, Field(ge=0, lt=1)] = 0.2
    proposer: Literal["draft_model", "prompt_lookup", "heads"] = DRAFT_MODEL  # type: ignore[assignment]
    policy: str | None = None
    priority: int = 0
    deadline_s: Seconds | None = None
    tpot_slo_ms: Seconds | None = None
    prefix_len: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    num_prefixes: Annotated[int, Field(ge=1, le=1_000_000)] = 1

    @model_validator(mode="after")
    def _spread_fits(self) -> Self:
        most = math.sqrt(self.accept * (1 - self.accept))
        if self.accept_sd and not self.accept_sd < most:
            raise ValueError(f"accept_sd must be below {most:.3f} where accept is {self.accept}")
        return self

    def draw(self, sequence: SequenceId, arrival_s: float, rng: np.random.Generator) -> SimRequest:
        prompt_len, output_len = self.prompt.draw(rng), self.output.draw(rng)
        prob = self._accept_prob(rng)
        acceptance: Acceptance
        if self.proposer == HEADS:
            acceptance = draw_ranks(rng, output_len, prob)
        else:
            acceptance = draw_runs(rng, output_len, prob, self.persistence)
        prefix = f"{self.name}/{rng.integers(self.num_prefixes)}" if self.prefix_len else None
        return SimRequest(
            sequence=sequence,
            arrival_s=arrival_s,
            prompt_len=self.prefix_len + prompt_len,
            output_len=output_len,
            acceptances=only(self.proposer, acceptance),
            cohort=self.name,
            policy=self.policy,
            priority=self.priority,
            deadline_s=self.deadline_s,
            tpot_slo_ms=self.tpot_slo_ms,
            prefix=prefix,
            prefix_len=self.prefix_len,
        )

    def _accept_prob(self, rng: np.random.Generator) -> float:
        if not self.accept_sd:
            return self.accept
        total = self.accept * (1 - self.accept) / self.accept_sd**2 - 1
        return float(rng.beta(self.accept * total, (1 - self.accept) * total))


class PhaseSpec(_Layer):
    """A stretch of time. end_rate: None is a constant rate. mix: weights by kind; empty is equal
    shares of all."""

    duration_s: Seconds
    rate: Rate
    end_rate: Rate | None = None
    mix: dict[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def rates(self) -> RatePhase:
        return RatePhase(self.duration_s, self.rate, self.end_rate)


class WorkloadSpec(_Layer):
    """kinds and phases as above. burstiness: of gamma arrivals; see `sim.arrivals`."""

    kinds: Annotated[tuple[KindSpec, ...], Field(min_length=1)] = (KindSpec(),)
    phases: Annotated[tuple[PhaseSpec, ...], Field(min_length=1)]
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    burstiness: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1

    @model_validator(mode="after")
    def _kinds_are_known(self) -> Self:
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            raise ValueError(f"kinds: two have the same name, of {', '.join(names)}")
        for phase in self.phases:
            if strangers := phase.mix.keys() - set(names):
                raise ValueError(f"mix: {sorted(strangers)[0]!r} must be one of {', '.join(names)}")
            if phase.mix and not sum(phase.mix.values()):
                raise ValueError("mix: all weights are 0")
        return self

    def scaled(self, factor: float) -> WorkloadSpec:
        """With all rates times factor."""
        phases = tuple(
            phase.model_copy(
                update={
                    "rate": phase.rate * factor,
                    "end_rate": None if phase.end_rate is None else phase.end_rate * factor,
                }
            )
            for phase in self.phases
        )
        return self.model_copy(update={"phases": phases})


def read_spec(path: Path) -> WorkloadSpec:
    """A spec in TOML or JSON, by the file's ending. Raises WorkloadError."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        return WorkloadSpec.model_validate(raw)
    except ValidationError as error:
        clauses = [
            f"{'.'.join(map(str, item['loc'])) or 'document'}: {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise WorkloadError(f"{path.name}: {'; '.join(clauses)}") from error
    except (ValueError, OSError) as error:
        raise WorkloadError(f"{path.name}: {error}") from error


def draw(spec: WorkloadSpec) -> list[SimRequest]:
    """All requests of the spec, in order of arrival."""
    gaps = pattern_gaps(spec.arrivals, spec.burstiness, _key(spec.seed, ARRIVAL_STREAM))
    phases = [phase.rates for phase in spec.phases]
    ends = np.cumsum([phase.duration_s for phase in spec.phases])
    requests = []
    for sequence, arrival_s in enumerate(arrival_times(gaps, phases), start=1):
        phase = spec.phases[min(int(np.searchsorted(ends, arrival_s)), len(ends) - 1)]
        rng = np.random.default_rng([spec.seed, REQUEST_STREAM, sequence])
        kind = _choose(spec.kinds, phase.mix, float(rng.random()))
        requests.append(kind.draw(sequence, arrival_s, rng))
    return requests


def with_texts(
    requests: Sequence[SimRequest], texts: Sequence[OracleSequence], seed: int
) -> list[SimRequest]:
    """The requests, each with the lengths and the acceptances of a text of an oracle trace.

    Which text it is depends on seed and number only. Texts without a token are left out.
    """
    usable = [t for t in texts if t.num_generated and t.proposers.keys() & set(PROPOSERS)]
    if not usable:
        raise WorkloadError(f"the oracle trace has no text with one of {', '.join(PROPOSERS)}")
    found = []
    for request in requests:
        rng = np.random.default_rng([seed, TEXT_STREAM, request.sequence])
        text = usable[int(rng.integers(len(usable)))]
        changed = replace(
            request,
            prompt_len=text.num_prompt,
            output_len=text.num_generated,
            acceptances=_of_text(text),
            cohort=text.workload,
            prefix=None,
        )
        found.append(changed)
    return found


def _of_text(text: OracleSequence) -> tuple[Acceptance | None, ...]:
    found = [text.proposers.get(name) for name in PROPOSERS]
    return tuple(None if trace is None else _acceptance(trace) for trace in found)


def _acceptance(trace: ProposerTrace) -> Acceptance:
    if trace.ranks is None:
        return DraftRuns(trace.accepted, trace.available)
    return GuessRanks(np.array([list(one) for one in trace.ranks], dtype=np.uint8))


def only(proposer: str, acceptance: Acceptance) -> tuple[Acceptance | None, ...]:
    """Acceptances where this proposer is the only one."""
    return tuple(acceptance if name == proposer else None for name in PROPOSERS)


def _key(seed: int, stream: int) -> int:
    return seed * 16 + stream


def _choose(kinds: Sequence[KindSpec], mix: Mapping[str, float], uniform: float) -> KindSpec:
    """The kind in whose share of 0..1 the number falls."""
    shares = [(kind, mix.get(kind.name, 0.0) if mix else 1.0) for kind in kinds]
    shares = [(kind, weight) for kind, weight in shares if weight]
    left = uniform * sum(weight for _, weight in shares)
    for kind, weight in shares:
        left -= weight
        if left < 0:
            return kind
    return shares[-1][0]


def longest_context(requests: Sequence[SimRequest]) -> int:
    return max((request.context_len for request in requests), default=0)


def offered_rate(requests: Sequence[SimRequest]) -> float:
    """Requests a second from the first arrival to the last; 0.0 for fewer than two."""
    if len(requests) < 2:
        return 0.0
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else 0.0
