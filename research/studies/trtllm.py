"""What the TensorRT-LLM path reaches by the costs of an H100, on the fake executor in virtual time.

Run by `scripts/study trtllm`, about a minute on one core. The server's own loop and adapter serve
Llama 3 8B with a draft of 1B, in texts of 1,790 to 2,040 tokens. No GPU and no TensorRT-LLM is
involved: the page puts estimates that were made by hand beside what the fake executor shows with
the same assumptions.

Assumptions: passes of the target take what a published fit says, and those of the draft what a
roofline says (`smartspec_sim.hardware`). An iteration of the draft that replays no CUDA graph takes
LAUNCH_S longer. A step that verifies takes `host_s` of Python. Iterations without verifications
need not wait for Python.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_bench.progress import tracked
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.engines.trtllm.build import NUM_GRAPHS
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.messages import Update
from smartspec_py.serving.profile import ProfileShape, profile
from smartspec_py.serving.request import Request
from smartspec_py.serving.step import StepRecord
from smartspec_sim.hardware import gpu_hardware
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import EngineLimits, Executor
from smartspec_testing.fake_executor_draft import DraftExecutor
from smartspec_testing.offline import OfflineLoop
from studies.document import publish, table

VOCAB_SIZE = 128_256
NUM_PROMPT = 1790
NUM_OUTPUT = 250
ACCEPT_PROB = 0.7
LAUNCH_S = 0.9e-3
"""So that 4 drafts for 32 texts of 2,000 tokens take 11 ms without graphs, as was estimated."""

MAX_NUM_TOKENS = 32_832
"""The default of build_engines.sh for 4,096 tokens of context and 7 drafts."""

BATCH_SIZES = (1, 8, 16, 32)
NUM_LONG, LONG_PROMPT = 8, 4000
MAX_SEQUENCES = 32
PROFILES: dict[tuple[bool, int], CostModel] = {}
"""What a server measures at its first start, by CUDA graphs and max_num_tokens."""

NUM_WAVES = 4
NEVER = 10**9
"""A budget that never binds."""

LIMITS = EngineLimits(
    max_batch_size=64,
    max_num_tokens=MAX_NUM_TOKENS,
    max_input_len=4104,
    max_seq_len=4104,
    max_draft_len=7,
    vocab_size=VOCAB_SIZE,
    tokens_per_block=64,
)


def host_s(batch_size: int) -> float:
    """Seconds of Python of a step; an estimate: 1.5 ms for 32 sequences."""
    return 0.15e-3 + 0.0422e-3 * batch_size


@dataclass(frozen=True)
class Setup:
    """What is compared. prompt_budget: tokens of whole prompts of a step."""

    has_graphs: bool = True
    has_long_bursts: bool = True
    prompt_budget: int = 4096


@dataclass(frozen=True)
class Mark:
    """Counts up to a time."""

    time_s: float
    num_tokens: int
    num_requests: int
    num_steps: int


BEFORE = Setup(has_graphs=False, has_long_bursts=False, prompt_budget=NEVER)


class Server:
    """The loop over two fakes on one clock."""

    def __init__(self, batch_size: int, setup: Setup, max_num_tokens: int = MAX_NUM_TOKENS) -> None:
        self.clock = VirtualClock()
        self.num_enqueued = 0
        self.times: dict[int, list[float]] = {}
        self.steps: list[StepRecord] = []
        cost = gpu_hardware("h100", 1, "llama-3-8b", "llama-3.2-1b", 64).cost
        assert cost.draft is not None
        limits = replace(LIMITS, max_num_tokens=max_num_tokens)
        self.target_executor = Executor(limits, cost=replace(cost), clock=self.clock)
        knobs = fake_executor.ExecutorConfig().extended_runtime_perf_knob_config
        knobs.cuda_graph_mode, knobs.cuda_graph_cache_size = setup.has_graphs, NUM_GRAPHS
        draft = DraftExecutor(
            replace(limits, max_draft_len=0),
            None,
            fake_executor.ExecutorConfig(extended_runtime_perf_knob_config=knobs),
            cost=replace(cost, target=cost.draft),
            launch_s=LAUNCH_S,
            clock=self.clock,
            accept_prob=ACCEPT_PROB,
        )
        self._count_requests()
        capabilities = TargetCapabilities(
            max_sequences=MAX_SEQUENCES,
            max_context_len=4096,
            max_draft_len=7,
            max_decode_tokens=16,
            max_prefill_tokens=None,
            verifies_sampling=False,
            vocab_size=VOCAB_SIZE,
            takes_long_bursts=setup.has_long_bursts,
        )
        proposer = TrtllmDraftProposer(
            draft,
            fake_executor,
            max_draft_len=7,
            max_context_len=4096,
            vocab_size=VOCAB_SIZE,
            clock=self.clock.now,
        )
        target = TrtllmTarget(self.target_executor, fake_executor, capabilities, self.clock.now)
        key = (setup.has_graphs, max_num_tokens)
        if key not in PROFILES:
            PROFILES[key] = _profile(target, proposer, self.clock, max_num_tokens)
        self._offline = OfflineLoop(
            target,
            {DRAFT_MODEL: proposer},
            PROFILES[key],
            self.clock.now,
            prefill_chunk=setup.prompt_budget,
            on_update=self._take,
            on_step=self._spend_host,
        )

    def _count_requests(self) -> None:
        enqueue = self.target_executor.enqueue_requests

        def counting(requests: Sequence[Any]) -> list[int]:
            self.num_enqueued += len(requests)
            return enqueue(requests)

        self.target_executor.enqueue_requests = counting  # type: ignore[method-assign]

    def step(self) -> None:
        self._offline.step()

    def mark(self) -> Mark:
        num_tokens = sum(map(len, self.times.values()))
        return Mark(self.clock.now(), num_tokens, self.num_enqueued, len(self.steps))

    def _take(self, update: Update) -> None:
        self.times.setdefault(update.sequence, []).extend([self.clock.now()] * len(update.tokens))

    def _spend_host(self, step: StepRecord) -> None:
        self.steps.append(step)
        if step.num_drafted:
            self.clock.sleep(host_s(step.decision.num_decoding))

    def put(self, number: int, num_prompt: int, policy: str, max_tokens: int = NUM_OUTPUT) -> None:
        tokens = random.Random(number).choices(range(VOCAB_SIZE), k=num_prompt)
        self._offline.put(
            Request(
                number,
                tokens,
                num_prompt,
                max_tokens,
                SamplingParams(),
                policy,
                7,
                DRAFT_MODEL,
                arrival_s=self.clock.now(),
            )
        )

    def run_until(self, numbers: range, num_tokens: int) -> None:
        """Until each of these has so many tokens."""
        while any(len(self.times.get(number, ())) < num_tokens for number in numbers):
            self.step()


def _profile(
    target: TrtllmTarget, draft: TrtllmDraftProposer, clock: VirtualClock, max_num_tokens: int
) -> CostModel:
    """As `build_trtllm` measures it, each pass once."""
    context_len = max_num_tokens // MAX_SEQUENCES - 8
    shape = ProfileShape(MAX_SEQUENCES, 7, context_len, 4096, 4096)
    return replace(profile(target, draft, shape, 0.0, clock.now), max_charged_tokens=max_num_tokens)


@dataclass(frozen=True)
class Row:
    """A steady batch. tokens_s: tokens per second of decoding. step_ms, draft_ms: of a step that
    verifies, 0 without. num_requests: to the target, per 100 generated tokens."""

    batch_size: int
    policy: str
    setup: Setup
    tokens_s: float
    step_ms: float
    draft_ms: float
    mean_draft_len: float
    num_requests: float


def steady(batch_size: int, policy: str, setup: Setup) -> Row:
    """From when all have decoded for a while to when the first is near its end, in so many batches
    that 16 texts are served; goodput has served NUM_WAVES batches before."""
    server, num_before = Server(batch_size, setup), NUM_WAVES if policy == "goodput" else 0
    steps: list[StepRecord] = []
    num_tokens, elapsed_s, num_requests = 0, 0.0, 0
    for wave in range(num_before + max(1, 16 // batch_size)):
        numbers = range(wave * batch_size + 1, (wave + 1) * batch_size + 1)
        for number in numbers:
            server.put(number, NUM_PROMPT, policy)
        server.run_until(numbers, 8)
        start = server.mark()
        while all(len(server.times[number]) < NUM_OUTPUT - 8 for number in numbers):
            server.step()
        if wave >= num_before:
            end = server.mark()
            elapsed_s += end.time_s - start.time_s
            num_tokens += end.num_tokens - start.num_tokens
            num_requests += end.num_requests - start.num_requests
            steps += server.steps[start.num_steps : end.num_steps]
        server.run_until(numbers, NUM_OUTPUT)
    drafting = [step for step in steps if step.num_drafted]
    return Row(
        batch_size,
        policy,
        setup,
        num_tokens / elapsed_s,
        1e3 * _mean([step.total_s + host_s(step.decision.num_decoding) for step in drafting]),
        1e3 * _mean([step.draft_s for step in drafting]),
        sum(step.num_drafted for step in drafting)
        / max(1, sum(len(step.decision.views) for step in steps)),
        100 * num_requests / num_tokens,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Delay:
    """gap_ms: longest time between tokens of a running request after the prompts arrived.
    first_ms: mean time to the first token of the prompts."""

    policy: str
    max_num_tokens: int
    setup: Setup
    gap_ms: float
    first_ms: float


def delayed(policy: str, max_num_tokens: int, setup: Setup) -> Delay:
    """NUM_LONG prompts arrive at once beside 8 running requests."""
    server, running = Server(8, setup, max_num_tokens), range(1, 9)
    for number in running:
        server.put(number, NUM_PROMPT, policy, 300)
    server.run_until(running, 8)
    start_s, late = server.clock.now(), range(101, 101 + NUM_LONG)
    for number in late:
        server.put(number, LONG_PROMPT, policy, 8)
    server.run_until(late, 1)
    server.run_until(running, 1 + max(len(server.times[number]) for number in running))
    gaps = [
        after - max(before, start_s)
        for number in running
        for before, after in zip(server.times[number], server.times[number][1:], strict=False)
        if after > start_s
    ]
    first = _mean([server.times[number][0] - start_s for number in late])
    return Delay(policy, max_num_tokens, setup, 1e3 * max(gaps), 1e3 * first)


def main() -> None:
    kinds = [
        (batch_size, policy, setup)
        for batch_size in BATCH_SIZES
        for policy, setup in (
            ("none", BEFORE),
            ("none", Setup()),
            ("fixed:4", BEFORE),
            ("fixed:4", Setup()),
            ("goodput", Setup()),
        )
    ]
    rows = [steady(*kind) for kind in tracked("trtllm", kinds, "batches")]
    delays = [
        delayed(policy, most, setup)
        for policy in ("none", "fixed:4")
        for most in (MAX_NUM_TOKENS, 65_536)
        for setup in (replace(Setup(), prompt_budget=NEVER), Setup())
    ]
    publish(
        Path(sys.argv[1]),
        "trtllm",
        "What the TensorRT-LLM path reaches, by estimate",
        page(rows, delays),
        {
            "rows": [vars(row) | {"setup": vars(row.setup)} for row in rows],
            "delays": [vars(delay) | {"setup": vars(delay.setup)} for delay in delays],
        },
    )


def page(rows: list[Row], delays: list[Delay]) -> list[str]:
    found = {(row.batch_size, row.policy, row.setup == BEFORE): row for row in rows}
    speedups = [
        [
            batch_size,
            *(
                f"{found[batch_size, policy, is_before].tokens_s:,.0f}"
                for policy, is_before in (
                    ("none", True),
                    ("none", False),
                    ("fixed:4", True),
                    ("fixed:4", False),
                    ("goodput", False),
                )
            ),
            f"{found[batch_size, 'goodput', False].mean_draft_len:.1f}",
            _ratio(found, batch_size, "fixed:4", True),
            _ratio(found, batch_size, "goodput", False),
        ]
        for batch_size in BATCH_SIZES
    ]
    return [
        "**No GPU and no TensorRT-LLM was used: these numbers follow from assumptions.** The "
        "server's loop and adapter run on a fake of the executor, on a virtual clock.",
        f"Llama 3 8B with a draft of 1B on one H100, bfloat16, texts of "
        f"{NUM_PROMPT:,} to {NUM_PROMPT + NUM_OUTPUT:,} tokens, acceptance "
        f"{ACCEPT_PROB}. Target: a published fit. Draft: a roofline, and {1e3 * LAUNCH_S:.1f} ms "
        "for each iteration that replays no CUDA graph. Python: 0.15 ms per step that verifies and "
        "0.042 ms per sequence in it.",
        "## Tokens per second",
        "*before*: without CUDA graphs, and with bursts of 16 tokens. *now*: with CUDA graphs for "
        "the draft, and one burst for a text without drafts. Speed-ups are over `none` of now. "
        f"Before it is measured, goodput has served {NUM_WAVES} batches.",
        table(
            [
                "batch size",
                "none, before",
                "none, now",
                "fixed:4, before",
                "fixed:4, now",
                "goodput, now",
                "drafts of goodput",
                "speed-up of fixed:4, before",
                "speed-up of goodput, now",
            ],
            speedups,
        ),
        "## Beside the estimates made by hand",
        table(
            ["of", "estimated", "fake, before", "fake, now"],
            estimates(found),
        ),
        "The estimates are from reading the sources of TensorRT-LLM 1.2.0rc2.",
        "## Long prompts",
        f"{NUM_LONG} prompts of {LONG_PROMPT:,} tokens arrive beside 8 running requests. *budget*: "
        "prompt tokens that a step submits (`limits.prefill_chunk`).",
        table(
            [
                "policy",
                "max_num_tokens",
                "budget",
                "longest time between tokens, ms",
                "mean time to first token of the prompts, ms",
            ],
            [
                [
                    delay.policy,
                    f"{delay.max_num_tokens:,}",
                    "none" if delay.setup.prompt_budget == NEVER else delay.setup.prompt_budget,
                    f"{delay.gap_ms:.0f}",
                    f"{delay.first_ms:.0f}",
                ]
                for delay in delays
            ],
        ),
        "## Blocks",
        "Blocks that a verification looks up in a text of 2,000 tokens: "
        + ", ".join(f"{-(-2000 // size)} of {size} tokens" for size in (32, 64, 128))
        + ".",
    ]


Found = dict[tuple[int, str, bool], Row]


def _ratio(found: Found, batch_size: int, policy: str, is_before: bool) -> str:
    row = found[batch_size, policy, is_before]
    return f"{row.tokens_s / found[batch_size, 'none', False].tokens_s:.2f}"


def estimates(found: Found) -> list[list[str]]:
    """Rows of what was estimated for a batch of 32, and for one sequence."""
    before, now = found[32, "fixed:4", True], found[32, "fixed:4", False]
    none = [found[32, "none", is_before] for is_before in (True, False)]
    return [
        [
            "step with 4 drafts, 32 sequences, ms",
            "27.5",
            f"{before.step_ms:.1f}",
            f"{now.step_ms:.1f}",
        ],
        ["of it drafting, ms", "11", f"{before.draft_ms:.1f}", f"{now.draft_ms:.1f}"],
        [
            "of it verification, ms",
            "15",
            *(f"{row.step_ms - row.draft_ms - 1e3 * host_s(32):.1f}" for row in (before, now)),
        ],
        [
            "tokens/s with 4 drafts, 32 sequences",
            "3,200",
            *(f"{r.tokens_s:,.0f}" for r in (before, now)),
        ],
        [
            "tokens/s without drafts, 32 sequences",
            "3,500",
            *(f"{row.tokens_s:,.0f}" for row in none),
        ],
        [
            "speed-up with 4 drafts, one sequence",
            "1.3",
            _ratio(found, 1, "fixed:4", True),
            _ratio(found, 1, "fixed:4", False),
        ],
        [
            "requests per 100 tokens without drafts",
            "6.3 (one for 16)",
            *(f"{row.num_requests:.1f}" for row in none),
        ],
    ]


if __name__ == "__main__":
    main()
