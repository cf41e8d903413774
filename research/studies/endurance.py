"""Endurance: does memory grow while the loop serves for long?

The server's own loop on the simulator's engines: 32 rows, policy `goodput`, many small requests.
They use a draft model, prompt lookup or both, with priorities and deadlines. Some are cancelled,
some have a `workload` tag of their own, and some are preempted because the cache is small. At each
tenth of the run, the loop is drained and the ring of step records emptied, so that no request or
step holds memory. Then memory is measured.

STEPS=1000000 scripts/study endurance

100,000 steps unless STEPS is set.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from smartspec_py.core.types import SequenceId
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.serving.messages import Update
from smartspec_py.serving.step import StepRecord
from smartspec_sim.acceptance import DraftRuns, draw_runs
from smartspec_sim.engine import SimProposer, SimTarget, sim_capabilities
from smartspec_sim.hardware import gpu_hardware
from smartspec_sim.simulate import served_request
from smartspec_sim.workload import SimRequest
from smartspec_testing.clock import VirtualClock
from smartspec_testing.offline import OfflineLoop
from studies.document import publish, table

NUM_STEPS = int(os.environ.get("STEPS", "100000"))
NUM_LOOKS = 10
WARM_LOOKS = 2
"""Measurements that are left out of the result, because tables and pools still fill."""

NUM_ROWS, MAX_DRAFT_LEN, CHUNK = 32, 7, 256
MAX_PROMPT, MAX_OUTPUT = 40, 64
NUM_TEXTS = 509
"""Texts that requests share. A prime number, so that texts and other properties combine
differently."""

SHARE_OF_ROWS = 0.7
"""Capacity of the cache as a share of all rows at their longest."""

WAITING = 8
"""Requests that are kept in the queue."""


class Service:
    """The loop, its engines, and the clients. All data of a request is removed at its end."""

    def __init__(self) -> None:
        self._texts: dict[SequenceId, SimRequest] = {}
        self._clock = VirtualClock()
        self._acceptances = pool()
        self.num_steps = self.num_requests = self.num_tokens = 0
        self.outcomes: Counter[str] = Counter()
        cost = gpu_hardware("h100", 1, "llama-3-8b", "eagle", NUM_ROWS).cost
        longest = MAX_PROMPT + MAX_OUTPUT
        capabilities = sim_capabilities(NUM_ROWS, longest, MAX_DRAFT_LEN, CHUNK, 2)
        self._offline = OfflineLoop(
            SimTarget(capabilities, cost, self._clock, self._texts),
            {
                name: SimProposer(name, self._texts, MAX_DRAFT_LEN, cost, self._clock, size)
                for name, size in ((DRAFT_MODEL, 1), (PROMPT_LOOKUP, 0))
            },
            cost,
            self._clock.now,
            budget=CacheBudget(int(SHARE_OF_ROWS * NUM_ROWS * longest * 3), 2, 1),
            max_queue=10 * WAITING,
            prefill_chunk=CHUNK,
            on_update=self._take,
            on_step=self._count,
        )
        self.loop = self._offline.loop

    def step(self) -> None:
        while len(self._texts) < NUM_ROWS + WAITING:
            self._put()
        if self.num_steps % 50 == 0:  # a client gives up: the one that has been there for longest
            self._offline.inbox.cancel(next(iter(self._texts)))
        self._step()

    def drain(self) -> None:
        """Serve all remaining requests, and drop the records of steps."""
        while self._texts:
            self._step()
        self.loop.check_integrity()
        self.loop.records.clear()

    def _step(self) -> None:
        self._offline.step()
        self.num_steps += 1

    def _put(self) -> None:
        self.num_requests += 1
        text = self._text(self.num_requests)
        self._texts[text.sequence] = text
        self._offline.put(served_request(text, "goodput", MAX_DRAFT_LEN))

    def _text(self, number: int) -> SimRequest:
        """One of two workloads, with high and low acceptance; one request in 50 has its own."""
        index = number % NUM_TEXTS
        draft, lookup = self._acceptances[index]
        kind = f"kind {index % 2}" if number % 50 else f"only {number}"
        return SimRequest(
            sequence=number,
            arrival_s=self._clock.now(),
            prompt_len=1 + index % MAX_PROMPT,
            output_len=8 + index % (MAX_OUTPUT - 8),
            acceptances=((draft, None), (draft, None), (None, lookup), (draft, lookup))[number % 4],
            cohort=kind,
            priority=number % 10 == 0,
            deadline_s=0.2 if number % 23 == 0 else None,
        )

    def _count(self, step: StepRecord) -> None:
        self.num_tokens += step.num_generated

    def _take(self, update: Update) -> None:
        if update.is_last:
            del self._texts[update.sequence]
            self.outcomes[update.finish_reason.value if update.finish_reason else "error"] += 1


def pool() -> list[tuple[DraftRuns, DraftRuns]]:
    """For each text the runs of right drafts of the draft model and of prompt lookup."""
    rng = np.random.default_rng(1)
    return [
        (
            draw_runs(rng, MAX_OUTPUT, 0.4 + 0.4 * (index % 2), 0.2),
            DraftRuns(rng.integers(0, 4, MAX_OUTPUT).tolist(), [3] * MAX_OUTPUT),
        )
        for index in range(NUM_TEXTS)
    ]


@dataclass(frozen=True)
class Look:
    """Memory of a drained loop. rss_kib: resident. num_blocks: allocated by Python. num_objects:
    tracked by the garbage collector."""

    num_steps: int
    num_requests: int
    rss_kib: int
    num_blocks: int
    num_objects: int


def look(service: Service) -> Look:
    service.drain()
    gc.collect()
    num_blocks, num_objects = sys.getallocatedblocks(), len(gc.get_objects())
    return Look(service.num_steps, service.num_requests, resident_kib(), num_blocks, num_objects)


def objects_by_type() -> Counter[str]:
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise RuntimeError("this system does not tell of its memory")


def growth(looks: Sequence[Look], value: Callable[[Look], float]) -> float:
    """Growth of the value per million steps: the slope of a linear fit."""
    steps = np.array([look.num_steps for look in looks], dtype=np.float64)
    values = np.array([value(look) for look in looks])
    return float(np.polyfit(steps, values, 1)[0]) * 1e6


def verdict(looks: Sequence[Look], service: Service) -> str:
    warm = looks[WARM_LOOKS:]
    num_requests = warm[-1].num_requests - warm[0].num_requests
    objects = warm[-1].num_objects - warm[0].num_objects
    blocks = warm[-1].num_blocks - warm[0].num_blocks
    outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(service.outcomes.items()))
    slopes = (
        f"{growth(warm, lambda one: one.num_objects):+,.0f} objects, "
        f"{growth(warm, lambda one: one.num_blocks):+,.0f} blocks and "
        f"{growth(warm, lambda one: one.rss_kib / 1024):+.2f} MiB"
    )
    return (
        "Does memory grow while a server runs? "
        f"{service.num_steps:,} steps, {service.num_requests:,} requests ({outcomes}), "
        f"{service.num_tokens:,} tokens, {service.loop.num_preemptions:,} preemptions. After "
        f"warm-up, over {num_requests:,} requests: {objects:+,} objects, {blocks:+,} blocks of "
        f"memory, {warm[-1].rss_kib - warm[0].rss_kib:+,} KiB resident. By a linear fit, a million "
        f"steps add {slopes}."
    )


MADE = f"""\
The server's own loop, scheduler, batcher, controller and estimates on the simulator's engines and
a virtual clock, with {NUM_ROWS} rows. Triton, PyTorch and the responder are not included. Prompts
have 1 to {MAX_PROMPT} tokens and answers 8 to {MAX_OUTPUT}. There are priorities, deadlines,
`workload` tags, cancellations and preemptions. At each look the loop is drained and the garbage
collector runs. The first {WARM_LOOKS} looks are warm-up. Blocks are those of Python's allocator."""


def main() -> None:
    service = Service()
    looks: list[Look] = []
    at_start: Counter[str] = Counter()
    for number in range(1, NUM_LOOKS + 1):
        while service.num_steps < number * NUM_STEPS // NUM_LOOKS:
            service.step()
        looks.append(look(service))
        if number == WARM_LOOKS:
            at_start = objects_by_type()
        print(f"{looks[-1].num_steps:,} steps, {looks[-1].rss_kib / 1024:.1f} MiB", flush=True)
    grown = objects_by_type() - at_start
    rows = [
        [
            f"{one.num_steps:,}",
            f"{one.num_requests:,}",
            f"{one.rss_kib / 1024:.2f}",
            f"{one.num_blocks:,}",
            f"{one.num_objects:,}",
        ]
        for one in looks[1::2]
    ]
    publish(
        Path(sys.argv[1]),
        "endurance",
        "Memory over many steps",
        [
            verdict(looks, service),
            table(["steps", "requests", "resident MiB", "blocks", "objects"], rows),
            MADE,
        ],
        {
            "looks": [asdict(one) for one in looks],
            "grown_types": grown,
            "outcomes": service.outcomes,
        },
    )


if __name__ == "__main__":
    main()
