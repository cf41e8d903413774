"""The backend's end of the reply channel."""

from __future__ import annotations

import socket

import pytest

from smartspec_py.serving.replies import ReplyChannel


def test_it_knows_who_has_left() -> None:
    """Also from lines that come in parts. A request that has ended is forgotten."""
    ours, theirs = socket.socketpair()
    channel = ReplyChannel(ours.detach())
    with theirs:
        for key in ("a", "b", "c"):
            channel.open(key)
        assert not channel.has_left("a")
        theirs.sendall(b"x\nb\na")
        assert [channel.has_left(key) for key in "abx"] == [False, True, False]
        theirs.sendall(b"\n")
        assert channel.has_left("a")
        channel.close("b")
        assert [channel.has_left(key) for key in "abc"] == [True, False, False]
    assert channel.has_left("c"), "the gateway has ended"
    channel.send("c", "{}")
    channel.end()


def test_a_gateway_that_does_not_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel is closed then: a line may have been sent in part."""
    monkeypatch.setattr("smartspec_py.serving.replies.SEND_S", 1)
    ours, theirs = socket.socketpair()
    channel = ReplyChannel(ours.detach())
    with theirs:
        with pytest.raises(OSError):  # noqa: PT011
            channel.send("a", "x" * (1 << 24))
        with pytest.raises(OSError):  # noqa: PT011
            channel.send("a", "x")
