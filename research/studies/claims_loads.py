"""The loads of the papers, as far as they are known, by name.

Lengths and acceptance are those reported for the data sets. A load is a function of one number (a
rate, an acceptance, a share), so that a case of the study can be sent to another process. What it
draws depends on that number and on the seed only, never on the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from smartspec_py.serving.config import PROMPT_LOOKUP
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    SimRequest,
    WorkloadSpec,
    draw,
    only,
)

SEED = 1
ACCEPT = 0.67
"""ShareGPT: the middle of 0.56 to 0.78."""

PHASE_S = 40.0
DYNAMIC_RATES = (1.0, 16.0, 48.0)
SHIFT_S = 40.0
CHANGING = (1.0, 12.0, 1.0, 12.0)
CHANGING_S = 20.0
SONNET = KindSpec(
    name="sonnet",
    prompt=LengthSpec(mean=517),
    output=LengthSpec(mean=140, sd=40),
    accept=0.85,
    accept_sd=0.05,
)
CNN = KindSpec(
    name="cnn",
    prompt=LengthSpec(mean=1067, sd=537, most=2048),
    output=LengthSpec(mean=95, sd=40),
    accept=0.57,
    accept_sd=0.05,
)
MATCH_LEN = 12.0
"""Mean tokens of a stretch in which prompt lookup finds a match."""
MATCH_ACCEPT = 0.75
"""Of a draft within such a stretch; outside there is none."""


def chat(rate: float) -> list[SimRequest]:
    """ShareGPT's lengths at a steady rate, requests/s."""
    return _poisson([(30.0, rate)], KindSpec(accept=ACCEPT))


def light_chat(rate: float) -> list[SimRequest]:
    """Longer, for rates at which 30 s have few requests."""
    return _poisson([(60.0, rate)], KindSpec(accept=ACCEPT))


def easy_chat(rate: float) -> list[SimRequest]:
    """Where nine of ten drafts are right."""
    return _poisson([(40.0, rate)], KindSpec(accept=0.9, accept_sd=0.03))


def dynamic(_: float) -> list[SimRequest]:
    return _poisson([(PHASE_S, rate) for rate in DYNAMIC_RATES], KindSpec(accept=ACCEPT))


def changing(_: float) -> list[SimRequest]:
    """Traffic that goes up and down."""
    return _poisson([(CHANGING_S, rate) for rate in CHANGING], KindSpec(accept=ACCEPT))


def shift(rate: float) -> list[SimRequest]:
    """Sonnet, then CNN/DailyMail; the server is not told."""
    phases = tuple(
        PhaseSpec(duration_s=SHIFT_S, rate=rate, mix={kind.name: 1.0}) for kind in (SONNET, CNN)
    )
    requests = draw(WorkloadSpec(kinds=(SONNET, CNN), phases=phases, seed=SEED))
    return [replace(request, cohort="") for request in requests]


def waiting(num_requests: int, accept_prob: float, accept_sd: float = 0.0) -> list[SimRequest]:
    """All requests are there from the start: an offline load. Every draft of every request is right
    with the same probability, so an adaptive policy cannot gain over the best fixed length."""
    kind = KindSpec(accept=accept_prob, accept_sd=accept_sd, persistence=0.0)
    return [
        kind.draw(number, 0.0, np.random.default_rng([SEED, number]))
        for number in range(1, num_requests + 1)
    ]


def few(accept_prob: float) -> list[SimRequest]:
    return waiting(320, accept_prob)


def many(accept_prob: float) -> list[SimRequest]:
    return waiting(640, accept_prob)


def lookup(match_share: float) -> list[SimRequest]:
    """Prompt lookup that finds a match at this share of positions."""
    found = []
    for request in waiting(320, 0.5):
        rng = np.random.default_rng([SEED, request.sequence, 2])
        text = matches(rng, request.output_len, match_share)
        found.append(replace(request, acceptances=only(PROMPT_LOOKUP, text)))
    return found


def matches(
    rng: np.random.Generator, num_positions: int, share: float, accept: float = MATCH_ACCEPT
) -> DraftRuns:
    """Stretches with and without matches, of random lengths; drafts are right only in a match. A
    match ends with probability 1 / MATCH_LEN per token, and begins with the probability that gives
    the share: begin / (begin + end) = share."""
    end = 1 / MATCH_LEN
    begin = end * share / (1 - share)
    uniform = rng.random((num_positions, 2))
    matched, is_right, available = bool(rng.random() < share), [], []
    for change, luck in uniform.tolist():
        available.append(1 << 8 if matched else 0)
        is_right.append(matched and luck < accept)
        if change < (end if matched else begin):
            matched = not matched
    runs = DraftRuns.of(is_right)
    return DraftRuns([runs.accepted(i, num_positions) for i in range(num_positions)], available)


def _poisson(phases: list[tuple[float, float]], kind: KindSpec) -> list[SimRequest]:
    specs = tuple(PhaseSpec(duration_s=seconds, rate=rate) for seconds, rate in phases)
    return draw(WorkloadSpec(kinds=(kind,), phases=specs, seed=SEED))


LOADS: Mapping[str, Callable[[float], list[SimRequest]]] = {
    "chat": chat,
    "light chat": light_chat,
    "easy chat": easy_chat,
    "dynamic": dynamic,
    "changing": changing,
    "shift": shift,
    "few": few,
    "many": many,
    "lookup": lookup,
}

PHASES: Mapping[str, tuple[float, ...]] = {
    "dynamic": (PHASE_S, 2 * PHASE_S),
    "shift": (SHIFT_S,),
}
"""Seconds at which a load's phases change."""
