"""The server's step loop in the caller's thread, without Triton and responder, on any clock.

For the simulator, lockstep and tests. `put` adds a request. The loop's messages go directly to the
callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smartspec_py.core.cost import CostModel
from smartspec_py.engines.base import Target
from smartspec_py.engines.proposer import Proposer
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.messages import LoopState, Update
from smartspec_py.serving.request import Request
from smartspec_py.serving.step import StepRecord

UNBOUNDED = CacheBudget(0, 0, 0)


class OfflineLoop:
    """on_update, on_step, on_state: called with each message of a request, each step, and each
    state of the loop."""

    def __init__(
        self,
        target: Target,
        proposers: Mapping[str, Proposer],
        cost: CostModel,
        now: Callable[[], float],
        *,
        budget: CacheBudget = UNBOUNDED,
        max_queue: int = 1000,
        prefill_chunk: int = 512,
        on_update: Callable[[Update], object] = lambda update: None,
        on_step: Callable[[StepRecord], object] = lambda step: None,
        on_state: Callable[[LoopState], object] = lambda state: None,
    ) -> None:
        """now: seconds, any origin. budget: `UNBOUNDED` if the cache has no limit."""
        self.inbox = Inbox(max_queue)
        self._has_messages = False
        self._on_update, self._on_step, self._on_state = on_update, on_step, on_state
        self.loop = StepLoop(
            target, proposers, cost, budget, self.inbox, prefill_chunk, self._on_messages, now
        )

    def put(self, request: Request) -> None:
        """Raises RequestError if the queue is full."""
        self.inbox.put(request)
        self._has_messages = True

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._has_messages or self.loop.num_live or self.loop.num_waiting)

    def step(self) -> None:
        self._has_messages = False
        self.loop.step()
        self.loop.flush()

    def _on_messages(self, *messages: Update | StepRecord | LoopState) -> None:
        for message in messages:
            if isinstance(message, StepRecord):
                self._on_step(message)
            elif isinstance(message, Update):
                self._on_update(message)
            else:
                self._on_state(message)
