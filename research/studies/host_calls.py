"""Function calls that the loop makes per step on TensorRT-LLM's adapter, by part of the step.

Run by `scripts/study host_calls`, in a minute. Counts do not depend on what else the machine does.
The loop, the planner and the adapter are the server's own, the executors are fakes. Calls of
Python and C functions are counted, except those inside the executors and their requests.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from smartspec_bench.progress import tracked
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Proposer, TargetCapabilities
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.proposers.prompt_lookup import PromptLookupProposer
from smartspec_py.serving.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.request import Request
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import DraftExecutor, EngineLimits, Executor
from smartspec_testing.offline import OfflineLoop
from studies.document import publish, table

SIZES = (1, 8, 64)
PROMPT_LEN, MAX_DRAFT_LEN, CONTEXT_LEN, VOCAB_SIZE = 500, 7, 4089, 2000
WARM_UP, NUM_STEPS = 40, 20
ARMS = (("fixed:4", False), ("goodput", False), ("goodput", True))
"""Policy, and whether prompt lookup drafts beside the draft model."""

COST = CostModel(
    PassTable((1, 64), (1, 16), ((0.010, 0.0104), (0.020, 0.030))),
    PassTable((1, 64), (1,), ((0.0005,), (0.001,))),
)
"""Seconds of passes for which goodput drafts at all sizes."""

PARTS = ("take in", "views", "plan", "propose", "submit", "poll", "apply", "learn", "other")


@dataclass
class Calls:
    """Calls by part of the step; `run` counts those of a function."""

    part: str = "other"
    num: Counter[str] = field(default_factory=Counter)
    num_numpy: int = 0
    _num_inside: int = 0

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls then belong to the part. Parts may be nested."""

        def run(*args: Any, **options: Any) -> Any:
            outer, self.part = self.part, part
            try:
                return function(*args, **options)
            finally:
                self.part = outer

        return run

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and (self._num_inside or "fake_executor" in path):
            self._num_inside += 1
        elif event == "return" and self._num_inside:
            self._num_inside -= 1
        elif event in ("call", "c_call") and not self._num_inside and path != __file__:
            self.num[self.part] += 1
            owner = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None))
            self.num_numpy += "numpy" in str(owner if event == "c_call" else path)


def loop_of(num_sequences: int, policy: str, has_lookup: bool) -> OfflineLoop:
    """A loop with this many requests, which do not end within the steps of the study."""
    clock = VirtualClock()
    limits = EngineLimits(
        max_batch_size=num_sequences,
        max_num_tokens=num_sequences * (CONTEXT_LEN + MAX_DRAFT_LEN),
        max_draft_len=MAX_DRAFT_LEN,
        vocab_size=VOCAB_SIZE,
    )
    executor = Executor(limits, cost=COST, clock=clock)
    target = TrtllmTarget(
        executor,
        fake_executor,
        TargetCapabilities(
            num_sequences, CONTEXT_LEN, MAX_DRAFT_LEN, 16, None, False, VOCAB_SIZE,
        ),
        clock.now,
    )  # fmt: skip
    drafting = DraftExecutor(limits, cost=COST, clock=clock, accept_prob=0.8, texts=executor.texts)
    draft = TrtllmDraftProposer(
        drafting, fake_executor, max_draft_len=MAX_DRAFT_LEN, max_context_len=limits.max_seq_len,
        vocab_size=VOCAB_SIZE, clock=clock.now,
    )  # fmt: skip
    proposers: dict[str, Proposer] = {DRAFT_MODEL: draft}
    if has_lookup:
        proposers[PROMPT_LOOKUP] = PromptLookupProposer(MAX_DRAFT_LEN)
    offline = OfflineLoop(target, proposers, COST, clock.now)
    rng = random.Random(1)
    for sequence in range(1, num_sequences + 1):
        prompt = rng.choices(range(VOCAB_SIZE), k=PROMPT_LEN)
        offline.put(
            Request(
                sequence,
                prompt,
                PROMPT_LEN,
                CONTEXT_LEN - PROMPT_LEN,
                SamplingParams(),
                policy,
                MAX_DRAFT_LEN,
                DRAFT_MODEL,
                (PROMPT_LOOKUP,) if has_lookup else (),
            )
        )
    return offline


def counted_steps(offline: OfflineLoop, num_steps: int) -> Calls:
    calls, loop = Calls(), offline.loop
    for part, owner, name in _places(loop):
        setattr(owner, name, calls.within(part, getattr(owner, name)))
    for _ in range(num_steps):
        with calls.counted():
            loop.step()
    return calls


def _places(loop: StepLoop) -> list[tuple[str, Any, str]]:
    return [
        ("take in", loop, "_take_in"),
        ("views", loop._speculation, "views"),
        ("plan", loop.controller, "plan"),
        ("propose", loop._speculation, "propose"),
        ("submit", loop._scheduler, "submit"),
        ("poll", loop._target, "poll"),
        ("apply", loop._scheduler, "apply"),
        ("learn", loop._speculation, "observe"),
        ("learn", loop.controller, "observe"),
    ]


def measure(num_sequences: int, policy: str, has_lookup: bool) -> dict[str, float]:
    """Calls per step by part, all, and those in NumPy."""
    offline = loop_of(num_sequences, policy, has_lookup)
    for _ in range(WARM_UP):
        offline.step()
    calls = counted_steps(offline, NUM_STEPS)
    found = {part: calls.num[part] / NUM_STEPS for part in PARTS}
    return found | {"all": calls.num.total() / NUM_STEPS, "NumPy": calls.num_numpy / NUM_STEPS}


def main() -> None:
    runs = [(size, *arm) for arm in ARMS for size in SIZES]
    found = [measure(*run) for run in tracked("host_calls", runs, "runs")]
    names = [f"{policy}, look-ups" if has_lookup else policy for _, policy, has_lookup in runs]
    lines = [
        [name, run[0], *(f"{count:.0f}" for count in counts.values())]
        for name, run, counts in zip(names, runs, found, strict=True)
    ]
    publish(
        Path(sys.argv[1]),
        "host_calls",
        "Function calls per step on TensorRT-LLM's adapter",
        [
            ABOUT,
            table(["policy", "sequences", *PARTS, "all", "NumPy"], lines),
        ],
        {"runs": [{"run": run, "calls": counts} for run, counts in zip(runs, found, strict=True)]},
    )


ABOUT = f"""Mean calls of Python and C functions per step of the loop, over {NUM_STEPS} steps, with
a draft model. Calls inside the executors, which are fakes, are left out. *NumPy* is a part of
*all*. *learn*: acceptance and costs. With goodput, some sequences of a step may decode without
drafts, in requests of 16 tokens, so its steps have fewer calls."""


if __name__ == "__main__":
    main()
