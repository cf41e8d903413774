"""What the tests of serving share: the loop and the server over the fake engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.messages import LoopState, Update
from smartspec_py.serving.request import ErrorCode, Request
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import Decision, StepRecord
from smartspec_testing.clock import VirtualClock
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.fake_engine import (
    FAKE_CAPABILITIES,
    FakeTarget,
    fake_token,
)
from smartspec_testing.fake_proposer import AcceptProb, FakeProposer
from smartspec_testing.local import serving
from smartspec_testing.offline import OfflineLoop

TOKENIZER_FILE = Path(__file__).parents[2] / "engines_build/tiny/target/tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))

COST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
    draft_prefill_s=0.0001,
)
"""A target pass of 10 to 70 ms, a draft pass of 1 to 2 ms: speculation pays from a = 0.15 or so."""

LIMITS = LimitsConfig(max_context_len=4096, prefill_chunk=64)

VOCAB_SIZE = TOKENIZER.get_vocab_size()
CAPABILITIES = replace(FAKE_CAPABILITIES, vocab_size=VOCAB_SIZE)


def fake_text(
    prompt: tuple[int, ...], num_tokens: int, sampling: SamplingParams | None = None
) -> list[int]:
    """The tokens that must follow the prompt, by the fake engine's rule."""
    first, sampling = len(prompt), sampling or SamplingParams()
    positions = range(first, first + num_tokens)
    return [fake_token(prompt, position, VOCAB_SIZE, sampling) for position in positions]


@dataclass
class Story:
    """All that the loop told of one request."""

    updates: list[Update] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def finals(self) -> list[FinishReason | ErrorCode]:
        reasons = [u.finish_reason for u in self.updates if u.finish_reason is not None]
        return reasons + [u.error[0] for u in self.updates if u.error is not None]


