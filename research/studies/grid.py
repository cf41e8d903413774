"""Does `goodput` reach 0.98 of the best fixed length and of no speculation at every steady load?

A cell is a machine, a number of rows, an acceptance and a context. All texts of a cell have the
same acceptance at every position. This is the hardest case for a controller: it cannot gain over
the best fixed length, and it can lose by estimates, probes and the guard.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from smartspec_bench.progress import tracked
from smartspec_sim.hardware import HardwareError, check_fits
from studies.closed_loop import (
    CPU_88M,
    CPU_TINY,
    FITTED,
    FITTED_70B,
    GPUS,
    MAX_DRAFT_LEN,
    OUTPUT_LEN,
    ROOFLINE,
    ClosedLoop,
    Ratio,
    StudiedController,
    Traffic,
    fixed_times,
    hardware_of,
    ratio,
    throughput,
)
from studies.document import publish, table

ACCEPTS = (0.3, 0.5, 0.7, 0.8, 0.9)
BAR = 0.98
NUM_WORST = 5
NUM_TOKENS = {1: 5000, 2: 8000, 4: 9000, 8: 12000, 16: 16000, 32: 26000, 64: 46000, 128: 90000}
"""Of a run, by rows."""
LONGER, MAX_ERROR = (1, 3, 9), 0.005
"""A run is repeated with this factor of tokens, until the standard error is small enough."""
WARM_UP_ROW_TOKENS = 250
"""Tokens of each row before the window: about a request, 80 to 250 steps."""

ROWS = {
    FITTED: (1, 4, 16, 32),
    FITTED_70B: (1, 4, 16, 32),
    ROOFLINE: (1, 4, 16, 32, 64, 128),
    CPU_88M: (1, 4, 16, 32),
    CPU_TINY: (1, 2, 4, 8),
}
CONTEXTS = {
    FITTED: (256, 2048, 8192),
    FITTED_70B: (256, 2048, 8192),
    ROOFLINE: (256, 2048, 8192),
    CPU_88M: (256, 2048),
    CPU_TINY: (256,),  # its profile has nothing of what a longer one costs
}


@dataclass(frozen=True)
class Cell:
    machine: str
    batch_size: int
    accept: float
    context_len: int


@dataclass(frozen=True)
class Found:
    """to_best: throughput over that of the best of `none` and `fixed:1` to `fixed:7`, which is
    best_len; to_none: over that of `none`. best_gain: of the best over `none`. whys: whose choice
    the steps were."""

    cell: Cell
    best_len: int
    best_gain: float
    to_best: Ratio
    to_none: Ratio
    mean_draft_len: float
    num_switches: int
    num_steps: int
    whys: dict[str, int]


@dataclass(frozen=True)
class Without:
    """Parts that are removed from the server's loop, to see their cost."""

    guard: bool = False
    estimates: bool = False


NOTHING = Without()


def cells() -> Iterator[Cell]:
    """Those whose caches fit the machine."""
    for machine, batch_size in ((machine, n) for machine, rows in ROWS.items() for n in rows):
        for context_len in CONTEXTS[machine]:
            if fits(machine, batch_size, context_len):
                yield from (Cell(machine, batch_size, a, context_len) for a in ACCEPTS)


def fits(machine: str, batch_size: int, context_len: int) -> bool:
    if machine not in GPUS:
        return True
    longest = context_len + OUTPUT_LEN // 2 + MAX_DRAFT_LEN
    try:
        check_fits(hardware_of(machine, batch_size), batch_size, longest)
    except HardwareError:
        return False
    return True


def measure(cell: Cell, without: Without = NOTHING) -> Found:
    """With as many tokens as the error asks for."""
    for times in LONGER:
        found = run(cell, times * NUM_TOKENS[cell.batch_size], without)
        if found.to_best.error <= MAX_ERROR:
            break
    return found


