"""Every request from its arrival to its last word: what moves requests from state to state.

`take`, `expire`, `admit`, `submit` and `apply` move requests, through the batcher where one changes
its place; each request ends with exactly one last `Update` for the responder. What it holds in the
engines is freed in one place, when nothing of it is in flight. Beside this, only the drafters write
to a request: who drafts for it, and how well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smartspec_py.core.types import FinishReason, SequenceId
from smartspec_py.engines.base import Event, Prefill, Target, Work
from smartspec_py.serving.admission import CacheBudget, CacheLedger, victims
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.drafters import Drafters
from smartspec_py.serving.inbox import Inbox, Mail
from smartspec_py.serving.messages import (
    SHUTTING_DOWN,
    Conversation,
    Outcome,
    Progress,
    Times,
    Update,
)
from smartspec_py.serving.request import ErrorCode, Request, RequestState

Error = tuple[ErrorCode, str]


class EngineStalledError(RuntimeError):
    """The target engine answers nothing of work that it was given."""


@dataclass(frozen=True, slots=True)
class Arrival:
    request: Request
    conversation: Conversation


class Roster:
    """Owned by the loop thread."""

    def __init__(
        self,
        target: Target,
        drafters: Drafters,
        batcher: Batcher,
        budget: CacheBudget,
        inbox: Inbox[Arrival],
        post: Callable[[Update], None],
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._drafters = drafters
        self.batcher = batcher
        self.cache = CacheLedger(budget, drafters)
        self._inbox = inbox
        self._post = post
        self._clock = clock
        self._conversations: dict[int, Conversation] = {}
        self.num_preemptions = 0
        self.num_generated = 0
        """Tokens that requests kept, so far; not those behind their end."""

    def take(self, mail: Mail[Arrival]) -> None:
        for arrival in mail.arrivals:
            self.batcher.add(arrival.request)
            self._conversations[arrival.request.sequence] = arrival.conversation
        for sequence in mail.cancelled:
            request = self.batcher.find(sequence)
            if request is not None and not request.is_over:
                self._end(request, RequestState.CANCELLED, FinishReason.CANCELLED)
                self._release_if_idle(request)

    def expire(self) -> None:
        """End the requests whose deadline has passed: with what they have, or as unavailable."""
        now = self._clock()
        for request in (*self.batcher.waiting, *self.batcher.live):
            if request.deadline_s is None or now < request.deadline_s or request.is_over:
                continue
            error = None
            if not request.num_generated:
                allowed_ms = 1e3 * (request.deadline_s - request.arrival_s)
                message = f"deadline_ms: {allowed_ms:.0f} ms passed before the first token"
                error = (ErrorCode.UNAVAILABLE, message)
            reason = None if error else FinishReason.DEADLINE
            self._end(request, RequestState.EXPIRED, reason, error)
            self._release_if_idle(request)

    def check_engine(self, timeout_s: float) -> None:
        """Raises EngineStalledError where nothing came for timeout_s of work in flight."""
        now = self._clock()
        for request in self.batcher.live:
            if request.is_in_flight and now - request.engine_s > timeout_s:
                raise EngineStalledError(
                    f"the target engine gave no event of request {request.sequence} "
                    f"for {timeout_s:g} s, which is limits.engine_timeout_s"
                )

    def admit(self) -> None:
        """Give rows and cache to the waiting, by rank, as far as they reach."""
        if self.cache.is_tight(self.batcher.live):
            self._make_room()
        while (request := self.batcher.first_waiting()) is not None:
            if not self._has_room(request, self.batcher.live):
                self._preempt_for(request)
            if not self._has_room(request, self.batcher.live):
                break
            self._begin(request)
            self._drop_drafts()

    def _has_room(self, request: Request, live: Sequence[Request]) -> bool:
        return self.batcher.num_rows > len(live) and self.cache.fits(live, request)

    def _preempt_for(self, request: Request) -> None:
        """Preempt those of lower priority, if that is enough."""
        live = self.batcher.live
        for count, victim in enumerate(losers := victims(live, request), start=1):
            live.remove(victim)
            if self._has_room(request, live):
                for loser in losers[:count]:
                    self._preempt(loser)
                return

    def _make_room(self) -> None:
        """What requests have grown to must fit; see `serving.admission`."""
        while self.cache.overflows(self.batcher.live):
            idle = [request for request in self.batcher.live if not request.is_in_flight]
            if not idle:
                return  # an engine with work in flight is asked again after its events
            self._preempt(max(idle, key=lambda request: request.rank))
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for request in self.cache.drafts_to_drop(self.batcher.live):
            self._drafters.drop_cache(request)

    def _preempt(self, request: Request) -> None:
        self._target.release(request.sequence)
        self._drafters.drop_cache(request)
        self.batcher.preempt(request)
        self.num_preemptions += 1

    def _begin(self, request: Request) -> None:
        if request.scheduled_s is None:
            self._inbox.leave(1)
        self.batcher.admit(request)
        request.num_to_read = len(request.tokens)
        request.num_read = self._target.begin(
            request.sequence,
            request.tokens,
            request.num_prompt,
            request.sampling,
            request.reuses_prefix,
        )
        if request.scheduled_s is None:
            request.scheduled_s = self._clock()
            request.num_cached = request.num_read

    def submit(self, work: Sequence[Work]) -> None:
        """Give the step's work to the target."""
        now = self._clock()
        for item in work:
            request = self._known(item.sequence)
            request.is_in_flight, request.engine_s = True, now
            if isinstance(item, Prefill):
                request.num_read += len(item.tokens)
        self._target.submit(work)

    def apply(self, events: Sequence[Event]) -> None:
        found = [(self._known(event.sequence), event) for event in events]
        self._drafters.observe([pair for pair in found if _is_step(*pair)])
        now = self._clock()
        for request, event in found:
            request.is_in_flight, request.engine_s = not event.is_last, now
            if not request.is_over:
                self._advance(request, event)
            if request.is_over:
                self._release_if_idle(request)

    def cancel_all(self) -> None:
        """Those that generate get what they have as their last response, the others an error."""
        for request in (*self.batcher.waiting, *self.batcher.live):
            if request.is_over:
                continue
            error = None if request.num_generated else (ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
            reason = None if error else FinishReason.CANCELLED
            self._end(request, RequestState.CANCELLED, reason, error)
            self._release_if_idle(request)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Give every request that is left its final response. The engines are not used again."""
        self.take(Mail(self._inbox.take(0.0).arrivals, ()))
        for sequence, conversation in self._conversations.items():
            request = self.batcher.find(sequence)
            if request is not None and not request.is_over:
                request.move_to(RequestState.FAILED)
                self._post(Update(conversation, error=(code, message), outcome=_outcome(request)))
        self._conversations.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, conversations and what is held do not agree."""
        live = self.batcher.live
        self._drafters.check_integrity((*self.batcher.waiting, *live))
        open_requests = [r for r in (*self.batcher.waiting, *live) if not r.is_over]
        assert {r.sequence for r in open_requests} == self._conversations.keys(), (
            "requests and conversations do not agree"
        )
        assert len(live) <= self.batcher.num_rows, "more requests than rows"

    def _known(self, sequence: SequenceId) -> Request:
        request = self.batcher.find(sequence)
        assert request is not None, f"the target reports on unknown sequence {sequence}"
        return request

    def _advance(self, request: Request, event: Event) -> None:
        """Take an event into a request that still runs."""
        if event.error is not None:
            message = f"the engine failed this request: {event.error}"
            self._end(request, RequestState.FAILED, None, (ErrorCode.INTERNAL, message))
            return
        if request.state is RequestState.DECODING:
            self._count_step(request, event)
        elif event.tokens or event.finish is not None:
            request.move_to(RequestState.DECODING)
            self._drafters.read_prompt(request, event)
        try:
            tokens, reason = _keep(request, event)
        except Exception as error:
            message = f"its tokens are no text: {error}"
            self._end(request, RequestState.FAILED, None, (ErrorCode.INTERNAL, message))
            return
        self._extend(request, tokens)
        log_probs = event.log_probs[: len(tokens)]
        if reason is not None:
            self._end(request, RequestState.FINISHED, reason, None, tokens, log_probs)
        elif tokens:
            conversation = self._conversations[request.sequence]
            self._post(Update(conversation, tokens, _progress(request), log_probs=log_probs))

    def _count_step(self, request: Request, event: Event) -> None:
        """`num_steps` counts each token of a burst as a step."""
        request.num_steps += 1 if event.num_drafted else len(event.tokens)
        request.num_drafted += event.num_drafted
        request.num_accepted += event.num_accepted
        request.spec.add(event.num_drafted, event.num_accepted)

    def _extend(self, request: Request, tokens: Sequence[int]) -> None:
        if tokens:
            request.last_token_s = self._clock()
            if request.first_token_s is None:
                request.first_token_s = request.last_token_s
        self.num_generated += len(tokens)
        request.tokens.extend(tokens)

    def _end(
        self,
        request: Request,
        state: RequestState,
        reason: FinishReason | None,
        error: Error | None = None,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] = (),
    ) -> None:
        """The request's last word; what it holds is freed when nothing of it is in flight."""
        was_waiting = request.state is RequestState.WAITING
        request.move_to(state)
        conversation = self._conversations.pop(request.sequence)
        progress, outcome = _progress(request), _outcome(request)
        self._post(Update(conversation, tokens, progress, reason, error, log_probs, outcome))
        if was_waiting:
            self.batcher.drop_waiting(request)
            self._drafters.release(request)
            if request.scheduled_s is None:
                self._inbox.leave(1)
        elif request.is_in_flight:
            self._target.cancel(request.sequence)

    def _release_if_idle(self, request: Request) -> None:
        """Free what an ended request holds, once nothing of it is in flight."""
        if not request.is_over or request.is_in_flight or not self.batcher.is_live(request):
            return
        self._target.release(request.sequence)
        self._drafters.release(request)
        self.batcher.release(request)


