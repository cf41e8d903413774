"""Every curl command of the documentation works as it stands, but for the ports."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from pages import PAGES, commands_of

from smartspec_launch.triton_server import TritonServer

pytestmark = pytest.mark.triton

COMMANDS = {
    shlex.join(words): words for page in PAGES for words in commands_of(page) if words[0] == "curl"
}


def run_curl(words: list[str], server: TritonServer) -> str:
    """The answer and its status, which curl writes below it."""
    assert server.openai is not None
    ports = {8000: server.address.http_port, 9000: server.openai.port}
    for documented, port in ports.items():
        words = [word.replace(f"localhost:{documented}", f"127.0.0.1:{port}") for word in words]
    done = subprocess.run(
        [*words, "--write-out", "\n%{http_code}"], capture_output=True, text=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize("words", COMMANDS.values(), ids=lambda words: words[-1][:40])
def test_it_is_answered(words: list[str], request: pytest.FixtureRequest) -> None:
    has_adapter = any("lora_name" in word for word in words)
    server = request.getfixturevalue("lora_server" if has_adapter else "local_server")
    answer = run_curl(words, server)
    assert answer.endswith("\n200"), answer
    assert '"error"' not in answer
    assert any(key in answer for key in ("text_output", "content"))
