"""The responder in its thread: one final response for each request, whatever happens."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import TOKENIZER, wait_until

from smartspec_py.core.types import FinishReason, PromptLogProbs, SpecMetrics, TokenLogProb
from smartspec_py.serving.messages import Progress, Reply, ResponseState, Update
from smartspec_py.serving.metrics import Meter, MetricSink, drop
from smartspec_py.serving.request import ErrorCode, GenerateParams
from smartspec_py.serving.responder import REFUSAL_DELAY_S, Responder
from smartspec_py.serving.text import TextStream
from smartspec_testing.local import LocalSink

WAIT_S = 10.0
HELLO = TOKENIZER.encode("hello world").ids
"""Five tokens: hel, lo, Ġw, or, ld."""


@dataclass
class Desk:
    """A responder, and the sequences that it asked to cancel."""

    watch: Callable[[], None] = lambda: None
    metrics: MetricSink = drop
    clock: Callable[[], float] = time.monotonic
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        meter = Meter("none", 0, "none")
        self.responder = Responder(
            self.cancelled.append, meter, self.metrics, self.clock, self.watch
        )

    def begin(
        self,
        sink: LocalSink,
        sequence: int = 1,
        *,
        stop_words: tuple[str, ...] = (),
        prompt: list[int] | None = None,
        no_speculation: str = "",
        **params: Any,
    ) -> int:
        """A request for a stream, unless params say otherwise."""
        text = TextStream(TOKENIZER, prompt or TOKENIZER.encode("x").ids, stop_words)
        asked = GenerateParams(**{"text": "", "max_tokens": 9, "stream": True} | params)
        state = ResponseState(sequence, sink, text, 5, 3, asked, 4, no_speculation)
        self.responder.post(state)
        return sequence

    def post(self, sequence: int, tokens: list[int], **fields: Any) -> None:
        self.responder.post(Update(sequence, tokens, **fields))

    def finish(self, sequence: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.responder.post(Update(sequence, finish_reason=reason))

    def fail(self, sequence: int) -> None:
        self.responder.post(Update(sequence, error=(ErrorCode.INTERNAL, "broken")))


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.responder.start()
    yield desk
    desk.responder.stop(WAIT_S)


@dataclass
class SlowSink(LocalSink):
    """Its first `send` lasts until `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)
    is_sending: threading.Event = field(default_factory=threading.Event)

    def send(self, reply: Reply) -> None:
        self.is_sending.set()
        assert self.gate.wait(WAIT_S)
        super().send(reply)


@dataclass
class BrokenSink(LocalSink):
    """Its client is gone: every call named in `broken` raises, after it was counted."""

    broken: tuple[str, ...] = ("send", "fail")
    calls: list[str] = field(default_factory=list)

    def send(self, reply: Reply) -> None:
        self._call("send")
        super().send(reply)

    def fail(self, code: ErrorCode, message: str) -> None:
        self._call("fail")
        super().fail(code, message)

    def is_cancelled(self) -> bool:
        self._call("is_cancelled")
        return super().is_cancelled()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise ConnectionError("the client is gone")


@pytest.mark.parametrize("stream", [True, False])
def test_text_tokens_and_end_of_a_request(desk: Desk, stream: bool) -> None:
    """Without streaming there is one response, which may have the prompt."""
    sink = LocalSink()
    desk.begin(sink, stream=stream, text="x", exclude_input=False)
    for count, token in enumerate(HELLO, start=1):
        desk.post(1, [token], progress=Progress(count))
    desk.responder.post(Update(1, (), Progress(5, num_cached=2), FinishReason.LENGTH))
    sink.wait(WAIT_S)
    assert sink.text == ("hello world" if stream else "xhello world")
    assert (sink.tokens, sink.num_finals) == (HELLO, 1)
    assert (sink.finish_reason, sink.seed) == (FinishReason.LENGTH, 5)
    assert sink.progress == Progress(5, num_cached=2)
    assert sink.last.num_input_tokens == 3


@pytest.mark.parametrize("first", ["finish", "fail", "cancel"])
@pytest.mark.parametrize("second", ["finish", "fail", "cancel", "tokens"])
@pytest.mark.parametrize("stream", [True, False])
def test_exactly_one_final(desk: Desk, first: str, second: str, stream: bool) -> None:
    """What comes after the final response is dropped."""
    sink = LocalSink()
    desk.begin(sink, stream=stream)
    say = {
        "finish": lambda: desk.finish(1),
        "fail": lambda: desk.fail(1),
        "cancel": lambda: desk.finish(1, FinishReason.CANCELLED),
        "tokens": lambda: desk.post(1, HELLO),
    }
    say[first]()
    sink.wait(WAIT_S)
    say[second]()
    desk.responder.stop(WAIT_S)
    assert sink.num_finals == 1
    assert len(sink.pieces) == (0 if first == "fail" else 1)


@pytest.mark.parametrize(("ending", "calls"), [("finish", ["send", "fail"]), ("fail", ["fail"])])
def test_a_final_that_cannot_be_sent_becomes_one_error_and_no_more(
    desk: Desk, ending: str, calls: list[str]
) -> None:
    broken, other = BrokenSink(), LocalSink()
    desk.begin(broken, stream=False)
    getattr(desk, ending)(1)
    desk.fail(1)
    desk.finish(desk.begin(other, 2))
    other.wait(WAIT_S)
    assert [call for call in broken.calls if call != "is_cancelled"] == calls


def test_a_stream_that_cannot_be_sent_is_cancelled_and_the_others_go_on(desk: Desk) -> None:
    broken, other = BrokenSink(), LocalSink()
    desk.begin(broken, 1)
    desk.begin(other, 2)
    desk.post(1, HELLO)
    desk.post(2, HELLO)
    wait_until(lambda: 1 in desk.cancelled)
    desk.finish(1, FinishReason.CANCELLED)
    desk.finish(2)
    other.wait(WAIT_S)
    assert other.text == "hello world"
    assert 2 not in desk.cancelled


@pytest.mark.parametrize("ends", [False, True])
def test_steps_are_merged_while_sending_is_slow(desk: Desk, ends: bool) -> None:
    """While the first piece is being sent, four more tokens come, and perhaps the end: they are
    one response."""
    sink = SlowSink()
    desk.begin(sink)
    desk.post(1, HELLO[:1])
    assert sink.is_sending.wait(WAIT_S)
    for token in HELLO[1:]:
        desk.post(1, [token])
    if ends:
        desk.finish(1)
    sink.gate.set()
    wait_until(lambda: sink.text == "hello world")
    assert sink.pieces == ["hel", "lo world"]
    assert sink.num_finals == ends


def test_a_client_that_leaves_is_noticed_without_any_message(desk: Desk) -> None:
    gone, here = LocalSink(is_gone=True), LocalSink()
    desk.begin(gone, 1)
    desk.begin(here, 2)
    wait_until(lambda: 1 in desk.cancelled)
    assert 2 not in desk.cancelled
    here.is_gone = True
    wait_until(lambda: 2 in desk.cancelled)


def test_many_open_requests_are_checked_in_turn() -> None:
    """A check takes 1.1 ms on a virtual clock. Three fit into the budget, so that 100 requests take
    34 turns, and each is checked once."""
    now, checked = [0.0], list[int]()

    @dataclass
    class Slow(LocalSink):
        number: int = 0

        def is_cancelled(self) -> bool:
            now[0] += 0.0011
            checked.append(self.number)
            return self.number == 50

    desk = Desk(clock=lambda: now[0])
    for number in range(100):
        desk.begin(Slow(number=number), number)
    for turn in range(1, 35):
        desk.finish(1000)  # of no request
        desk.responder._turn()
        assert len(checked) <= 3 * turn
        now[0] += 0.03
    assert sorted(checked) == list(range(100))
    assert desk.cancelled == [50]


def test_a_client_that_cannot_be_asked_does_not_affect_others(desk: Desk) -> None:
    """`is_cancelled` is a call into another process. It may raise, as every call of a sink."""
    broken, other = BrokenSink(broken=("is_cancelled",)), LocalSink()
    desk.begin(broken, 1)
    wait_until(lambda: 1 in desk.cancelled)
    desk.begin(other, 2)
    desk.post(2, HELLO)
    desk.finish(2)
    other.wait(WAIT_S)
    assert other.text == "hello world"


def test_what_is_queued_at_a_stop_is_sent_and_what_is_open_fails() -> None:
    desk = Desk()
    ended, begun, refused = LocalSink(), LocalSink(), LocalSink()
    desk.begin(ended, 1, stream=False)
    desk.begin(begun, 2)
    for token in HELLO:
        desk.post(1, [token])
    desk.finish(1)
    desk.responder.refuse(refused, ErrorCode.UNAVAILABLE, "full")
    desk.responder.start()
    desk.responder.stop(WAIT_S)
    assert (ended.text, ended.error) == ("hello world", None)
    assert begun.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert refused.error == (ErrorCode.UNAVAILABLE, "full")
    assert [sink.num_finals for sink in (ended, begun, refused)] == [1, 1, 1]


def test_a_refusal_is_delayed() -> None:
    """The delay keeps Triton 2.51 alive."""
    now = [5.0]
    desk, sink = Desk(clock=lambda: now[0]), LocalSink()
    desk.responder.refuse(sink, ErrorCode.INVALID_ARGUMENT, "no")
    desk.responder._turn()
    assert sink.error is None
    now[0] += 1.01 * REFUSAL_DELAY_S
    desk.responder._turn()
    assert (sink.error, sink.num_finals) == ((ErrorCode.INVALID_ARGUMENT, "no"), 1)


def test_tokens_that_are_no_text_fail_that_request_alone(desk: Desk) -> None:
    broken, whole = LocalSink(), LocalSink()
    for number, sink, tokens in ((1, broken, [10**12]), (2, whole, [5])):
        desk.begin(sink, number)
        desk.post(number, tokens, finish_reason=FinishReason.LENGTH)
    whole.wait(WAIT_S)
    assert broken.error is not None
    assert broken.num_finals == whole.num_finals == 1
    assert whole.error is None
    assert desk.cancelled == [1]


def test_each_reply_has_the_tokens_of_its_text(desk: Desk) -> None:
    """The euro sign has three tokens, which are one response. Log-probabilities are with their
    tokens."""
    sink = LocalSink()
    desk.begin(sink, return_log_probs=True)
    euro = TOKENIZER.encode("€").ids
    for count, token in enumerate([*euro, HELLO[0]], start=1):
        desk.post(1, [token], log_probs=[TokenLogProb(token, -0.5 * count)])
        wait_until(lambda count=count: len(sink.pieces) == max(0, count - 2))
    desk.finish(1)
    sink.wait(WAIT_S)
    assert sink.pieces[:2] == ["€", "hel"]
    assert [reply.tokens for reply in sink.replies[:2]] == [tuple(euro), (HELLO[0],)]
    assert sink.log_probs == [-0.5, -1.0, -1.5, -2.0]
    assert sink.last.cum_log_prob == -5.0


def test_log_probs_of_a_prompt_come_once(desk: Desk) -> None:
    """A preempted request reads its prompt again, then with its text. The first reply has those of
    all prompt tokens but the first, and later replies those of their own tokens."""
    sink = LocalSink()
    desk.begin(sink, prompt=HELLO[:3], num_token_log_probs=1)
    one, two, three = (TokenLogProb(t, -1.0 * t, ((t, -0.5),)) for t in (1, 2, 3))
    desk.post(1, [], prompt_log_probs=PromptLogProbs(1, (one,)))
    desk.post(1, [], prompt_log_probs=PromptLogProbs(1, (one, two)))
    desk.post(1, HELLO[3:4], log_probs=[three])
    desk.post(1, [], prompt_log_probs=PromptLogProbs(1, (one, two, three)))
    desk.post(1, HELLO[4:5], log_probs=[three])
    desk.finish(1)
    sink.wait(WAIT_S)
    assert sink.replies[0].prompt_log_probs == (one, two)
    assert [entry for reply in sink.replies[1:] for entry in reply.prompt_log_probs] == []
    assert [entry for reply in sink.replies for entry in reply.log_probs] == [three, three]


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_watch_is_called_while_requests_are_open(is_broken: bool) -> None:
    """An exception in it has no effect on requests."""
    num_calls = [0]

    def watch() -> None:
        num_calls[0] += 1
        if is_broken:
            raise ConnectionError("the server does not answer")

    desk, sink = Desk(watch=watch), LocalSink()
    desk.responder.start()
    desk.begin(sink)
    wait_until(lambda: num_calls[0] >= 2)
    desk.post(1, HELLO, finish_reason=FinishReason.LENGTH)
    sink.wait(WAIT_S)
    desk.responder.stop(WAIT_S)
    assert sink.text == "hello world"


def test_metrics_that_fail_are_disabled_and_requests_go_on() -> None:
    num_calls = [0]

    def broken(name: str, labels: object, value: float) -> None:
        num_calls[0] += 1
        raise ConnectionError("no metrics today")

    desk = Desk(metrics=broken)
    desk.responder.start()
    for number in (1, 2):
        sink = LocalSink()
        desk.begin(sink, number)
        desk.post(number, HELLO, finish_reason=FinishReason.LENGTH)
        sink.wait(WAIT_S)
        wait_until(lambda: num_calls[0] == 1)
    desk.responder.stop(WAIT_S)


@pytest.mark.parametrize("stops", [False, True])
def test_metrics_that_are_due_with_a_message(stops: bool) -> None:
    """They are shown, and no sink is held afterwards: Triton unloads no model while somebody holds
    a sender. At a stop they are not shown, because Triton answers no call of a model that it
    finalizes."""
    shown, now = list[str](), [0.0]
    desk = Desk(metrics=lambda name, labels, value: shown.append(name), clock=lambda: now[0])
    desk.responder.start()
    wait_until(lambda: bool(shown))  # all counters are shown once, at 0
    num_shown = len(shown)
    sink = LocalSink()
    last = weakref.ref(sink)
    if not stops:
        now[0] = 100.0  # nothing wakes the responder up after the message
    desk.begin(sink)
    desk.post(1, HELLO, finish_reason=FinishReason.LENGTH)
    sink.wait(WAIT_S)
    if stops:
        now[0] = 100.0
        desk.responder.stop(WAIT_S)
        assert len(shown) == num_shown
        return
    wait_until(lambda: len(shown) > num_shown)
    del sink
    wait_until(lambda: last() is None)
    desk.responder.stop(WAIT_S)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_stop_word_ends_the_text_and_the_request(desk: Desk, is_last: bool) -> None:
    """The loop is told to stop, unless it has. Tokens after the stop word are not in the text."""
    sink = LocalSink()
    desk.begin(
        sink,
        stop_words=("o w",),
        stream=False,
        spec_metrics=SpecMetrics.DETAILED,
        no_speculation="it cannot",
    )
    log_probs = [-1.0, -2.0, -3.0, -4.0, -5.0]
    reason = FinishReason.LENGTH if is_last else None
    progress = Progress(1, 4, 4)
    scored = [TokenLogProb(t, value) for t, value in zip(HELLO, log_probs, strict=True)]
    desk.post(1, HELLO, progress=progress, finish_reason=reason, log_probs=scored, end_token=7)
    desk.post(1, HELLO, progress=Progress(2, 8, 8), finish_reason=FinishReason.CANCELLED)
    sink.wait(WAIT_S)
    desk.responder.stop(WAIT_S)
    assert sink.text == "hell"
    assert sink.tokens == HELLO[:3]
    assert sink.log_probs == log_probs[:3]
    assert (sink.finish_reason, sink.progress) == (FinishReason.STOP, progress)
    assert sink.drawn == HELLO[:3], "what ended it is no end token"
    assert '"per_step_drafted":[4]' in sink.last.spec_metrics
    assert sink.last.no_speculation == "it cannot"
    assert desk.cancelled == ([] if is_last else [1])
