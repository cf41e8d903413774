"""The step loop: the thread that owns requests and engines.

A step: take news -> admit -> plan -> propose -> submit -> poll -> apply -> observe. `apply` and
what it calls are the only writers of request state and the only callers of `release`. Nothing in
here knows Triton, PyTorch or text; an exception in a step is the end of the loop, and whoever runs
it fails all requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smartspec_py.core.acceptance import AcceptanceTracker
from smartspec_py.core.cost import CostModel
from smartspec_py.core.planner import plan
from smartspec_py.core.types import FinishReason, SequenceView, SpecPlan
from smartspec_py.engines.base import (
    Decode,
    DraftTask,
    Event,
    Prefill,
    Proposer,
    Target,
    Verify,
    Work,
)
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.request import ErrorCode, Request, RequestState
from smartspec_py.serving.responder import SHUTTING_DOWN, Conversation, Progress, Update

POLL_S = 0.05
"""The longest that a poll waits for an engine with work in flight before news are looked at."""

NUM_RECORDS = 4096
"""Step records kept."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did and took, in seconds. target_s: the pass of its decoding work; total_s: from
    the plan to the events' end, so that what the parts leave is the loop's own work."""

    num_rows: int
    num_prefill_tokens: int
    num_drafted: int
    num_generated: int
    plan_s: float
    draft_s: float
    target_s: float
    total_s: float
    plan: SpecPlan


@dataclass(frozen=True, slots=True)
class Arrival:
    request: Request
    conversation: Conversation


class StepLoop:
    """Drives one target and one proposer. `step` is called by one thread, and only there."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        cost: CostModel,
        inbox: Inbox[Arrival],
        prefill_chunk: int,
        post: Callable[[Update], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """post: takes news for the responder. clock: seconds, any origin."""
        self._target = target
        self._proposer = proposer
        self._cost = cost
        self._inbox = inbox
        self._post = post
        self._clock = clock
        capabilities = target.capabilities
        largest = capabilities.max_prefill_tokens
        chunk = None if largest is None else min(prefill_chunk, largest)
        self._batcher = Batcher(capabilities.max_sequences, chunk)
        self._acceptance = AcceptanceTracker()
        self._conversations: dict[int, Conversation] = {}
        self.records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)

    def run(self) -> None:
        """Step until the inbox is closed; then end what is left."""
        while not self._inbox.is_closed:
            self.step(idle_wait_s=0.5)
        self.fail_all(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)

    def step(self, idle_wait_s: float = 0.0) -> None:
        """One step; waits up to idle_wait_s for a request where there is none."""
        self._take_news(0.0 if self._batcher else idle_wait_s)
        self._admit()
        start = self._clock()
        ready = self._batcher.ready()
        spec_plan = plan([self._view(request) for request in ready], self._cost)
        planned = self._clock()
        drafts = self._propose(ready, spec_plan)
        proposed = self._clock()
        prefills = self._batcher.prefills()
        self._submit([*prefills, *self._decoding_work(ready, drafts)])
        events = self._target.poll(POLL_S)
        self._apply(events)
        self._record((start, planned, proposed, self._clock()), spec_plan, prefills, events)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Give every request that is left its final response. The engines are not used again."""
        self._take_arrivals(self._inbox.take(0.0).arrivals)
        for sequence, conversation in self._conversations.items():
            request = self._batcher.find(sequence)
            if request is not None and not request.is_over:
                request.move_to(RequestState.FAILED)
                self._post(Update(conversation, error=(code, message)))
        self._conversations.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless an idle loop holds nothing."""
        if not self._batcher:
            assert not self._conversations, "a conversation without a request"

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting

    @property
    def num_live(self) -> int:
        return self._batcher.num_live

    def _take_news(self, wait_s: float) -> None:
        mail = self._inbox.take(wait_s)
        self._take_arrivals(mail.arrivals)
        for sequence in mail.cancelled:
            request = self._batcher.find(sequence)
            if request is not None and not request.is_over:
                self._end(request, RequestState.CANCELLED, FinishReason.CANCELLED)
                self._release_if_idle(request)

    def _take_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self._batcher.add(arrival.request)
            self._conversations[arrival.request.sequence] = arrival.conversation

    def _admit(self) -> None:
        while self._batcher.can_admit():
            self._batcher.admit()
            self._inbox.leave(1)

    def _view(self, request: Request) -> SequenceView:
        context_len = len(request.tokens)
        lag = self._proposer.draft_lag(request.sequence, context_len) if self._proposer else 0
        max_draft_len = max(0, min(request.max_draft_len, request.remaining - 1))
        return SequenceView(
            sequence=request.sequence,
            context_len=context_len,
            max_draft_len=max_draft_len,
            draft_lag=lag,
            remaining=request.remaining,
            accept_probs=self._acceptance.accept_probs(request.sequence, max_draft_len),
            policy=request.policy,
        )

    def _propose(self, ready: Sequence[Request], spec_plan: SpecPlan) -> dict[int, tuple[int, ...]]:
        """Drafts by sequence; only those that were planned more than 0."""
        chosen = [request for request in ready if spec_plan.draft_lens[request.sequence] > 0]
        if not chosen or self._proposer is None:
            return {}
        tasks = [
            DraftTask(r.sequence, r.tokens, spec_plan.draft_lens[r.sequence], r.sampling)
            for r in chosen
        ]
        drafts = self._proposer.propose(tasks)
        return {task.sequence: found for task, found in zip(tasks, drafts, strict=True)}

    def _decoding_work(
        self, ready: Iterable[Request], drafts: dict[int, tuple[int, ...]]
    ) -> Iterable[Work]:
        burst = self._target.capabilities.max_decode_tokens
        for request in ready:
            found = drafts.get(request.sequence)
            if found:
                yield Verify(request.sequence, found)
            else:
                yield Decode(request.sequence, min(burst, request.remaining))

    def _submit(self, work: Sequence[Work]) -> None:
        for item in work:
            request = self._batcher.find(item.sequence)
            assert request is not None
            request.is_in_flight = True
            if isinstance(item, Prefill):
                request.num_prefilled += len(item.tokens)
        self._target.submit(work)

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            request = self._batcher.find(event.sequence)
            assert request is not None, f"the target reports on unknown sequence {event.sequence}"
            request.is_in_flight = not event.is_last
            if not request.is_over:
                self._advance(request, event)
            self._release_if_idle(request)

    def _advance(self, request: Request, event: Event) -> None:
        """Take an event into a request that still runs."""
        if event.error is not None:
            message = f"the engine failed this request: {event.error}"
            self._end(request, RequestState.FAILED, None, (ErrorCode.INTERNAL, message))
            return
        if request.state is RequestState.PREFILLING:
            if event.tokens or event.finish is not None:
                request.move_to(RequestState.DECODING)
        else:
            self._observe(request, event)
        try:
            tokens, reason = self._keep(request, event)
        except Exception as error:
            message = f"its tokens are no text: {error}"
            self._end(request, RequestState.FAILED, None, (ErrorCode.INTERNAL, message))
            return
        request.tokens.extend(tokens)
        if reason is not None:
            self._end(request, RequestState.FINISHED, reason, tokens=tokens)
        elif tokens:
            self._post(Update(self._conversations[request.sequence], tokens, _progress(request)))

    def _observe(self, request: Request, event: Event) -> None:
        """Learn from a decoding event; `num_steps` counts each token of a burst as a step."""
        request.num_steps += 1 if event.num_drafted else len(event.tokens)
        request.num_drafted += event.num_drafted
        request.num_accepted += event.num_accepted
        self._acceptance.observe(request.sequence, event.num_drafted, event.num_accepted)
        if event.num_drafted and self._proposer is not None:
            self._proposer.observe(request.sequence, event.num_accepted)

    def _keep(self, request: Request, event: Event) -> tuple[list[int], FinishReason | None]:
        """The event's tokens up to the request's end, and the reason if it ended."""
        kept: list[int] = []
        for token in event.tokens:
            if token == request.sampling.end_token:
                return kept, FinishReason.STOP
            kept.append(token)
            if request.stops is not None:
                request.stops.push(token)
                if request.stops.is_stopped:
                    return kept, FinishReason.STOP
                request.stops.take()
            if len(kept) == request.remaining:
                return kept, FinishReason.LENGTH
        return kept, event.finish

    def _end(
        self,
        request: Request,
        state: RequestState,
        reason: FinishReason | None,
        error: tuple[ErrorCode, str] | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        """The request's last word; what it holds is freed when nothing of it is in flight."""
        was_waiting = request.state is RequestState.WAITING
        request.move_to(state)
        conversation = self._conversations.pop(request.sequence)
        self._post(Update(conversation, tokens, _progress(request), reason, error))
        if was_waiting:
            self._batcher.drop_waiting(request)
            self._inbox.leave(1)
        elif request.is_in_flight:
            self._target.cancel(request.sequence)

    def _release_if_idle(self, request: Request) -> None:
        """Free what an ended request holds, once nothing of it is in flight."""
        if not request.is_over or request.is_in_flight or not self._batcher.is_live(request):
            return
        if request.num_prefilled:
            self._target.release(request.sequence)
        if self._proposer is not None:
            self._proposer.release(request.sequence)
        self._acceptance.release(request.sequence)
        self._batcher.release(request)

    def _record(
        self,
        times: tuple[float, float, float, float],
        spec_plan: SpecPlan,
        prefills: Sequence[Prefill],
        events: Sequence[Event],
    ) -> None:
        if not events:
            return
        start, planned, proposed, applied = times
        decoding = [event for event in events if event.sequence in spec_plan.draft_lens]
        self.records.append(
            StepRecord(
                num_rows=len(spec_plan.draft_lens),
                num_prefill_tokens=sum(len(prefill.tokens) for prefill in prefills),
                num_drafted=sum(event.num_drafted for event in events),
                num_generated=sum(len(event.tokens) for event in events),
                plan_s=planned - start,
                draft_s=proposed - planned,
                target_s=max((event.pass_s for event in decoding), default=0.0),
                total_s=applied - start,
                plan=spec_plan,
            )
        )


def _progress(request: Request) -> Progress:
    return Progress(request.num_steps, request.num_drafted, request.num_accepted)
