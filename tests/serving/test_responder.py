"""The responder in its thread: one final response for each request, whatever happens."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import TOKENIZER

from smartspec_py.core.types import FinishReason, PromptLogProbs, SpecMetrics, TokenLogProb
from smartspec_py.serving.messages import Progress, Reply, ResponseState, Times, Update
from smartspec_py.serving.metrics import ConfigInfo, Meter, MetricSink, NoMetrics
from smartspec_py.serving.request import ErrorCode, GenerateParams
from smartspec_py.serving.responder import REFUSAL_DELAY_S, Responder
from smartspec_py.serving.text import TextStream
from smartspec_testing.local import LocalSink

WAIT_S = 10.0
HELLO = TOKENIZER.encode("hello world").ids
"""Five tokens: hel, lo, Ġw, or, ld."""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def make_responder(
    cancel: Callable[[int], None] = lambda sequence: None,
    watch: Callable[[], None] = lambda: None,
    metrics: MetricSink | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Responder:
    meter = Meter(ConfigInfo("none", 0, "none"))
    return Responder(cancel, meter, metrics or NoMetrics(), clock, watch)


@dataclass
class Counted(NoMetrics):
    """calls: of `increment`, by the name of the counter."""

    calls: list[str]

    def increment(self, name: str, labels: object, by: float) -> None:
        self.calls.append(name)


@dataclass
class Desk:
    """A running responder, and the sequences that it asked to cancel."""

    responder: Responder
    cancelled: list[int]
    progress: Progress = field(default_factory=Progress)

    def talk(self, sink: LocalSink, sequence: int = 1, **options: Any) -> ResponseState:
        response = talk(sink, sequence, **options)
        self.responder.post(response)
        return response

    def post(self, response: ResponseState, tokens: list[int], num_steps: int = 1) -> None:
        self.progress = Progress(num_steps)
        self.responder.post(Update(response.sequence, tokens, self.progress))

    def finish(self, response: ResponseState, reason: FinishReason = FinishReason.STOP) -> None:
        self.responder.post(Update(response.sequence, (), self.progress, reason))

    def fail(self, response: ResponseState) -> None:
        self.responder.post(Update(response.sequence, error=(ErrorCode.INTERNAL, "broken")))


@pytest.fixture
def desk() -> Iterator[Desk]:
    cancelled: list[int] = []
    responder = make_responder(cancelled.append)
    responder.start()
    yield Desk(responder, cancelled)
    responder.stop(WAIT_S)


def talk(
    sink: LocalSink, sequence: int = 1, *, is_streaming: bool = True, echo: str = ""
) -> ResponseState:
    text = TextStream(TOKENIZER, TOKENIZER.encode("x").ids)
    params = GenerateParams(echo, 1, stream=is_streaming, exclude_input=not echo)
    return ResponseState(sequence, sink, text, 5, 3, params)


def begin(
    responder: Responder, sink: LocalSink, sequence: int = 1, *, is_streaming: bool = True
) -> None:
    responder.post(talk(sink, sequence, is_streaming=is_streaming))


@dataclass
class SlowSink(LocalSink):
    """Its first `send` lasts until `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)
    is_sending: threading.Event = field(default_factory=threading.Event)

    def send(self, reply: Reply, is_final: bool) -> None:
        self.is_sending.set()
        assert self.gate.wait(WAIT_S)
        super().send(reply, is_final)


@dataclass
class BrokenSink(LocalSink):
    """Its client is gone: every call named in `broken` raises, after it was counted."""

    broken: tuple[str, ...] = ("send", "fail")
    calls: list[str] = field(default_factory=list)

    def send(self, reply: Reply, is_final: bool) -> None:
        self._call("send-final" if is_final else "send-piece", "send")
        super().send(reply, is_final)

    def fail(self, code: ErrorCode, message: str) -> None:
        self._call("fail", "fail")
        super().fail(code, message)

    def is_cancelled(self) -> bool:
        self._call("is_cancelled", "is_cancelled")
        return super().is_cancelled()

    def _call(self, name: str, kind: str) -> None:
        self.calls.append(name)
        if kind in self.broken:
            raise ConnectionError("the client is gone")


def test_a_stream_and_its_final(desk: Desk) -> None:
    sink = LocalSink()
    response = desk.talk(sink, echo="x")
    for count, token in enumerate(HELLO, start=1):
        desk.post(response, [token], num_steps=count)
    desk.finish(response, FinishReason.LENGTH)
    sink.wait(WAIT_S)
    assert sink.text == "hello world", "a stream has no prompt"
    assert (sink.num_tokens, sink.num_finals) == (5, 1)
    assert (sink.finish_reason, sink.seed) == (FinishReason.LENGTH, 5)
    assert sink.progress == Progress(num_steps=5)


def test_without_streaming_there_is_one_response(desk: Desk) -> None:
    sink = LocalSink()
    response = desk.talk(sink, is_streaming=False, echo="x")
    for token in HELLO:
        desk.post(response, [token])
    desk.finish(response)
    sink.wait(WAIT_S)
    assert sink.pieces == ["xhello world"]
    assert sink.num_tokens == 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (first, second)
        for first in ("finish", "fail", "cancel")
        for second in ("finish", "fail", "cancel", "tokens")
    ],
)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_exactly_one_final(desk: Desk, first: str, second: str, is_streaming: bool) -> None:
    """What comes behind the last word is dropped."""
    sink = LocalSink()
    response = desk.talk(sink, is_streaming=is_streaming)
    say = {
        "finish": lambda: desk.finish(response),
        "fail": lambda: desk.fail(response),
        "cancel": lambda: desk.finish(response, FinishReason.CANCELLED),
        "tokens": lambda: desk.post(response, HELLO),
    }
    say[first]()
    sink.wait(WAIT_S)
    say[second]()
    desk.responder.stop(WAIT_S)
    assert sink.num_finals == 1
    assert len(sink.pieces) == (0 if first == "fail" else 1)


@pytest.mark.parametrize(
    ("ending", "calls"), [("finish", ["send-final", "fail"]), ("fail", ["fail"])]
)
def test_a_final_that_cannot_be_sent_becomes_one_error_and_no_more(
    desk: Desk, ending: str, calls: list[str]
) -> None:
    broken = BrokenSink()
    response = desk.talk(broken, is_streaming=False)
    other = LocalSink()
    getattr(desk, ending)(response)
    desk.fail(response)
    desk.finish(desk.talk(other, 2))
    other.wait(WAIT_S)
    assert [call for call in broken.calls if call != "is_cancelled"] == calls


def test_a_stream_that_cannot_be_sent_is_cancelled_and_the_others_go_on(desk: Desk) -> None:
    broken, other = BrokenSink(), LocalSink()
    response = desk.talk(broken, 1)
    neighbour = desk.talk(other, 2)
    desk.post(response, HELLO)
    desk.post(neighbour, HELLO)
    wait_until(lambda: 1 in desk.cancelled)
    desk.finish(response, FinishReason.CANCELLED)
    desk.finish(neighbour)
    other.wait(WAIT_S)
    assert other.text == "hello world"
    assert 2 not in desk.cancelled
    assert broken.calls.count("send-final") == 1


def test_steps_are_merged_while_sending_lags(desk: Desk) -> None:
    """The first piece is being sent while four more come: they leave as one."""
    sink = SlowSink()
    response = desk.talk(sink)
    desk.post(response, HELLO[:1])
    assert sink.is_sending.wait(WAIT_S)
    for token in HELLO[1:]:
        desk.post(response, [token])
    sink.gate.set()
    wait_until(lambda: sink.text == "hello world")
    assert sink.pieces == ["hel", "lo world"]
    desk.finish(response)
    sink.wait(WAIT_S)
    assert sink.num_tokens == 5


def test_text_and_end_that_come_together_are_one_response(desk: Desk) -> None:
    sink = SlowSink()
    response = desk.talk(sink)
    desk.post(response, HELLO[:1])
    assert sink.is_sending.wait(WAIT_S)
    desk.post(response, HELLO[1:])
    desk.finish(response)
    sink.gate.set()
    sink.wait(WAIT_S)
    assert sink.pieces == ["hel", "lo world"]


def test_held_back_tokens_are_counted_with_the_text_they_become(desk: Desk) -> None:
    """The three tokens of the euro sign leave as one response of three tokens."""
    sink = LocalSink()
    response = desk.talk(sink)
    for token in TOKENIZER.encode("€").ids:
        desk.post(response, [token])
    wait_until(lambda: sink.text == "€")
    assert (sink.pieces, sink.num_tokens) == (["€"], 3)
    desk.finish(response)
    sink.wait(WAIT_S)


def test_a_client_that_leaves_is_noticed_without_any_message(desk: Desk) -> None:
    """Within 30 ms by design; the limit here is that of a loaded machine."""
    gone, here = LocalSink(is_gone=True), LocalSink()
    desk.talk(gone, 1)
    desk.talk(here, 2)
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

    cancelled = list[int]()
    responder = make_responder(cancelled.append, clock=lambda: now[0])
    for number in range(100):
        begin(responder, Slow(number=number), number)
    for turn in range(1, 35):
        responder.answer(lambda: None)
        responder._turn()
        assert len(checked) <= 3 * turn
        now[0] += 0.03
    assert sorted(checked) == list(range(100))
    assert cancelled == [50]


def test_a_request_that_is_over_is_asked_no_more(desk: Desk) -> None:
    sink = BrokenSink(broken=())
    response = desk.talk(sink)
    wait_until(lambda: "is_cancelled" in sink.calls)
    desk.finish(response)
    sink.wait(WAIT_S)
    num_calls = len(sink.calls)
    time.sleep(0.1)
    assert len(sink.calls) == num_calls


def test_a_client_that_cannot_be_asked_takes_nobody_down(desk: Desk) -> None:
    """`is_cancelled` is a call into another process: it may raise, as every call of a sink may."""
    broken, other = BrokenSink(broken=("is_cancelled",)), LocalSink()
    desk.talk(broken, 1)
    wait_until(lambda: "is_cancelled" in broken.calls)
    neighbour = desk.talk(other, 2)
    desk.post(neighbour, HELLO)
    desk.finish(neighbour)
    other.wait(1.0)
    assert other.text == "hello world"


def test_what_is_open_when_it_stops_is_failed() -> None:
    responder = make_responder()
    responder.start()
    sinks = [LocalSink(), LocalSink()]
    begin(responder, sinks[0], 1)
    responder.post(Update(1, HELLO))
    begin(responder, sinks[1], 2)
    responder.stop(WAIT_S)
    for sink in sinks:
        assert sink.num_finals == 1
        assert sink.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")


def test_what_is_queued_when_it_stops_is_sent() -> None:
    responder = make_responder()
    sink = LocalSink()
    begin(responder, sink, is_streaming=False)
    for token in HELLO:
        responder.post(Update(1, [token]))
    responder.post(Update(1, finish_reason=FinishReason.LENGTH))
    responder.start()
    responder.stop(WAIT_S)
    assert (sink.text, sink.num_finals, sink.error) == ("hello world", 1, None)


def test_a_refusal_is_sent_from_the_responders_thread_and_late() -> None:
    """Not before the delay that keeps Triton 2.51 alive, and also when it stops meanwhile."""
    responder = make_responder()
    responder.start()
    first, second = LocalSink(), LocalSink()
    start = time.monotonic()
    responder.refuse(first, ErrorCode.INVALID_ARGUMENT, "no")
    first.wait(WAIT_S)
    assert time.monotonic() - start >= REFUSAL_DELAY_S
    responder.refuse(second, ErrorCode.UNAVAILABLE, "full")
    responder.stop(WAIT_S)
    assert first.error == (ErrorCode.INVALID_ARGUMENT, "no")
    assert second.error == (ErrorCode.UNAVAILABLE, "full")
    assert first.num_finals == second.num_finals == 1


def test_tokens_that_are_no_text_fail_that_request_alone() -> None:
    cancelled: list[int] = []
    responder = make_responder(cancelled.append)
    responder.start()
    broken, whole = LocalSink(), LocalSink()
    for number, sink, tokens in ((1, broken, [10**12]), (2, whole, [5])):
        text = TextStream(TOKENIZER, [1])
        params = GenerateParams("", 1, stream=True)
        response = ResponseState(number, sink, text, 1, 1, params)
        responder.post(response)
        responder.post(Update(number, tokens, finish_reason=FinishReason.LENGTH))
    whole.wait(WAIT_S)
    responder.stop(WAIT_S)
    assert broken.error is not None
    assert broken.num_finals == whole.num_finals == 1
    assert whole.error is None
    assert cancelled == [1]


def test_every_reply_says_which_tokens_its_text_is_of(desk: Desk) -> None:
    """Held back tokens come with the text they become; log-probabilities with their tokens."""
    sink = LocalSink()
    params = GenerateParams("", 9, stream=True, return_log_probs=True)
    text = TextStream(TOKENIZER, TOKENIZER.encode("x").ids)
    response = ResponseState(1, sink, text, 5, 3, params)
    desk.responder.post(response)
    euro = TOKENIZER.encode("€").ids
    for count, token in enumerate([*euro, HELLO[0]], start=1):
        desk.responder.post(Update(1, [token], log_probs=[TokenLogProb(token, -0.5 * count)]))
    desk.finish(response)
    sink.wait(WAIT_S)
    assert sink.text == "€hel"
    assert sink.tokens == [*euro, HELLO[0]]
    assert sink.log_probs == [-0.5, -1.0, -1.5, -2.0]
    assert response.cum_log_prob == -5.0


def test_log_probs_of_a_prompt_come_once(desk: Desk) -> None:
    """A preempted request reads its prompt again, then with its text. The first reply has those of
    all prompt tokens but the first, and later replies those of their own tokens."""
    sink = LocalSink()
    params = GenerateParams("", 9, stream=True, num_token_log_probs=1, return_output_ids=True)
    text = TextStream(TOKENIZER, HELLO[:3])
    desk.responder.post(response := ResponseState(1, sink, text, 5, 3, params))
    one, two, three = (TokenLogProb(t, -1.0 * t, ((t, -0.5),)) for t in (1, 2, 3))
    desk.responder.post(Update(1, prompt_log_probs=PromptLogProbs(1, (one,))))
    desk.responder.post(Update(1, prompt_log_probs=PromptLogProbs(1, (one, two))))
    desk.responder.post(Update(1, HELLO[3:4], log_probs=[three]))
    desk.responder.post(Update(1, prompt_log_probs=PromptLogProbs(1, (one, two, three))))
    desk.responder.post(Update(1, HELLO[4:5], log_probs=[three]))
    desk.finish(response)
    sink.wait(WAIT_S)
    documents = [json.loads(each) for each in sink.documents]
    assert [each.get("prompt") for each in documents if "prompt" in each] == [
        [[1, -1.0, [[1, -0.5]]], [2, -2.0, [[2, -0.5]]]]
    ]
    assert "prompt" in documents[0]
    outputs = [entry for each in documents for entry in each.get("output", [])]
    assert outputs == [[3, -3.0, [[3, -0.5]]]] * 2
    assert sink.output_ids == HELLO[3:5]


def test_the_last_reply_alone_has_the_summary(desk: Desk) -> None:
    @dataclass
    class Keeping(LocalSink):
        replies: list[Reply] = field(default_factory=list)

        def send(self, reply: Reply, is_final: bool) -> None:
            self.replies.append(reply)
            super().send(reply, is_final)

    sink = Keeping()
    params = GenerateParams("", 9, stream=True, return_perf_metrics=True)
    text = TextStream(TOKENIZER, TOKENIZER.encode("x").ids)
    response = ResponseState(1, sink, text, 5, 3, params, no_speculation="it cannot")
    desk.responder.post(response)
    desk.post(response, HELLO)
    wait_until(lambda: bool(sink.replies))
    end = Update(
        1,
        (),
        desk.progress,
        FinishReason.LENGTH,
        times_s=(1.0, 2.0, None, 4.0),
        num_cached_tokens=2,
    )
    desk.responder.post(end)
    sink.wait(WAIT_S)
    first, last = sink.replies
    assert (first.summary, first.finish_reason, first.num_input_tokens) == (None, None, 0)
    assert last.summary is not None
    assert last.num_input_tokens == 3
    assert last.summary.num_cached_tokens == 2
    assert (first.times, last.times) == (Times(), Times(10**9, 2 * 10**9, 0, 4 * 10**9))
    assert last.summary.no_speculation == "it cannot"


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_watch_is_asked_while_requests_are_open(is_broken: bool) -> None:
    """Also one that raises is asked again, and takes nobody down."""
    num_calls = [0]

    def watch() -> None:
        num_calls[0] += 1
        if is_broken:
            raise ConnectionError("the server does not answer")

    responder = make_responder(watch=watch)
    responder.start()
    sink = LocalSink()
    begin(responder, sink)
    wait_until(lambda: num_calls[0] >= 2)
    responder.post(Update(1, HELLO, finish_reason=FinishReason.LENGTH))
    sink.wait(WAIT_S)
    assert sink.text == "hello world"
    responder.stop(WAIT_S)


def test_metrics_that_cannot_be_handed_over_take_nobody_down() -> None:
    """They are tried once; the second request is answered as well."""
    num_calls = [0]

    class Broken(NoMetrics):
        def increment(self, name: str, labels: object, by: float) -> None:
            num_calls[0] += 1
            raise ConnectionError("no metrics today")

    responder = make_responder(metrics=Broken())
    responder.start()
    for number in (1, 2):
        sink = LocalSink()
        begin(responder, sink, number)
        responder.post(Update(number, HELLO, finish_reason=FinishReason.LENGTH, times_s=(1.0,)))
        sink.wait(WAIT_S)
        assert sink.text == "hello world"
        wait_until(lambda: num_calls[0] == 1)
    responder.stop(WAIT_S)


def test_on_the_way_out_nothing_is_asked_of_triton() -> None:
    """It answers no call of a model that it finalizes: metrics that are due then are not shown."""
    calls, now = list[str](), [0.0]
    responder = make_responder(metrics=Counted(calls), clock=lambda: now[0])
    responder.start()
    wait_until(lambda: bool(calls))  # all counters are shown once, at 0
    shown = len(calls)
    sink = LocalSink()
    begin(responder, sink)
    responder.post(Update(1, HELLO, finish_reason=FinishReason.LENGTH, times_s=(1.0,)))
    sink.wait(WAIT_S)
    now[0] = 100.0
    responder.stop(WAIT_S)
    assert len(calls) == shown


def test_an_idle_responder_holds_no_sink() -> None:
    """A sink holds Triton's sender, and Triton unloads no model while somebody holds one."""
    shown, now = list[str](), [0.0]
    responder = make_responder(metrics=Counted(shown), clock=lambda: now[0])
    responder.start()
    wait_until(lambda: bool(shown))  # all counters are shown once, at 0
    now[0] = (
        100.0  # metrics are due with the message itself, so that nothing wakes it up afterwards
    )
    sink = LocalSink()
    last = weakref.ref(sink)
    num_shown = len(shown)
    begin(responder, sink)
    responder.post(Update(1, HELLO, finish_reason=FinishReason.LENGTH, times_s=(1.0,)))
    sink.wait(WAIT_S)
    wait_until(lambda: len(shown) > num_shown)
    del sink
    wait_until(lambda: last() is None)
    responder.stop(WAIT_S)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_stop_word_ends_the_text_and_the_request(desk: Desk, is_last: bool) -> None:
    """The loop is told to stop, unless it has; what it generated beyond is no part of the text."""
    sink = LocalSink()
    text = TextStream(TOKENIZER, TOKENIZER.encode("x").ids, ("o w",))
    params = GenerateParams("", 9, return_log_probs=True, spec_metrics=SpecMetrics.DETAILED)
    desk.responder.post(ResponseState(1, sink, text, 5, 3, params, max_draft_len=4))
    log_probs = [-1.0, -2.0, -3.0, -4.0, -5.0]
    reason = FinishReason.LENGTH if is_last else None
    progress = Progress(1, 4, 4)
    scored = [TokenLogProb(t, value) for t, value in zip(HELLO, log_probs, strict=True)]
    desk.responder.post(Update(1, HELLO, progress, reason, log_probs=scored, end_token=7))
    desk.responder.post(Update(1, HELLO, Progress(2, 8, 8), FinishReason.CANCELLED))
    sink.wait(WAIT_S)
    desk.responder.stop(WAIT_S)
    assert sink.text == "hell"
    assert sink.tokens == HELLO[:3]
    assert sink.log_probs == log_probs[:3]
    assert (sink.finish_reason, sink.progress) == (FinishReason.STOP, progress)
    assert sink.drawn == HELLO[:3], "what ended it is no end token"
    assert sink.summary is not None
    assert '"per_step_drafted":[4]' in sink.summary.spec_metrics
    assert desk.cancelled == ([] if is_last else [1])
