"""What a start refuses, what it shows, and the reason of its end, without Triton."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from smartspec_cli.app import app
from smartspec_launch import foreground
from smartspec_launch.answers import Answers

TARGET = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"


def test_a_chat_template_with_an_error_starts_nothing(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}\n{{ m.content }")
    options = ["--http-port", "1", "--grpc-port", "2", "--chat-template", str(template)]
    result = CliRunner().invoke(app, ["serve", "--model", str(TARGET), *options])
    assert result.exit_code == 2
    assert result.output.startswith(f"smartspec: --chat-template: {template}, line 2: ")
    assert result.output.count("\n") == 1


def test_a_sigterm_during_the_imports_ends_serve_with_0() -> None:
    """The interpreter reports each import; the first ones of the command come last."""
    command = [sys.executable, "-X", "importtime", "-m", "smartspec_cli.app", "serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stderr is not None
        for line in serve.stderr:
            if line.endswith(" smartspec_cli\n"):
                break
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=60)
    assert serve.returncode == 0


RAISES_SIGHUP = """
import signal, sys
from smartspec_launch.foreground import signals_interrupt
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
try:
    with signals_interrupt():
        signal.raise_signal(signal.SIGHUP)
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("before", "said"), [("SIG_IGN", "went on"), ("SIG_DFL", "interrupted")])
def test_sighup_interrupts_unless_it_is_ignored(before: str, said: str) -> None:
    """`nohup` ignores it, so that a server outlives its terminal. In a process of its own, because
    libraries of other tests may have handlers of signals, as Go's runtime has."""
    command = [sys.executable, "-c", RAISES_SIGHUP, before]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"


class Silent:
    """A server whose gateway hangs."""

    def look(self, timeout_s: float) -> None:
        return None

    def answers(self) -> dict[str, Answers]:
        return {
            "Triton": Answers(lambda timeout_s: True, 0.1),
            "The gateway": Answers(lambda timeout_s: False, 0.1),
        }

    def kill(self) -> None:
        pass

    def log_tail(self) -> str:
        return "a line of the log"


def test_a_process_that_hangs_is_named_in_the_last_line() -> None:
    shown = io.StringIO()
    server: Any = Silent()
    assert foreground.watch(server, Console(file=shown)) == 1
    reason = "The gateway hangs: no answer for 0.1 s (limits.hang_s)."
    assert shown.getvalue() == f"a line of the log\n{reason}\n"


class Cut(Silent):
    """A server whose stop did not answer all requests."""

    failure = "The gateway ended with exit code 143."

    def start(self) -> None:
        raise KeyboardInterrupt

    def stop(self) -> int:
        return 1


def test_a_stop_that_cuts_requests_says_why_in_the_last_line() -> None:
    shown = io.StringIO()
    server: Any = Cut()
    assert foreground.run_in_foreground(server, Console(file=shown)) == 1
    assert shown.getvalue() == f"Stopping.\na line of the log\n{Cut.failure}\n"


def test_the_line_of_a_ready_server_says_what_the_cache_may_take() -> None:
    facts = {"model": "llama", "threads": 2, "context_len": 512, "cache_bytes": 3 << 29}
    served = (
        "Serving llama, 2 threads, context 512 tokens, KV cache up to 1.5 GiB, drafts from nothing"
    )
    assert foreground.served_text({**facts, "policy": "none"}) == f"{served}, policy none"
    assert "KV cache" not in foreground.served_text({"model": "llama"})


def test_warnings_of_the_start_are_shown_when_it_is_over() -> None:
    shown = io.StringIO()
    server: Any = SimpleNamespace(
        wait_ready=lambda _: None,
        log_path="t.log",
        facts={"model": "llama"},
        notices=["other programs were busy"],
    )
    foreground.wait_with_progress(server, Console(file=shown))
    ready, warning, served = shown.getvalue().splitlines()
    assert ready.startswith("Triton is ready after ")
    assert warning == "Warning: other programs were busy"
    assert served.startswith("Serving llama, ")