def run(cell: Cell, num_tokens: int, without: Without) -> Found:
    cost = hardware_of(cell.machine, max(ROWS[cell.machine])).cost
    clients = Traffic((cell.accept,), cell.context_len).clients(cell.batch_size, num_tokens)
    lengths = range(MAX_DRAFT_LEN + 1)
    fixed = [fixed_times(clients, k, cost, num_tokens) for k in lengths]
    window = (min(WARM_UP_ROW_TOKENS * cell.batch_size, num_tokens // 4), num_tokens)
    speeds = [throughput(times, *window) for times in fixed]
    best = max(lengths, key=speeds.__getitem__)
    server = ClosedLoop(clients, "goodput", cost)
    if without != NOTHING:
        known = (lambda _: cell.accept) if without.estimates else None
        server.loop.controller = StudiedController(cost, cell.batch_size, known, without.guard)
    times = server.run(num_tokens)
    num_drafted = sum(k * num for k, num in server.draft_lens.items())
    return Found(
        cell,
        best,
        speeds[best] / speeds[0],
        ratio(times, fixed[best], *window),
        ratio(times, fixed[0], *window),
        num_drafted / server.draft_lens.total(),
        server.loop.controller.num_switches,
        len(times.tokens) - 1,
        dict(Counter(record.decision.reason for record in server.loop.records)),
    )


def disagreement(machine: str) -> float:
    """Largest relative difference of any step's end between the loop under `fixed:3` and
    `fixed_times`."""
    batch_size, num_tokens = ROWS[machine][1], 3000
    cost = hardware_of(machine, max(ROWS[machine])).cost
    clients = Traffic((0.7,), CONTEXTS[machine][0]).clients(batch_size, num_tokens)
    by_loop = ClosedLoop(clients, "fixed:3", cost).run(num_tokens)
    by_hand = fixed_times(clients, 3, cost, num_tokens)
    assert len(by_loop.seconds) == len(by_hand.seconds)
    return float(abs(by_loop.seconds[1:] / by_hand.seconds[1:] - 1).max())


ABLATIONS = {
    "neither guard nor probes": Without(guard=True),
    "acceptance known": Without(estimates=True),
    "both": Without(guard=True, estimates=True),
}


def _measured(task: tuple[Cell, Without]) -> Found:
    return measure(*task)


def main() -> None:
    folder = Path(sys.argv[1])
    tasks = [(cell, NOTHING) for cell in cells()]
    with ProcessPoolExecutor(2) as pool:
        differs = max(pool.map(disagreement, ROWS))
        assert differs < 1e-9, f"fixed lengths by the loop and by arithmetic differ by {differs}"
        found = list(tracked("grid", pool.map(_measured, tasks), "cells", len(tasks)))
        worst = sorted(found, key=lambda f: f.to_best.value)[:NUM_WORST]
        again = [(f.cell, without) for f in worst for without in ABLATIONS.values()]
        causes_found = pool.map(_measured, again)
        ablated = iter(list(tracked("causes", causes_found, "cells", len(again))))
    causes = [{name: next(ablated).to_best.value for name in ABLATIONS} for _ in worst]
    figures = {
        "loop_and_arithmetic_differ_by": differs,
        "cells": [asdict(f) for f in found],
        "worst": [asdict(f.cell) | cause for f, cause in zip(worst, causes, strict=True)],
    }
    publish(folder, "grid", TITLE, _sections(found, worst, causes), figures)


TITLE = "`goodput` against the best fixed draft length, cell by cell"


def _sections(
    found: Sequence[Found], worst: Sequence[Found], causes: Sequence[dict[str, float]]
) -> list[str]:
    return [
        _answer(found),
        CAUSES,
        _by(found, "machine", "batch_size", "Rows"),
        "The five lowest cells, also without guard and probes, and with acceptance known to the "
        "planner:",
        _worst_table(worst, causes),
        METHOD,
    ]


CAUSES = """\
The three lowest cells lose at most 0.01 to no speculation. The best fixed length gains only 1 to 2
% there, so an estimate of acceptance that is a little too low stops the drafting, and only probes
renew it. With acceptance known to the planner, these cells reach 1.000."""


def _answer(found: Sequence[Found]) -> str:
    missed = [f for f in found if f.to_best.value < BAR]
    lost = [f for f in found if f.to_none.value < BAR]
    lowest = min(found, key=lambda f: f.to_best.value)
    to_none = min(f.to_none.value for f in found)
    error = max(f.to_best.error for f in found)
    mean = sum(f.to_best.value for f in found) / len(found)
    return (
        "How close is `goodput` to the best fixed draft length? "
        f"{len(found) - len(missed)} of {len(found)} cells reach {BAR} of the best fixed length "
        f"(chosen in hindsight among none and 1 to {MAX_DRAFT_LEN}), and {len(found) - len(lost)} "
        f"reach {BAR} of no speculation. Mean {mean:.3f}; lowest {lowest.to_best.value:.3f} "
        f"({_name(lowest.cell)}); lowest against none {to_none:.3f}. The largest standard error of "
        f"a ratio to the best is {error:.4f}."
    )


def _name(cell: Cell) -> str:
    return (
        f"{cell.machine}, {cell.batch_size} rows, acceptance {cell.accept}, "
        f"context {cell.context_len}"
    )


def _by(found: Sequence[Found], first: str, second: str, title: str) -> str:
    """A line for each machine, a column for each value: lowest and mean ratio to the best."""
    machines = list(dict.fromkeys(getattr(f.cell, first) for f in found))
    values = sorted({getattr(f.cell, second) for f in found})
    rows = []
    for machine in machines:
        line = [machine]
        for value in values:
            ratios = [
                f.to_best.value
                for f in found
                if (getattr(f.cell, first), getattr(f.cell, second)) == (machine, value)
            ]
            mean = sum(ratios) / max(1, len(ratios))
            line.append(f"{min(ratios):.3f} / {mean:.3f}" if ratios else "-")
        rows.append(line)
    head = [f"{title}: lowest / mean share of the best", *map(str, values)]
    return table(head, rows)


def _worst_table(worst: Sequence[Found], causes: Sequence[dict[str, float]]) -> str:
    header = ["cell", "best k", "its gain", "mean k", "of the best", "of none"]
    rows = [
        [
            _name(f.cell),
            f.best_len,
            f.best_gain,
            f.mean_draft_len,
            f"{f.to_best.value:.3f} ± {f.to_best.error:.3f}",
            f.to_none.value,
            *cause.values(),
        ]
        for f, cause in zip(worst, causes, strict=True)
    ]
    return table([*header, *ABLATIONS], rows)


METHOD = f"""\
Each client has one request of {OUTPUT_LEN} tokens in the server at all times. Prompts count as
cached, so every step decodes at about the given context. `goodput` runs in the server's own loop
on a virtual clock and learns from nothing. All policies see the same texts. The ratio is that of
the times for the same tokens, after a warm-up of {WARM_UP_ROW_TOKENS} tokens per row. Acceptance
is the same for every position of every text. Steps take exactly what the cost model says: there is
no noise, and the profile is right.

Costs: {FITTED} (EAGLE head) and {FITTED_70B} (1B draft) are published fits up to 32 rows.
{ROOFLINE} (1B draft) is the simulator's roofline. {CPU_88M} is a measured profile up to 32 rows.
{CPU_TINY} is the shipped pair up to 8 rows; its draft model takes 0.6 of a target pass. Cells
whose cache does not fit are left out. The JSON file has all cells."""


if __name__ == "__main__":
    main()