def _is_step(request: Request, event: Event) -> bool:
    """Whether it is a decoding step, which tells of acceptance."""
    return request.state is RequestState.DECODING and event.error is None


def _keep(request: Request, event: Event) -> tuple[Sequence[int], FinishReason | None]:
    """The event's tokens up to the request's end, and the reason if it ended."""
    num_before_end = request.sampling.num_before_end(event.tokens)
    tokens = event.tokens[: min(num_before_end, request.remaining)]
    if request.stops is not None:
        for count, token in enumerate(tokens, start=1):
            request.stops.push(token)
            if request.stops.is_stopped:
                return tokens[:count], FinishReason.STOP
            request.stops.take()
    if len(tokens) == request.remaining:
        return tokens, FinishReason.LENGTH
    if num_before_end < len(event.tokens):
        request.end_token = event.tokens[num_before_end]
        return tokens, FinishReason.STOP
    return tokens, event.finish


def _progress(request: Request) -> Progress:
    return Progress(request.num_steps, request.num_drafted, request.num_accepted)


def _outcome(request: Request) -> Outcome:
    return Outcome(
        num_generated=request.num_generated,
        num_cached_tokens=request.num_cached,
        end_token=request.end_token,
        times=Times(
            _ns(request.arrival_s),
            _ns(request.scheduled_s),
            _ns(request.first_token_s),
            _ns(request.last_token_s),
        ),
        spec=request.spec,
    )


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)
