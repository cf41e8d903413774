"""The server's own step loop in the caller's thread: no Triton, no responder, any clock.

What the simulator, lockstep, studies and tests step. Requests go in by `put`; what the loop tells
of them is told on at once, in the responder's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smartspec_py.core.cost import CostModel
from smartspec_py.engines.base import Proposer, Target
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.messages import LoopState, Update
from smartspec_py.serving.request import Request
from smartspec_py.serving.step import StepRecord

UNBOUNDED = CacheBudget(0, 0, 0)


class OfflineLoop:
    """`loop` on engines of the caller; between two steps nothing runs.

    on_update, on_step, on_state: told of each request's message, of each step, of the loop's state.
    """

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
        """now: seconds, any origin. budget: as `UNBOUNDED` where room is not asked about."""
        self.inbox = Inbox(max_queue)
        self._has_mail = False
        self._on_update, self._on_step, self._on_state = on_update, on_step, on_state
        self.loop = StepLoop(
            target, proposers, cost, budget, self.inbox, prefill_chunk, self._hear, now
        )

    def put(self, request: Request) -> None:
        """Raises RequestError where the queue is full."""
        self.inbox.put(request)
        self._has_mail = True

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._has_mail or self.loop.num_live or self.loop.num_waiting)

    def step(self) -> None:
        self._has_mail = False
        self.loop.step()

    def _hear(self, message: Update | StepRecord | LoopState) -> None:
        if isinstance(message, StepRecord):
            self._on_step(message)
        elif isinstance(message, Update):
            self._on_update(message)
        else:
            self._on_state(message)
