"""A drain against HTTP answers that say what a Triton says."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from smartspec_py.launch import drain as draining
from smartspec_py.launch.address import Address, free_address
from smartspec_py.launch.drain import Drained, drain, num_in_flight

UNLOADING = b'[{"name":"smartspec","state":"UNLOADING"}]'
GONE = b'[{"name":"smartspec","state":"UNAVAILABLE","reason":"unloaded"}]'
METRICS = 'smartspec_num_requests_running{{model="smartspec",version="1"}} {}\n' + (
    'smartspec_num_requests_waiting{{model="smartspec",version="1"}} {}\n'
)
WAIT_S = 10.0


@contextmanager
def stand_in(index: list[bytes], metrics: str | None) -> Iterator[tuple[Address, list[str]]]:
    """A server with one port for all. index: its answers, the last for ever. metrics: None refuses.
    Yields the address and the paths that were asked for."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            answer = index[0] if self.path.endswith("/index") else b""
            if self.path.endswith("/index") and len(index) > 1:
                index.pop(0)
            self._send(200, answer)

        def do_GET(self) -> None:
            self._send(200 if metrics is not None else 404, (metrics or "").encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        port = server.server_address[1]
        try:
            yield Address(http_port=port, metrics_port=port), asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("index", "metrics", "expected"),
    [
        ([UNLOADING, GONE], METRICS.format(3, 2), Drained.UNLOADED),
        ([UNLOADING], METRICS.format(0, 0), Drained.KEPT),
        ([UNLOADING], METRICS.format(1, 0), Drained.LATE),
        ([UNLOADING], METRICS.format(0, 1), Drained.LATE),
        ([UNLOADING], "", Drained.LATE),
        ([UNLOADING], METRICS.format(0, 0).splitlines()[0], Drained.LATE),
        ([UNLOADING], None, Drained.LATE),
    ],
    ids=["gone", "kept", "runs", "waits", "no gauges", "one gauge", "no metrics"],
)
def test_a_drain_tells_a_kept_model_from_one_that_is_busy(
    index: list[bytes], metrics: str | None, expected: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "KEPT_S", 0.3)
    wait_s = 2 * draining.KEPT_S if expected is Drained.LATE else WAIT_S
    with stand_in(list(index), metrics) as (address, asked):
        assert drain(address, "key", time.monotonic() + wait_s) is expected
    unload, *looks = asked
    assert unload == "/v2/repository/models/smartspec/unload"
    assert set(looks) == {"/v2/repository/index"}


def test_where_nobody_listens_there_is_nothing_to_drain() -> None:
    address = free_address()
    assert drain(address, "key", time.monotonic() + WAIT_S) is Drained.UNLOADED
    assert num_in_flight(address) is None


def test_requests_in_flight_run_or_wait() -> None:
    with stand_in([GONE], METRICS.format(3, 2)) as (address, _):
        assert num_in_flight(address) == 5
