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


def test_messages_come_in_order_and_once() -> None:
    inbox = Inbox(10)
    inbox.put("a")
    inbox.put("b")
    inbox.cancel(7)
    assert inbox.take(0.0)[:2] == (("a", "b"), (7,))
    assert inbox.take(0.0)[:2] == ((), ())


def test_taken_requests_wait_until_they_leave() -> None:
    """What the loop took but has no row for still fills the queue."""
    inbox = Inbox(2)
    inbox.put("a")
    inbox.put("b")
    assert "2 requests are waiting, limits.max_queue is 2" in refusal(inbox)
    assert inbox.take(0.0).arrivals == ("a", "b")
    refusal(inbox)
    inbox.leave()
    inbox.put("c")
    refusal(inbox)


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_inbox_that_refuses_hands_over_what_it_has(is_closed: bool) -> None:
    """With its first reason, also after it is closed."""
    inbox = Inbox(2)
    inbox.put("a")
    for reason in ("draining", "again"):
        (inbox.close if is_closed else inbox.refuse)(reason)
        assert refusal(inbox) == "draining"
    assert inbox.is_closed is is_closed
    inbox.cancel(3)
    assert inbox.take(60.0)[:2] == (("a",), (3,))
    inbox.close("over")
    assert refusal(inbox) == "draining"


@pytest.mark.parametrize("wake", ["put", "cancel", "close"])
def test_messages_wake_the_one_that_waits(wake: str) -> None:
    inbox = Inbox(2)
    waiting = threading.Timer(0.02, getattr(inbox, wake), [1])
    waiting.start()
    start = time.monotonic()
    inbox.take(30.0)
    assert time.monotonic() - start < 10.0
    waiting.join()


def test_many_threads_fill_it_and_no_further() -> None:
    """8 threads try 50 each; exactly 100 get in, and each of those comes out once."""
    inbox = Inbox(100)
    refused: list[int] = []

    def put_all(worker: int) -> None:
        for i in range(50):
            try:
                inbox.put(worker * 50 + i)
            except RequestError:
                refused.append(i)

    threads = [threading.Thread(target=put_all, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 300
    assert len(set(inbox.take(0.0).arrivals)) == 100


def test_a_call_runs_once_however_full_the_queue_is() -> None:
    """Whoever takes it runs it. If nobody did, `close` runs it with the reason."""
    inbox = Inbox(1)
    inbox.put("a")
    made: list[str | None] = []
    inbox.call(made.append)
    (call,) = inbox.take(0.0).calls
    assert (inbox.take(0.0).calls, made) == ((), [])
    call(None)
    inbox.call(made.append)
    inbox.close("the loop died")
    with pytest.raises(RequestError, match="the loop died"):
        inbox.call(made.append)
    assert made == [None, "the loop died"]


def test_the_progress_of_the_loop_is_counted_with_and_without_messages() -> None:
    inbox = Inbox(1)
    assert inbox.num_taken == 0
    inbox.take(0.0)
    inbox.cancel(1)
    inbox.take(0.0)
    assert inbox.num_taken == 2
