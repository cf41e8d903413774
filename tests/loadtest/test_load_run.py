"""A run without Locust: what goes out, the lines, and their summary."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from load_run import LoadRun
from summary import read_timings

from smartspec_sim.latency import with_errors


def options(**changes: object) -> argparse.Namespace:
    given: dict[str, object] = {
        "scenario": "steady",
        "num_users": 3,
        "scale": 1.0,
        "run_time": 3600,
        "request_timeout": 5.0,
        "max_requests": 2,
        "workload": "qa",
        "shift_to": "chat",
        "prompts": "",
        "max_tokens": 7,
        "temperature": 0.0,
        "policy": "",
        "fields": "",
        "jsonl": "",
    }
    return argparse.Namespace(**(given | changes))


def test_requests_are_counted_and_the_run_ends_after_the_last() -> None:
    run = LoadRun(options())
    run.start()
    assert run.num_users == 3
    first, fields = run.send()
    second, _ = run.send()
    assert (first.index, second.index, first.kind) == (0, 1, "qa")
    assert fields["max_tokens"] == 7
    assert "speculation_policy" not in fields
    assert run.has_sent_all
    assert run.num_users is None


def test_a_run_that_is_ended_has_no_users() -> None:
    run = LoadRun(options())
    run.start()
    run.end()
    assert run.num_users is None


def test_a_prompt_and_the_options_come_on_top(tmp_path: Path) -> None:
    """A prompt's own length is for that prompt alone; --fields has the last word on the rest."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3, "kind": "x"}\n{"prompt": "b"}\n')
    more = '{"ignore_eos": true, "stream": false}'
    run = LoadRun(options(prompts=str(path), policy="fixed:2", fields=more))
    run.start()
    (first, one), (_, other) = run.send(), run.send()
    assert (first.kind, one["text_input"], one["max_tokens"]) == ("x", "a", 3)
    assert (other["text_input"], other["max_tokens"]) == ("b", 7)
    assert one["speculation_policy"] == "fixed:2"
    assert (one["ignore_eos"], one["stream"]) == (True, False)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fields": "{"}, "--fields: got '{'"),
        ({"fields": "[1]"}, "--fields"),
        ({"workload": "poems"}, "--workload: got 'poems'"),
        ({"shift_to": "poems"}, "--shift-to"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"scenario": "waves"}, "--scenario"),
    ],
)
def test_what_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word.replace("[", r"\[").replace("{", r"\{")):
        LoadRun(options(**changes))


def test_lines_and_their_summary(tmp_path: Path) -> None:
    """Sent at 1 s: a token after 0.2 s, 3 more after 0.5 s. So ttft 0.2, e2e 0.5, tpot 0.1 s."""
    path = tmp_path / "r.jsonl"
    run = LoadRun(options(jsonl=str(path)))
    run.start()
    (good, _), (bad, _) = run.send(), run.send()
    for exchange in (good, bad):
        exchange.scheduled_s = exchange.sent_s = 1.0
    good.take({"num_output_tokens": 1, "num_input_tokens": 0}, 1.2)
    good.take({"num_output_tokens": 3, "num_input_tokens": 9, "finish_reason": "length"}, 1.5)
    bad.error = "HTTP 503: full"
    run.ended(good)
    run.ended(bad)
    # A run may be killed at any time: the lines are whole without `close`.
    summary = with_errors(read_timings(path))
    run.close()
    assert (summary["num_finished"], summary["num_failed"]) == (1, 1)
    for name, milliseconds in (("ttft", 200), ("e2e", 500), ("tpot", 100)):
        assert summary[f"{name}_ms"]["p50"] == pytest.approx(milliseconds)
    assert summary["errors"] == {"HTTP 503: full": 1}
    assert json.loads(path.read_text().splitlines()[0])["num_input_tokens"] == 9


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"scheduled_s": 1}\n')
    with pytest.raises(ValueError, match=r"r.jsonl, line 1: KeyError: 'chunk_s'"):
        read_timings(path)
