"""The comparison with AIPerf, as far as it goes without AIPerf."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from both_clients import FIELDS, PLAIN, TEMPLATE, aiperf_figures, write_prompts
from load_run import request_fields
from test_load_run import options


def test_both_clients_send_the_same_body() -> None:
    """AIPerf renders the template; Locust's users add to --fields what the second table undoes."""
    text = 'Task: "chat"\nUser: Grüße'
    template = jinja2.Template(TEMPLATE.read_text())
    theirs = json.loads(template.render(text=text, stream=True, max_tokens=None))
    assert theirs == {**FIELDS, "text_input": text}
    ours = request_fields(options(fields=json.dumps(FIELDS | PLAIN)))
    assert ours == FIELDS | PLAIN


def test_both_clients_get_the_same_prompts(tmp_path: Path) -> None:
    files = write_prompts(tmp_path, 5)
    ours = [json.loads(line)["prompt"] for line in files.prompts.read_text().splitlines()]
    theirs = [json.loads(line)["text"] for line in files.inputs.read_text().splitlines()]
    assert ours == theirs
    assert len(set(ours)) == 5


def test_figures_of_an_export() -> None:
    document = {
        "time_to_first_token": {"unit": "ms", "avg": 2.0, "p50": 1.5, "p99": 9.0, "p90": 5.0},
        "request_latency": {"unit": "ms", "avg": 20.0, "p50": 15.0, "p99": 90.0},
        "request_throughput": {"unit": "requests/sec", "avg": 4.5},
    }
    assert aiperf_figures(document) == {
        "ttft_mean": 2.0,
        "ttft_p50": 1.5,
        "ttft_p99": 9.0,
        "e2e_mean": 20.0,
        "e2e_p50": 15.0,
        "e2e_p99": 90.0,
        "requests_per_s": 4.5,
    }
    with pytest.raises(KeyError):
        aiperf_figures({})
