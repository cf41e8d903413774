"""Requests of a simulation: arrival times, lengths and acceptance.

They are drawn from a spec, which has kinds of requests and phases with a rate and a mixture of
kinds, or read from a record (`record.py`). Request i of a seed is the same for every rate and
policy, so that comparisons are paired.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.types import SequenceId
from smartspec_sim.acceptance import Runs, draw_runs, with_pauses
from smartspec_sim.arrivals import RatePhase, arrival_times, constant_gaps, gamma_gaps

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Rate = Annotated[float, Field(ge=0, le=1e5)]
Share = Annotated[float, Field(ge=0, le=1)]

ARRIVAL_STREAM = 1
REQUEST_STREAM = 2
"""Keys that keep the random numbers of arrivals and requests apart."""


MOST_REQUESTS = 100_000
"""Of a drawn load. A run of so many takes about an hour."""


class WorkloadError(ValueError):
    """A spec or a record cannot be used. The message names the file, the place and the reason."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. Times are seconds from the start; deadline_s counts from arrival. tpot_slo_ms:
    the planner's target for the time per output token. max_tokens: most that its client allows; 0
    is output_len.

    runs: by proposer, see `acceptance.py`; a missing proposer does not draft for this request.
    """

    sequence: SequenceId
    arrival_s: float
    prompt_len: int
    output_len: int
    runs: Mapping[str, Runs]
    acceptance_group: str = ""
    priority: int = 0
    deadline_s: float | None = None
    tpot_slo_ms: float | None = None
    max_tokens: int = 0

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

    accept: probability that a draft is right if all drafts before it were. accept_sd: its standard
    deviation over requests (a beta distribution). persistence: see `acceptance.draw_runs`.
    pause_len: mean tokens without a match of prompt lookup, after each match_len tokens with one;
    0 is no pause.
    has_limit: whether clients name the length of the output as its limit; else that is output.most.
    deadline_s, tpot_slo_ms: see `SimRequest`.
    """

    name: str = "chat"
    prompt: LengthSpec = LengthSpec(mean=227, sd=264, most=2048)
    output: LengthSpec = LengthSpec(mean=250, sd=200, most=1024)
    accept: Share = 0.7
    accept_sd: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    persistence: Annotated[float, Field(ge=0, lt=1)] = 0.2
    proposer: Literal["draft_model", "prompt_lookup"] = DRAFT_MODEL  # type: ignore[assignment]
    match_len: Annotated[float, Field(ge=1, le=1e6)] = 60.0
    has_limit: bool = True
    pause_len: Literal[0] | Annotated[float, Field(ge=1, le=1e6)] = 0
    priority: int = 0
    deadline_s: Seconds | None = None
    tpot_slo_ms: Seconds | None = None

    @model_validator(mode="after")
    def _spread_fits(self) -> Self:
        most = math.sqrt(self.accept * (1 - self.accept))
        if self.accept_sd and not self.accept_sd < most:
            raise ValueError(f"accept_sd must be below {most:.3f} where accept is {self.accept}")
        if self.pause_len and self.proposer != PROMPT_LOOKUP:
            raise ValueError(f"pause_len is for {PROMPT_LOOKUP}, got the proposer {self.proposer}")
        return self

    def draw(self, sequence: SequenceId, arrival_s: float, rng: np.random.Generator) -> SimRequest:
        prompt_len, output_len = self.prompt.draw(rng), self.output.draw(rng)
        runs = draw_runs(rng, output_len, self._accept_prob(rng), self.persistence)
        if self.pause_len:
            runs = with_pauses(runs, rng, self.match_len, self.pause_len)
        return SimRequest(
            sequence=sequence,
            arrival_s=arrival_s,
            prompt_len=prompt_len,
            output_len=output_len,
            runs={self.proposer: runs},
            acceptance_group=self.name,
            priority=self.priority,
            deadline_s=self.deadline_s,
            tpot_slo_ms=self.tpot_slo_ms,
            max_tokens=0 if self.has_limit else self.output.most,
        )

    def _accept_prob(self, rng: np.random.Generator) -> float:
        if not self.accept_sd:
            return self.accept
        total = self.accept * (1 - self.accept) / self.accept_sd**2 - 1
        return float(rng.beta(self.accept * total, (1 - self.accept) * total))


class PhaseSpec(_Layer):
    """A phase of the load. end_rate: rate at the end of a ramp; None means a constant rate. mix:
    weights by kind; empty means equal shares."""

    duration_s: Seconds
    rate: Rate
    end_rate: Rate | None = None
    mix: dict[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def rates(self) -> RatePhase:
        return RatePhase(self.duration_s, self.rate, self.end_rate)


class WorkloadSpec(_Layer):
    """burstiness: of gamma arrivals; see `arrivals.gamma_gaps`."""

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
            if unknown := phase.mix.keys() - set(names):
                raise ValueError(f"mix: {sorted(unknown)[0]!r} must be one of {', '.join(names)}")
            if phase.mix and not sum(phase.mix.values()):
                raise ValueError("mix: all weights are 0")
        return self


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
    """All requests of the spec, in order of arrival. Raises WorkloadError for too many."""
    key = spec.seed * 16 + ARRIVAL_STREAM
    burstiness = spec.burstiness if spec.arrivals == "gamma" else 1.0
    gaps = constant_gaps() if spec.arrivals == "constant" else gamma_gaps(burstiness, key)
    phases = [phase.rates for phase in spec.phases]
    if (expected := sum(phase.num_expected for phase in phases)) > MOST_REQUESTS:
        raise WorkloadError(
            f"about {expected:,.0f} requests are due, must be at most {MOST_REQUESTS:,}: lower the "
            "rate or shorten the load"
        )
    ends = np.cumsum([phase.duration_s for phase in spec.phases])
    requests = []
    for sequence, arrival_s in enumerate(arrival_times(gaps, phases), start=1):
        phase = spec.phases[min(int(np.searchsorted(ends, arrival_s)), len(ends) - 1)]
        rng = np.random.default_rng([spec.seed, REQUEST_STREAM, sequence])
        kind = _choose(spec.kinds, phase.mix, float(rng.random()))
        requests.append(kind.draw(sequence, arrival_s, rng))
    return requests


def _choose(kinds: Sequence[KindSpec], mix: Mapping[str, float], uniform: float) -> KindSpec:
    """The kind whose share of 0..1 contains the number."""
    ends = np.cumsum([mix.get(kind.name, 0.0) if mix else 1.0 for kind in kinds])
    index = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
    return kinds[min(index, len(kinds) - 1)]


def offered_rate(requests: Sequence[SimRequest]) -> float:
    """Requests per second from the first arrival to the last; 0.0 for fewer than two."""
    if len(requests) < 2:
        return 0.0
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else 0.0
