"""The inbox: bounded, refuses at once, and wakes whoever waits."""

import threading
import time

import pytest

from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.request import ErrorCode, RequestError


def refusal(inbox: Inbox) -> str:
    with pytest.raises(RequestError) as caught:
        inbox.put("refused")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    return str(caught.value)


def test_mail_comes_in_order_and_once() -> None:
    inbox: Inbox = Inbox(10)
    inbox.put("a")
    inbox.put("b")
    inbox.cancel(7)
    messages = inbox.take(0.0)
    assert (messages.arrivals, messages.cancelled) == (("a", "b"), (7,))
    messages = inbox.take(0.0)
    assert (messages.arrivals, messages.cancelled) == ((), ())


def test_a_full_queue_refuses_and_says_how_full() -> None:
    inbox: Inbox = Inbox(2)
    inbox.put("a")
    inbox.put("b")
    assert "2 requests are waiting, limits.max_queue is 2" in refusal(inbox)
    assert inbox.take(0.0).arrivals == ("a", "b")


def test_taken_requests_wait_until_they_leave() -> None:
    """What the loop took but has no row for still fills the queue."""
    inbox: Inbox = Inbox(2)
    inbox.put("a")
    inbox.put("b")
    inbox.take(0.0)
    refusal(inbox)
    inbox.leave(1)
    inbox.put("c")
    refusal(inbox)


def test_a_closed_inbox_refuses_with_its_first_reason_and_keeps_its_mail() -> None:
    inbox: Inbox = Inbox(2)
    inbox.put("a")
    assert not inbox.is_closed
    inbox.close("the loop died")
    inbox.close("shutting down")
    assert inbox.is_closed
    assert refusal(inbox) == "the loop died"
    assert inbox.take(60.0).arrivals == ("a",)


def test_an_inbox_that_refuses_still_runs_and_hands_over_its_mail() -> None:
    """Draining: what was taken goes on, cancels come through, and closing keeps the reason."""
    inbox: Inbox = Inbox(2)
    inbox.put("a")
    inbox.refuse("draining")
    inbox.refuse("again")
    assert refusal(inbox) == "draining"
    assert not inbox.is_closed
    inbox.cancel(3)
    messages = inbox.take(0.0)
    assert (messages.arrivals, messages.cancelled) == (("a",), (3,))
    inbox.close("over")
    assert inbox.is_closed
    assert refusal(inbox) == "draining"


@pytest.mark.parametrize("wake", ["put", "cancel", "close"])
def test_messages_wake_the_one_that_waits(wake: str) -> None:
    inbox: Inbox = Inbox(2)
    messages = {
        "put": lambda: inbox.put("a"),
        "cancel": lambda: inbox.cancel(1),
        "close": lambda: inbox.close("over"),
    }
    waiting = threading.Timer(0.02, messages[wake])
    waiting.start()
    start = time.monotonic()
    inbox.take(30.0)
    assert time.monotonic() - start < 10.0
    waiting.join()


def test_many_threads_fill_it_to_the_brim_and_no_further() -> None:
    """8 threads try 50 each; exactly 100 get in, and each of those comes out once."""
    inbox: Inbox = Inbox(100)
    num_refused = [0] * 8

    def put_all(worker: int) -> None:
        for i in range(50):
            try:
                inbox.put(worker * 50 + i)
            except RequestError:
                num_refused[worker] += 1

    threads = [threading.Thread(target=put_all, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(num_refused) == 300
    assert len(set(inbox.take(0.0).arrivals)) == 100


def test_a_call_is_handed_over_once_however_full_the_queue_is() -> None:
    inbox: Inbox = Inbox(1)
    inbox.put("a")
    made: list[str | None] = []
    inbox.call(made.append)
    (call,) = inbox.take(0.0).calls
    assert (inbox.take(0.0).calls, made) == ((), [])
    call(None)
    assert made == [None]


def test_calls_that_nobody_took_are_made_when_it_closes() -> None:
    """With the reason; after that there are none."""
    inbox: Inbox = Inbox(1)
    made: list[str | None] = []
    inbox.call(made.append)
    inbox.close("the loop died")
    assert made == ["the loop died"]
    with pytest.raises(RequestError, match="the loop died"):
        inbox.call(made.append)
    assert made == ["the loop died"]


def test_it_tells_for_how_long_nobody_took_anything() -> None:
    now = 5.0
    inbox: Inbox = Inbox(1, lambda: now)
    assert inbox.unread_s == 0.0
    inbox.take(0.0)
    now = 7.5
    assert inbox.unread_s == 2.5