class LoopHarness:
    """A `StepLoop` stepped by hand, on a virtual clock; what it posts is kept for each request."""

    def __init__(
        self,
        *,
        accept_prob: float | AcceptProb = 0.7,
        cost: CostModel = COST,
        target: FakeTarget | TrtllmTarget | None = None,
        proposer: FakeProposer | TrtllmDraftProposer | None = None,
        clock: VirtualClock | None = None,
        max_sequences: int = 8,
        prefill_chunk: int = 64,
        poison_token: int | None = None,
        max_queue: int = 1000,
        max_cache_tokens: int | None = None,
        max_decode_tokens: int = 1,
    ) -> None:
        """max_cache_tokens: a token costs a byte in the target's cache, and one in the draft's."""
        per_token = 0 if max_cache_tokens is None else 1
        self.clock = clock or VirtualClock()
        self.target = target or FakeTarget(
            replace(
                CAPABILITIES,
                max_sequences=max_sequences,
                bytes_per_token=per_token,
                max_decode_tokens=max_decode_tokens,
            ),
            cost=cost,
            clock=self.clock,
            poison_token=poison_token,
        )
        self.proposer = proposer or FakeProposer(
            accept_prob,
            vocab_size=VOCAB_SIZE,
            cost=cost,
            clock=self.clock,
            bytes_per_token=per_token,
        )
        self.stories: dict[int, Story] = {}
        self.requests: dict[int, Request] = {}
        self.states: list[tuple[float, LoopState]] = []
        self._offline = OfflineLoop(
            self.target,
            {DRAFT_MODEL: self.proposer},
            cost,
            self.clock.now,
            budget=CacheBudget(max_cache_tokens or 0, per_token, per_token),
            max_queue=max_queue,
            prefill_chunk=prefill_chunk,
            on_update=self._keep,
            on_state=lambda state: self.states.append((self.clock.now(), state)),
        )
        self.inbox, self.loop = self._offline.inbox, self._offline.loop

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        policy: str = "goodput",
        sampling: SamplingParams | None = None,
        max_draft_len: int = 8,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """deadline_s: from now. Raises RequestError where the queue takes no more."""
        number = len(self.stories) + 1
        now = self.clock.now()
        request = Request(
            sequence=number,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            policy=policy,
            max_draft_len=max_draft_len,
            proposers=(DRAFT_MODEL,),
            priority=priority,
            arrival_s=now,
            deadline_s=None if deadline_s is None else now + deadline_s,
        )
        self._offline.put(request)
        self.stories[number], self.requests[number] = Story(), request
        return number

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._offline.step()

    @property
    def cache_used(self) -> int:
        """Bytes that the live requests are charged for."""
        return self.loop.lifecycle.cache.used(self.loop.lifecycle.batcher.live.values())

    @property
    def num_places_taken(self) -> int:
        """Places of the queue that nobody has given back yet."""
        return self.inbox._num_waiting

    def after_admission(self, look: Callable[[], None]) -> None:
        """Call it in every step behind the admission, when everything must fit."""
        admit = self.loop.lifecycle.admit

        def admit_and_look() -> None:
            admit()
            look()

        self.loop.lifecycle.admit = admit_and_look  # type: ignore[method-assign]

    def drain(self, most_steps: int = 2000) -> list[FinishReason | ErrorCode]:
        """Step until nothing is left, and check that nothing is held then.

        Everyone has had one last word, and the right text up to it. Returns the last words.
        """
        self.step()
        while self.loop.num_live or self.loop.num_waiting:
            assert most_steps > 0, "the loop does not come to an end"
            most_steps -= 1
            self.step()
        self.check_nothing_held()
        ends = []
        for request, story in zip(self.requests.values(), self.stories.values(), strict=True):
            prompt = tuple(request.tokens[: request.num_prompt])
            text = fake_text(prompt, request.max_tokens, request.sampling)
            assert story.tokens == text[: len(story.tokens)]
            (end,) = story.finals
            assert (end is FinishReason.LENGTH) == (story.tokens == text)
            assert sum(update.is_last for update in story.updates) == 1
            ends.append(end)
        return ends

    def check_nothing_held(self) -> None:
        self.loop.lifecycle.check_integrity()
        target, proposer = self.target, self.proposer
        assert not (target._held if isinstance(target, TrtllmTarget) else target.num_sequences)
        is_trtllm = isinstance(proposer, TrtllmDraftProposer)
        assert not (proposer._num_cached if is_trtllm else proposer.num_sequences)
        if isinstance(target, FakeTarget):
            target.check_integrity()

    def _keep(self, update: Update) -> None:
        self.stories[update.sequence].updates.append(update)


def record(decision: Decision, **fields: Any) -> StepRecord:
    """Of a step in which nothing happened, and that took no time, but for these fields."""
    nothing: dict[str, Any] = {"events": [], "drafted": {}}
    zeros = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    return StepRecord(**zeros | nothing | fields | {"decision": decision})


def fake_engine(
    *,
    accept_prob: float = 0.7,
    max_sequences: int = 8,
    step_s: float = 0.0,
    fail_at_step: int | None = None,
) -> Engine:
    """The fake engine with the tiny models' tokenizer; a step takes `step_s` of real time."""
    wait = CostModel(target=PassTable((1,), (1,), ((step_s,),))) if step_s else None
    limits = replace(CAPABILITIES, max_sequences=max_sequences)
    return Engine(
        tokenizer=TOKENIZER,
        end_tokens=(),
        target=FakeTarget(limits, cost=wait, fail_at_step=fail_at_step),
        proposers={DRAFT_MODEL: FakeProposer(accept_prob, vocab_size=VOCAB_SIZE)},
        cost=COST,
    )


FAKE = FakeEngineConfig(kind="fake", tokenizer="none")


def fake_server(engine: Engine, limits: LimitsConfig = LIMITS, **options: Any) -> Server:
    return Server(engine, ServerConfig(engine=FAKE, limits=limits), **options)


def fake_serving(
    engine: Engine, limits: LimitsConfig = LIMITS, **options: Any
) -> AbstractContextManager[Server]:
    return serving(engine, ServerConfig(engine=FAKE, limits=limits), **options)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)
