"""The comparison with another server: this one, and a small one that speaks the same protocol."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servers import TINY

from smartspec_bench import peer
from smartspec_bench.live import PER_PLACE
from smartspec_bench.peer import main
from smartspec_bench.results import read
from smartspec_launch.address import free_address

OTHER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0 and body["ignore_eos"] is True
        usage = {"completion_tokens": body["max_tokens"]}
        self.send_response(200)
        self.end_headers()
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.triton
@pytest.mark.slow
def test_this_server_and_another(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    port = str(free_address().http_port)
    options = ["--model", str(TINY / "target"), "--draft", str(TINY / "draft")]
    options += ["--peer", "other", port, f"{sys.executable} {other} {port}"]
    options += ["--concurrency", "1,2", "--rounds", "1", "--max-tokens", "8"]
    options += ["--context-len", "256"]
    options += ["--out", str(tmp_path / "peer.json")]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "SELECT"}\n')
    options += ["--input", str(tmp_path / "prompts.jsonl")]
    main(options)
    found = read(tmp_path / "peer.json")
    assert {phase.policy for phase in found.phases} == {"none", "goodput", "other"}
    assert len(found.phases) == 2 * 3
    assert {phase.workload for phase in found.phases} == {"prompts.jsonl"}
    assert all(phase.num_finished == PER_PLACE * phase.load for phase in found.phases)


def test_a_server_that_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PORT", free_address().http_port)  # the other test may run beside it
    options = ["--model", str(TINY / "target"), "--draft", "nowhere"]
    options += ["--out", str(tmp_path / "peer.json")]
    with pytest.raises(SystemExit, match="none ended with 2; see"):
        main(options)
