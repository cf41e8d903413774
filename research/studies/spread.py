"""What does a draft length for each request gain over one for all, if requests differ more?

Compares `goodput` with `goodput_global` on the same texts in the server's own loop. Also measures a
planner that knows each request's acceptance, which is the most that better estimates could gain.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from smartspec_bench.progress import tracked
from smartspec_py.core.plan import search
from studies.closed_loop import (
    CPU_88M,
    FITTED,
    MAX_DRAFT_LEN,
    ClosedLoop,
    Ratio,
    StudiedController,
    Text,
    Times,
    Traffic,
    fixed_times,
    hardware_of,
    ratio,
    throughput,
)
from studies.document import publish, table

CONTEXT_LEN = 512
NUM_TOKENS = {8: 24000, 32: 56000, 64: 80000}
WARM_UP_ROW_TOKENS = 250
BAR = 0.98


@dataclass(frozen=True)
class Mix:
    """How requests differ; see `closed_loop.Traffic`."""

    name: str
    accepts: tuple[float, ...] = (0.65,)
    accept_sd: float = 0.0
    persistence: float = 0.0


MIXES = (
    *(Mix(f"0.65, sd {sd}", accept_sd=sd) for sd in (0.0, 0.1, 0.2, 0.3, 0.35)),
    Mix("half 0.8, half 0.5", (0.8, 0.5)),
    Mix("half 0.9, half 0.4", (0.9, 0.4)),
    Mix("half 0.95, half 0.1", (0.95, 0.1)),
    Mix("0.65, sd 0.2, persistence 0.5", accept_sd=0.2, persistence=0.5),
    Mix("0.65, sd 0, persistence 0.5", persistence=0.5),
)


@dataclass(frozen=True)
class Case:
    machine: str
    batch_size: int
    mix: Mix


@dataclass(frozen=True)
class Found:
    """gain: of `goodput` over `goodput_global`; known_gain: the same where each request's
    acceptance is known to `goodput`, None where positions are not alike; by_step: over `goodput`
    where sequences are judged by the rate of the step (see `search._weighed`). over_fixed: of
    `goodput` over the best of `none` and `fixed:1` to `fixed:7`, which is best_len."""

    case: Case
    gain: Ratio
    known_gain: Ratio | None
    by_step: Ratio
    best_len: int
    over_fixed: Ratio


def measure(case: Case) -> Found:
    mix, num_tokens = case.mix, NUM_TOKENS[case.batch_size]
    cost = hardware_of(case.machine, max(NUM_TOKENS)).cost
    traffic = Traffic(mix.accepts, CONTEXT_LEN, mix.accept_sd, mix.persistence)
    clients = traffic.clients(case.batch_size, num_tokens)
    window = (WARM_UP_ROW_TOKENS * case.batch_size, num_tokens)
    fixed = [fixed_times(clients, k, cost, num_tokens) for k in range(MAX_DRAFT_LEN + 1)]
    speeds = [throughput(times, *window) for times in fixed]
    best = max(range(MAX_DRAFT_LEN + 1), key=speeds.__getitem__)
    for_all = ClosedLoop(clients, "goodput_global", cost).run(num_tokens)
    for_each = ClosedLoop(clients, "goodput", cost).run(num_tokens)
    with patch.object(search, "_weighed", lambda step, alike, seconds: step):
        by_step = ClosedLoop(clients, "goodput", cost).run(num_tokens)
    return Found(
        case,
        ratio(for_each, for_all, *window),
        None if mix.persistence else ratio(_knowing(case, clients), for_all, *window),
        ratio(for_each, by_step, *window),
        best,
        ratio(for_each, fixed[best], *window),
    )


def _knowing(case: Case, clients: Sequence[Sequence[Text]]) -> Times:
    cost = hardware_of(case.machine, max(NUM_TOKENS)).cost
    server = ClosedLoop(clients, "goodput", cost)
    texts = server.texts
    server.loop.controller = StudiedController(
        cost, case.batch_size, lambda sequence: texts[sequence].accept
    )
    return server.run(NUM_TOKENS[case.batch_size])


def main() -> None:
    folder = Path(sys.argv[1])
    machines = (FITTED, CPU_88M)
    cases = [Case(name, rows, mix) for name in machines for mix in MIXES for rows in NUM_TOKENS]
    with ProcessPoolExecutor(2) as pool:
        found = list(tracked("spread", pool.map(measure, cases), "cases", len(cases)))
    sections = [
        _answer(found),
        CAUSES,
        *(section for name in machines for section in (f"**{name}**", _table(found, name))),
        METHOD,
    ]
    title = "A draft length for each request, or one for all"
    publish(folder, "spread", title, sections, {"cases": [asdict(f) for f in found]})


def _answer(found: Sequence[Found]) -> str:
    parts = []
    for machine in dict.fromkeys(f.case.machine for f in found):
        own = [f for f in found if f.case.machine == machine]
        alike = [f.gain.value for f in own if f.case.mix == MIXES[0]]
        gains, by_step = [f.gain.value for f in own], [f.by_step.value for f in own]
        most = max(own, key=lambda f: f.gain.value)
        least = min(own, key=lambda f: f.gain.value)
        low = sum(f.over_fixed.value < BAR for f in own)
        parts.append(
            f"**{machine}**: a length for each request gains {_percent(_mean(gains))} over one for "
            f"all on average, from {_percent(least.gain.value)} ({_name(least.case)}) to "
            f"{_percent(most.gain.value)} ({_name(most.case)}). If all requests have the same "
            f"acceptance, it gains {_percent(min(alike))} to {_percent(max(alike))}. It is below "
            f"{BAR} of the best fixed length in {low} of {len(own)} cases. Weights by own rate "
            f"gain {_percent(_mean(by_step))} on average, from {_percent(min(by_step))} to "
            f"{_percent(max(by_step))}."
        )
    error = max(f.gain.error for f in found)
    return "\n\n".join([*parts, f"The largest standard error of a gain is {error:.3f}."])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _name(case: Case) -> str:
    return f"{case.mix.name}, {case.batch_size} rows"


CAUSES = """\
The plan with the most tokens per second of the step is not the best one for a full server. It
gives long drafts to requests with a high acceptance rate. These finish and are replaced, while
those with a low acceptance rate stay. Every request needs its tokens at any rate, so `goodput`
weighs a request by its own rate (`core/plan/search.py`)."""


def _table(found: Sequence[Found], machine: str) -> str:
    header = ["acceptance of requests"]
    for rows in NUM_TOKENS:
        header += [f"{rows} rows: gain", "over fixed"]
    lines = []
    for mix in MIXES:
        line = [mix.name]
        for rows in NUM_TOKENS:
            (f,) = (f for f in found if f.case == Case(machine, rows, mix))
            line.append(f"{f.gain.value:.3f} ± {f.gain.error:.3f}")
            line.append(f"{f.over_fixed.value:.3f} (k {f.best_len})")
        lines.append(line)
    return table(header, lines)


METHOD = f"""\
*gain*: throughput of `goodput` over that of `goodput_global`. *over fixed*: over the best of 0 to
{MAX_DRAFT_LEN} drafts for all (k), chosen in hindsight. *sd*: standard deviation of acceptance
between requests. *persistence*: correlation between neighbouring positions.

Each client has one request of 256 tokens in the server at all times, with a context of
{CONTEXT_LEN}. The policies run in the server's own loop in the simulator, on the same texts, and
learn from nothing. Throughput is counted after {WARM_UP_ROW_TOKENS} tokens per row. Errors are
from 20 parts of the run, pair by pair. Costs: the published fit of an 8B with an EAGLE head on an
H100 (beyond 32 rows the larger of fit and roofline), and a measured profile of the 88 M pair on a
CPU. The JSON file also has the gain if acceptance is known, and the gain of weights by own rate."""


if __name__ == "__main__":
    main()
