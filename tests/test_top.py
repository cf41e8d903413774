"""`smartspec top` on metrics that a small HTTP server gives."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from smartspec_cli.app import app


class Metrics(http.server.BaseHTTPRequestHandler):
    """The second look has 50 tokens more than the first."""

    num_looks = 0
    text = (
        "# HELP smartspec_num_requests_running .\n"
        'smartspec_num_requests_running{{model="smartspec",version="1"}} 3\n'
        'smartspec_decoding_steps_total{{decider="planner"}} {steps}\n'
        'smartspec_decoding_steps_total{{decider="probe"}} 1\n'
        "smartspec_generation_tokens_total {tokens}\n"
    )

    def do_GET(self) -> None:
        type(self).num_looks += 1
        body = b"other 1\n"
        if self.path == "/metrics":
            values = {"tokens": 100 + 50 * self.num_looks, "steps": 10 * self.num_looks}
            body = self.text.format(**values).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_values_and_rates(url: str) -> None:
    options = ["top", "--url", f"{url}/metrics", "--once", "--interval", "0.2", "--json", "-"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["requests running"] == 3
    ratio = found["tokens generated per second"] / found["decoding steps per second"]
    assert ratio == pytest.approx(5)
    assert 10 < found["tokens generated per second"] <= 250
    assert "requests running" in result.stderr


@pytest.mark.parametrize(
    ("path", "part"), [("/other", "no metrics of SmartSpec"), (None, "answer")]
)
def test_wrong_addresses_are_named(url: str, path: str | None, part: str) -> None:
    given = "http://127.0.0.1:1/metrics" if path is None else url + path
    result = CliRunner().invoke(app, ["top", "--url", given])
    assert result.exit_code == 1
    assert part in " ".join(result.stderr.split())
