"""The lifecycle of requests: moves them from state to state, from arrival to their last update.

Each request ends with exactly one last `Update` for the responder. When a live request has ended
and none of its work is in flight, `_release` frees its engine resources.

What is done for one request goes through `_alone`: an exception there fails this request, and the
others continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from smartspec_py.api.errors import field_text
from smartspec_py.constants import GUIDE_FIELD
from smartspec_py.core.types import FinishReason
from smartspec_py.engines.base import Event, Prefill, Target, Work
from smartspec_py.engines.host_time import Cause
from smartspec_py.faults import ENDS, sentence
from smartspec_py.serving.admission import CacheBudget, CacheLedger, can_yield, victims
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.inbox import Inbox, Messages
from smartspec_py.serving.messages import SHUTTING_DOWN, Progress, Update
from smartspec_py.serving.request import ErrorCode, Request, RequestState, late_message
from smartspec_py.serving.speculation import Speculation

logger = logging.getLogger(__name__)

MOST_HOST_S = 0.05
"""Time of the processor that grammar and shaping of a request may take of each step."""

MOST_DEAR_STEPS = 16
"""A request ends that took more in so many steps in a row, without drafts and while there were
others."""

BOUNDED = {Cause.GRAMMAR: GUIDE_FIELD, Cause.SHAPING: "bad_words"}
"""The causes that are bounded, and the field that is usually to blame. Log-probabilities of a
prompt are not bounded: like its passes, they take longer with more tokens."""


class EngineStalledError(RuntimeError):
    """The target engine returns no events for submitted work."""


class Lifecycle:
    """Owned by the loop thread."""

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        batcher: Batcher,
        budget: CacheBudget,
        inbox: Inbox,
        post: Callable[[Update], None],
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._speculation = speculation
        self.batcher = batcher
        self.cache = CacheLedger(budget, speculation, target)
        self._inbox = inbox
        self._post = post
        self._clock = clock
        self.num_preemptions = 0
        self.num_generated = 0
        """Tokens added to requests so far, without tokens after the end of a request."""

        self.host_s: dict[str, float] = dict.fromkeys(Cause, 0.0)
        """Seconds so far of the work for single requests beside passes."""

    def take(self, messages: Messages) -> None:
        for request in messages.arrivals:
            self.batcher.add(request)
        for sequence in messages.cancelled:
            cancelled = self.batcher.find(sequence)
            if cancelled is not None and not cancelled.is_over:
                self._alone(cancelled, self._end, finish_reason=FinishReason.CANCELLED)

    def expire(self) -> None:
        """End requests whose deadline has passed.

        A request without tokens fails with UNAVAILABLE. The others return the text so far.
        """
        now = self._clock()
        for request in self.batcher:
            if request.deadline_s is not None and now >= request.deadline_s:
                message = late_message(1e3 * (request.deadline_s - request.arrival_s))
                self._alone(request, self._cut, FinishReason.DEADLINE, message)

    def check_engine(self, timeout_s: float) -> None:
        """Raises EngineStalledError if work is in flight and no event arrived for timeout_s."""
        now = self._clock()
        for request in self.batcher.live.values():
            if request.is_in_flight and now - request.engine_s > timeout_s:
                raise EngineStalledError(
                    f"the target engine returned no event of request {request.sequence} "
                    f"for {timeout_s:g} s, which is limits.engine_timeout_s"
                )

    def admit(self) -> None:
        """Admit waiting requests by rank, while rows and cache are available."""
        if self.cache.is_tight(self._live()):
            self._make_room()
        while self.batcher.waiting:
            request = self.batcher.waiting[0]
            if not self._has_room(request, self._live()):
                self._preempt_for(request)
            if not self._has_room(request, self._live()):
                break
            self._alone(request, self._begin)
            self._drop_drafts()

    def _live(self) -> list[Request]:
        return list(self.batcher.live.values())

    def _has_room(
        self, request: Request, live: Sequence[Request], preempted: Sequence[Request] = ()
    ) -> bool:
        has_row = self.batcher.max_batch_size > len(live)
        return has_row and self.cache.fits(live, request, preempted)

    def _preempt_for(self, request: Request) -> None:
        """Preempt requests of lower priority, if that makes enough room for this request."""
        live = self._live()
        for count, victim in enumerate(losers := victims(live, request), start=1):
            live.remove(victim)
            if self._has_room(request, live, losers[:count]):
                for loser in losers[:count]:
                    self._take_from(loser)
                return

    def _make_room(self) -> None:
        """Preempt requests until the live requests fit the budget; see `serving.admission`."""
        while self.cache.overflows(self._live()):
            candidates = [request for request in self.batcher.live.values() if can_yield(request)]
            if not candidates:
                return  # only prompts are in flight: try again after their events
            last = max(candidates, key=lambda request: request.rank)
            self._take_from(last)
            if last.is_in_flight:
                return
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for request in self.cache.drafts_to_drop(self._live()):
            self._alone(request, self._speculation.drop_cache)

    def _take_from(self, request: Request) -> None:
        """Preempt a request. If its work is in flight, cancel it; a later step then preempts it."""
        if request.is_in_flight:
            self._alone(request, self._cancel_work)
        else:
            self._alone(request, self._preempt)

    def _cancel_work(self, request: Request) -> None:
        self._target.cancel(request.sequence)

    def _preempt(self, request: Request) -> None:
        self._target.release(request.sequence)
        self._speculation.drop_cache(request)
        del self.batcher.live[request.sequence]
        request.move_to(RequestState.WAITING)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.batcher.add(request)

    def _begin(self, request: Request) -> None:
        num_cached = self._target.begin(request.start)
        self.batcher.admit(request)
        request.move_to(RequestState.PREFILLING)
        request.has_begun = False
        request.num_prefill_tokens, request.num_computed_tokens = len(request.tokens), num_cached
        if request.scheduled_s is None:
            self._inbox.leave()
            request.scheduled_s = self._clock()
            request.num_cached = num_cached

    def find_prefixes(self) -> None:
        """Look again for cached prefixes of requests whose prefill has not begun: others that begin
        the same may have been read since."""
        for request in self._live():
            if request.state is RequestState.PREFILLING and not request.has_begun:
                self._alone(request, self._find_prefix)

    def _find_prefix(self, request: Request) -> None:
        num_cached = self._target.find_more(request.sequence)
        if num_cached is not None:
            request.num_computed_tokens = num_cached
            if not request.num_preemptions:
                request.num_cached = num_cached

    def submit(self, work: Sequence[Work]) -> None:
        """Give the step's work to the target."""
        now = self._clock()
        for item in work:
            request = self.batcher.live[item.sequence]
            request.is_in_flight, request.engine_s = True, now
            if isinstance(item, Prefill):
                request.num_computed_tokens += len(item.tokens)
                request.has_begun = True
        self._target.submit(work)

    def steps_of(self, events: Sequence[Event]) -> list[tuple[Request, Event]]:
        """The events that requests get, each with its request."""
        steps = [(self.batcher.live[event.sequence], event) for event in events]
        return [step for step in steps if not step[0].is_over and step[1].failure is None]

    def apply(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            request = self.batcher.live[event.sequence]
            request.is_in_flight, request.engine_s = not event.is_last, now
            if not request.is_over:
                self._alone(request, self._advance, event)
                self._alone(request, self._charge)
            elif event.is_last:
                self._alone(request, self._release)

    def cancel_all(self) -> None:
        """End all requests. Those with tokens return the text so far, the others an error."""
        for request in self.batcher:
            self._alone(request, self._cut, FinishReason.CANCELLED, SHUTTING_DOWN)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Fail all remaining requests. The engines are not used again."""
        self.take(Messages(self._inbox.take(0.0).arrivals, ()))
        for request in self.batcher:
            if not request.is_over:
                request.move_to(RequestState.ENDED)
                self._post(_update(request, error=(code, message)))

    def check_integrity(self) -> None:
        """Raise AssertionError if held resources and known requests do not match."""
        self._speculation.check_integrity(self.batcher)
        assert len(self.batcher.live) <= self.batcher.max_batch_size, "more requests than rows"

    def _alone(
        self, request: Request, act: Callable[..., object], *arguments: Any, **named: Any
    ) -> None:
        """Do something for one request. After an exception, this request fails."""
        try:
            act(request, *arguments, **named)
        except ENDS:
            raise
        except BaseException as error:
            logger.exception("request %d fails", request.sequence)
            self._give_up(request, error)

    def _give_up(self, request: Request, cause: BaseException) -> None:
        """End a request after an exception. Its answer is sent before its resources are freed."""
        if request.is_over:
            return
        try:
            self._end(
                request, error=(ErrorCode.INTERNAL, f"this request failed: {sentence(cause)}")
            )
        except ENDS:
            raise
        except BaseException:
            logger.exception("request %d: not all of its resources are free", request.sequence)

    def _advance(self, request: Request, event: Event) -> None:
        """Apply an event to a request that has not ended."""
        if event.failure is not None:
            why, field = event.failure
            code, message = ErrorCode.INTERNAL, f"the engine failed this request: {why}"
            if field:
                code, message = ErrorCode.INVALID_ARGUMENT, field_text(field, why)
            logger.warning("request %d: %s", request.sequence, message)
            self._end(request, error=(code, message))
            return
        if request.state is RequestState.DECODING:
            request.num_steps += 1 if event.num_drafted else len(event.tokens)
            request.num_drafted += event.num_drafted
        elif event.tokens or event.finish is not None:
            request.move_to(RequestState.DECODING)
        tokens, reason, end_token = _keep(request, event)
        num_accepted = min(event.num_accepted, len(tokens))
        request.num_accepted += num_accepted
        if tokens:
            request.last_token_s = self._clock()
            if request.first_token_s is None:
                request.first_token_s = request.last_token_s
        self.num_generated += len(tokens)
        request.tokens.extend(tokens)
        kept: dict[str, Any] = {
            "tokens": tokens,
            "num_drafted": event.num_drafted,
            "num_accepted": num_accepted,
            "log_probs": event.log_probs[: len(tokens)],
            "prompt_log_probs": event.prompt_log_probs,
        }
        if reason is not None:
            self._end(request, finish_reason=reason, end_token=end_token, **kept)
        elif tokens or event.prompt_log_probs:
            self._post(_update(request, **kept))

    def _charge(self, request: Request) -> None:
        """Count the work for the request beside the pass. If it costs the others too much for many
        steps, the request has no more drafts, each of which needs a mask of its own; if it costs
        too much without, it ends."""
        host_s = request.host_time.take()
        for cause, seconds in host_s.items():
            self.host_s[cause] += seconds
        bounded = {cause: host_s.get(cause, 0.0) for cause in BOUNDED}
        is_dear = sum(bounded.values()) > MOST_HOST_S and len(self.batcher.live) > 1
        request.num_dear_steps = request.num_dear_steps + 1 if is_dear else 0
        if request.num_dear_steps < MOST_DEAR_STEPS or request.is_over:
            return
        if request.num_drafted and request.max_draft_len:
            request.max_draft_len = request.num_dear_steps = 0
            return
        field = BOUNDED[max(bounded, key=bounded.__getitem__)]
        why = (
            f"takes {1e3 * sum(bounded.values()):.0f} ms of each step of all requests, must take "
            f"at most {1e3 * MOST_HOST_S:.0f} ms: use a simpler value"
        )
        failed = ErrorCode.INVALID_ARGUMENT, field_text(field, why)
        self._alone(request, self._end, error=failed)

    def _cut(self, request: Request, reason: FinishReason, otherwise: str) -> None:
        """End a request early: with its text so far, or with UNAVAILABLE if it has no tokens.

        otherwise: the error message.
        """
        if request.is_over:
            return
        if request.num_generated:
            self._end(request, finish_reason=reason)
        else:
            self._end(request, error=(ErrorCode.UNAVAILABLE, otherwise))

    def _end(self, request: Request, **last: Any) -> None:
        """End the request and post its last update. last: fields of the `Update`.

        If its work is in flight, `apply` frees its resources after the last event.
        """
        was_waiting = request.state is RequestState.WAITING
        update = _update(request, **last)
        request.move_to(RequestState.ENDED)
        self._post(update)
        if was_waiting:
            self.batcher.waiting.remove(request)
            if request.scheduled_s is None:
                self._inbox.leave()
            self._speculation.release(request)
        elif request.is_in_flight:
            self._target.cancel(request.sequence)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Free all resources of a live request, whatever fails."""
        with ExitStack() as stack:
            stack.callback(self.batcher.live.pop, request.sequence)
            stack.callback(self._speculation.release, request)
            stack.callback(self._target.release, request.sequence)


def _keep(request: Request, event: Event) -> tuple[Sequence[int], FinishReason | None, int | None]:
    """The event's tokens up to the request's end, the finish reason if any, and the end token."""
    num_before_end = request.sampling.num_before_end(event.tokens)
    remaining = request.remaining
    tokens = event.tokens[: min(num_before_end, remaining)]
    if len(tokens) == remaining:
        return tokens, FinishReason.LENGTH, None
    if num_before_end < len(event.tokens):
        return tokens, FinishReason.STOP, event.tokens[num_before_end]
    return tokens, event.finish, None


def _update(request: Request, **fields: Any) -> Update:
    """An `Update` with the request's progress and these fields."""
    return Update(
        request.sequence,
        progress=Progress(
            num_steps=request.num_steps,
            num_drafted=request.num_drafted,
            num_accepted=request.num_accepted,
            proposer=request.proposer,
            num_cached=request.num_cached,
            arrival_s=request.arrival_s,
            scheduled_s=request.scheduled_s,
            first_token_s=request.first_token_s,
            last_token_s=request.last_token_s,
        ),
        **fields,
    )
