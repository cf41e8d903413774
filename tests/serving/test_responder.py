"""The responder: one final response for each request, whatever happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import TOKENIZER, wait_until

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import FinishReason, PromptLogProbs, SpecMetrics, TokenLogProb
from smartspec_py.serving.messages import Progress, Reply, ResponseState, Update
from smartspec_py.serving.metrics import Meter, MetricSink, drop
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.responder import CANCEL_CHECK_S, REFUSAL_DELAY_S, Claim, Responder
from smartspec_py.serving.text import TextStream
from smartspec_testing.local import LocalSink

WAIT_S = 60.0
HELLO = TOKENIZER.encode("hello world").ids
"""Five tokens: hel, lo, Ġw, or, ld."""


@dataclass
class Desk:
    """A responder on a virtual clock, and the sequences that it asked to cancel.

    Without `responder.start`, only `turn` processes messages.
    """

    watch: Callable[[], None] = lambda: None
    metrics: MetricSink = drop
    now: float = 0.0
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        meter = Meter("none", 0, "none")
        self.responder = Responder(
            self.cancelled.append, meter, self.metrics, lambda: self.now, self.watch
        )

    def turn(self, after_s: float = 0.0) -> None:
        """Process all messages, `after_s` later."""
        self.now += after_s
        self.finish(1000)  # of no request, so that the turn does not wait
        self.responder._turn()

    def begin(
        self,
        sink: LocalSink,
        sequence: int = 1,
        *,
        stop_words: tuple[str, ...] = (),
        prompt: list[int] | None = None,
        no_speculation: str = "",
        **params: Any,
    ) -> None:
        """A request for a stream, unless params say otherwise."""
        text = TextStream(TOKENIZER, prompt or TOKENIZER.encode("x").ids, stop_words)
        asked = GenerateParams(**{"text": "", "max_tokens": 9, "stream": True} | params)
        common = Reply(asked, seed=5, num_input_tokens=3, no_speculation=no_speculation)
        self.responder.post(ResponseState(sequence, sink, text, common, 4))

    def post(self, sequence: int, tokens: list[int], **fields: Any) -> None:
        self.responder.post(Update(sequence, tokens, **fields))

    def finish(self, sequence: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.post(sequence, [], finish_reason=reason)

    def fail(self, sequence: int) -> None:
        self.post(sequence, [], error=(ErrorCode.INTERNAL, "broken"))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@dataclass
class BrokenSink(LocalSink):
    """Its client is gone: every call named in `broken` raises, after it was counted."""

    broken: tuple[str, ...] = ("send", "fail")
    calls: list[str] = field(default_factory=list)

    def send(self, reply: Reply) -> None:
        self._call("send")

    def fail(self, code: ErrorCode, message: str) -> None:
        self._call("fail")

    def is_cancelled(self) -> bool:
        return "is_cancelled" in self.broken and self._call("is_cancelled")

    def _call(self, name: str) -> bool:
        self.calls.append(name)
        raise ConnectionError("the client is gone")


def test_a_request_is_open_from_the_moment_that_it_is_posted(desk: Desk) -> None:
    """A drain ends when none is open, also while the responder is busy."""
    sink = LocalSink()
    assert desk.responder.num_open == 0
    desk.begin(sink)
    assert desk.responder.num_open == 1
    desk.turn()
    assert desk.responder.num_open == 1
    desk.finish(1)
    desk.turn()
    assert desk.responder.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_text_tokens_and_end_of_a_request(desk: Desk, stream: bool) -> None:
    """Without streaming there is one response, which may have the prompt."""
    sink = LocalSink()
    desk.begin(sink, stream=stream, text="x", exclude_input=False)
    for count, token in enumerate(HELLO, start=1):
        desk.post(1, [token], progress=Progress(count))
        desk.turn()
    desk.post(1, [], progress=Progress(5, num_cached=2), finish_reason=FinishReason.LENGTH)
    desk.turn()
    assert sink.num_acceptances == 1
    assert sink.text == ("hello world" if stream else "xhello world")
    assert len(sink.pieces) == (6 if stream else 1)
    assert (sink.tokens, sink.num_finals) == (HELLO, 1)
    assert (sink.finish_reason, sink.seed) == (FinishReason.LENGTH, 5)
    assert sink.progress == Progress(5, num_cached=2)
    assert sink.last.num_input_tokens == 3


@pytest.mark.parametrize("first", ["finish", "fail"])
@pytest.mark.parametrize("second", ["finish", "fail", "tokens"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_later", [True, False])
def test_exactly_one_final(
    desk: Desk, first: str, second: str, stream: bool, is_later: bool
) -> None:
    """What comes after the final response is dropped."""
    sink = LocalSink()
    desk.begin(sink, stream=stream)
    say: dict[str, Callable[[], None]] = {
        "finish": lambda: desk.finish(1, FinishReason.CANCELLED),
        "fail": lambda: desk.fail(1),
        "tokens": lambda: desk.post(1, HELLO),
    }
    say[first]()
    if is_later:
        desk.turn()
    say[second]()
    desk.turn()
    assert sink.num_finals == 1
    assert len(sink.pieces) == (0 if first == "fail" else 1)


@pytest.mark.parametrize(
    ("ending", "broken", "calls"),
    [
        ("finish", ("send", "fail"), ["send", "fail"]),
        ("fail", ("send", "fail"), ["fail"]),
        ("stream", ("send", "fail"), ["send"]),
        ("leave", ("is_cancelled",), ["is_cancelled"]),
    ],
)
def test_a_client_that_cannot_be_reached_does_not_affect_others(
    desk: Desk, ending: str, broken: tuple[str, ...], calls: list[str]
) -> None:
    """A final response that cannot be sent becomes one error and no more. A stream that cannot be
    sent, and a client that cannot be asked, are cancelled."""
    gone, other = BrokenSink(broken=broken), LocalSink()
    desk.begin(gone, 1)
    desk.begin(other, 2)
    {
        "finish": lambda: desk.finish(1),
        "fail": lambda: desk.fail(1),
        "stream": lambda: desk.post(1, HELLO),
        "leave": lambda: None,
    }[ending]()
    desk.post(2, HELLO)
    desk.turn()
    assert desk.cancelled == ([] if ending in ("finish", "fail") else [1])
    desk.finish(2)
    desk.turn()
    assert gone.calls == calls
    assert (other.text, other.num_finals) == ("hello world", 1)


@pytest.mark.parametrize("ends", [False, True])
def test_steps_are_merged_while_sending_is_slow(desk: Desk, ends: bool) -> None:
    """Four tokens that come while the first is sent, and perhaps the end, are one response."""
    sink = LocalSink()
    desk.begin(sink)
    desk.post(1, HELLO[:1])
    desk.turn()
    for token in HELLO[1:]:
        desk.post(1, [token])
    if ends:
        desk.finish(1)
    desk.turn()
    assert sink.pieces == ["hel", "lo world"]
    assert sink.num_finals == ends


def test_many_open_requests_are_checked_in_turn(desk: Desk) -> None:
    """A check takes 1.1 ms. Three fit into the budget, so that 100 requests take 34 turns, and each
    is checked once."""
    checked: list[int] = []

    @dataclass
    class Slow(LocalSink):
        number: int = 0

        def is_cancelled(self) -> bool:
            desk.now += 0.0011
            checked.append(self.number)
            return self.number == 50

    for number in range(100):
        desk.begin(Slow(number=number), number)
    for turn in range(1, 35):
        desk.turn(CANCEL_CHECK_S)
        assert len(checked) <= 3 * turn
    assert sorted(checked) == list(range(100))
    assert desk.cancelled == [50]


def test_what_is_queued_at_a_stop_is_sent_and_what_is_open_fails(desk: Desk) -> None:
    ended, begun, refused = LocalSink(), LocalSink(), LocalSink()
    desk.begin(ended, 1, stream=False)
    desk.begin(begun, 2)
    desk.post(1, HELLO)
    desk.finish(1)
    desk.responder.refuse(refused, ErrorCode.UNAVAILABLE, "full")
    desk.responder.start()
    desk.responder.stop(WAIT_S)
    assert (ended.text, ended.error) == ("hello world", None)
    assert begun.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert refused.error == (ErrorCode.UNAVAILABLE, "full")
    assert [sink.num_finals for sink in (ended, begun, refused)] == [1, 1, 1]


def test_a_claim_is_taken_once(desk: Desk) -> None:
    """By whoever answers first: another thread, the deadline, a disconnect, the stop."""
    sinks = [LocalSink() for _ in range(4)]
    claims = [
        Claim(sink, due_s, "late") for sink, due_s in zip(sinks, (5.0, 5.0, 9.0, 9.0), strict=True)
    ]
    for claim in claims:
        desk.responder.hold(claim)
    assert claims[0].take()
    desk.turn(4.9)
    assert [sink.num_finals for sink in sinks] == [0, 0, 0, 0]
    sinks[2].is_gone = True
    desk.turn(0.2)
    assert desk.responder.num_open == 1
    desk.responder.start()
    desk.responder.stop(WAIT_S)
    assert [sink.num_finals for sink in sinks] == [0, 1, 1, 1]
    reasons = ["late", "the client has disconnected", "the server is shutting down"]
    assert [sink.error for sink in sinks[1:]] == [(ErrorCode.UNAVAILABLE, r) for r in reasons]
    assert [claim.take() for claim in claims] == [False] * 4


def test_a_refusal_is_delayed(desk: Desk) -> None:
    """The delay keeps Triton 2.51 alive."""
    sink = LocalSink()
    desk.responder.refuse(sink, ErrorCode.INVALID_ARGUMENT, "no")
    desk.turn()
    assert sink.error is None
    desk.turn(1.01 * REFUSAL_DELAY_S)
    assert (sink.error, sink.num_finals) == ((ErrorCode.INVALID_ARGUMENT, "no"), 1)


def test_tokens_that_are_no_text_fail_that_request_alone(desk: Desk) -> None:
    broken, whole = LocalSink(), LocalSink()
    for number, sink, tokens in ((1, broken, [10**12]), (2, whole, [5])):
        desk.begin(sink, number)
        desk.post(number, tokens, finish_reason=FinishReason.LENGTH)
    desk.turn()
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
        desk.turn()
    desk.finish(1)
    desk.turn()
    assert sink.pieces == ["€", "hel", ""]
    assert [reply.tokens for reply in sink.replies] == [tuple(euro), (HELLO[0],), ()]
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
    desk.turn()
    desk.post(1, [], prompt_log_probs=PromptLogProbs(1, (one, two, three)))
    desk.post(1, HELLO[4:5], log_probs=[three])
    desk.finish(1)
    desk.turn()
    assert [reply.prompt_log_probs for reply in sink.replies] == [(one, two), ()]
    assert [reply.log_probs for reply in sink.replies] == [(three,), (three,)]


def test_the_watch_is_called_while_requests_are_open_and_may_fail() -> None:
    num_calls = [0]

    def watch() -> None:
        num_calls[0] += 1
        raise ConnectionError("the server does not answer")

    desk, sink = Desk(watch=watch), LocalSink()
    desk.turn()
    assert num_calls == [0]
    desk.begin(sink)
    for _ in range(3):
        desk.turn(CANCEL_CHECK_S)
    desk.post(1, HELLO, finish_reason=FinishReason.LENGTH)
    desk.turn()
    assert (num_calls, sink.text) == ([3], "hello world")


def test_metrics_that_fail_are_disabled_and_requests_go_on() -> None:
    num_calls = [0]

    def broken(*metric: object) -> None:
        num_calls[0] += 1
        raise ConnectionError("no metrics today")

    desk = Desk(metrics=broken)
    for number in (1, 2):
        sink = LocalSink()
        desk.begin(sink, number)
        desk.post(number, HELLO, finish_reason=FinishReason.LENGTH)
        desk.turn(100.0)
        assert (num_calls, sink.num_finals) == ([1], 1)


@pytest.mark.parametrize("call", ["add_request", "add_rejection"])
def test_a_request_that_cannot_be_counted_is_answered(
    call: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Meter, call, fails)
    finished, failed, refused = sinks = [LocalSink() for _ in range(3)]
    desk.begin(finished, 1)
    desk.begin(failed, 2)
    desk.finish(1)
    desk.fail(2)
    desk.responder.refuse(refused, ErrorCode.UNAVAILABLE, "full")
    desk.turn(REFUSAL_DELAY_S)
    assert [sink.num_finals for sink in sinks] == [1] * 3
    assert finished.error is None


@pytest.mark.parametrize("stops", [False, True])
def test_metrics_that_are_due_with_a_message(stops: bool) -> None:
    """They are shown, and no sink is held afterwards: Triton unloads no model while somebody holds
    a sender. At a stop they are not shown, because Triton answers no call of a model that it
    finalizes."""
    shown: list[object] = []
    desk = Desk(metrics=lambda *metric: shown.append(metric))
    desk.turn()  # all counters are shown once, at 0
    num_shown, sink = len(shown), LocalSink()
    last = weakref.ref(sink)
    desk.begin(sink)
    desk.post(1, HELLO, finish_reason=FinishReason.LENGTH)
    desk.now = 100.0
    if stops:
        desk.responder._queue.put([None])
        assert not desk.responder._turn()
        assert (sink.num_finals, len(shown)) == (1, num_shown)
        return
    desk.responder.start()
    wait_until(lambda: len(shown) > num_shown)
    del sink
    wait_until(lambda: last() is None)
    desk.responder.stop(WAIT_S)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_stop_word_ends_the_text_and_the_request(desk: Desk, is_last: bool) -> None:
    """The loop is told to stop, unless it has. Tokens after the stop word are not in the text, and
    drafts accepted there are not counted."""
    sink = LocalSink()
    wanted = {"spec_metrics": SpecMetrics.DETAILED, "no_speculation": "it cannot"}
    desk.begin(sink, stop_words=("o w",), stream=False, **wanted)
    reason = FinishReason.LENGTH if is_last else None
    progress, verified = Progress(1, 4, 4), {"num_drafted": 4, "num_accepted": 4}
    scored = [TokenLogProb(token, -0.5) for token in HELLO]
    desk.post(
        1, HELLO, progress=progress, finish_reason=reason, log_probs=scored, end_token=7, **verified
    )
    desk.post(1, HELLO, progress=Progress(2, 8, 8), finish_reason=FinishReason.CANCELLED)
    desk.turn()
    assert sink.text == "hell"
    assert sink.tokens == sink.drawn == HELLO[:3], "what ended it is no end token"
    assert sink.log_probs == [-0.5] * 3
    assert (sink.finish_reason, sink.progress) == (FinishReason.STOP, Progress(1, 4, 3))
    assert '"per_step_accepted":[3],"per_step_drafted":[4]' in sink.last.spec_metrics
    assert sink.last.no_speculation == "it cannot"
    assert desk.cancelled == ([] if is_last else [1])
