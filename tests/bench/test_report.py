"""The result document, its comparisons by hand, and its report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smartspec_bench.comparison import Ratio, places
from smartspec_bench.report import faster_by, markdown
from smartspec_bench.results import Document, DocumentError, Phase, phase_of, read, write
from smartspec_bench.streams import Exchange
from smartspec_cli.app import app

STEADY = ("steady", "mixed", 0.7)


def phase(policy: str, repeat: int, e2e_ms: float, num_failed: int = 0) -> Phase:
    exchange = Exchange(0, 0.0, chunk_s=[0.1, e2e_ms / 1e3], chunk_tokens=[1, 9])
    exchange.last = {
        "num_steps": 4,
        "total_draft_tokens": 8,
        "total_accepted_draft_tokens": 6,
    }
    found = phase_of(policy, STEADY, repeat, [exchange])
    return replace(found, num_failed=num_failed)


def document(latencies: dict[str, Sequence[float]]) -> Document:
    phases = [phase(name, i, ms) for name, each in latencies.items() for i, ms in enumerate(each)]
    return Document({"title": "A run"}, phases)


EXAMPLE = document(
    {
        "none": (1000, 2000, 1000, 2000),
        "fixed:1": (600, 1200, 600, 1200),
        "fixed:3": (800, 1600, 800, 1600),
        "goodput": (500, 1000, 500, 1000),
    }
)


def test_a_phase_by_hand() -> None:
    """One request: 10 tokens in 500 ms, the first after 100 ms; 4 steps with 8 drafts, 6 of them
    accepted."""
    found = phase("goodput", 0, 500.0)
    assert (found.num_finished, found.num_failed) == (1, 0)
    assert found.e2e_ms["mean"] == found.e2e_ms["p99"] == pytest.approx(500.0)
    assert found.ttft_ms["mean"] == pytest.approx(100.0)
    assert found.itl_ms["mean"] == pytest.approx(400 / 9)
    assert found.token_goodput_tps == pytest.approx(20.0)
    assert (found.mean_draft_len, found.acceptance_rate) == (2.0, 0.75)


def test_a_comparison_by_hand() -> None:
    """Every repeat has the same ratios: 500/600 and 500/1000. Means are geometric."""
    (place,) = places(EXAMPLE)
    assert place.best_fixed is not None
    assert place.best_fixed.policy == "fixed:1"
    assert place.over_best is not None
    assert place.over_best.value == pytest.approx(5 / 6)
    none, ours = place.policy("none"), place.policy("goodput")
    assert none is not None
    assert ours is not None
    assert none.e2e_ms == pytest.approx(1000 * math.sqrt(2))
    assert none.ratio is not None
    assert (none.ratio.value, ours.ratio) == (pytest.approx(0.5), None)


def test_few_repeats_have_no_interval_and_in_process_is_no_fixed_length() -> None:
    found = document({"none": (9,), "fixed:1": (8,), "fixed:1, in process": (1,), "goodput": (7,)})
    (place,) = places(found)
    assert place.over_best is None
    assert place.best_fixed is not None
    assert place.best_fixed.policy == "fixed:1"


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (Ratio(0.87, 0.80, 0.95), "**13 %** (5 to 20)"),
        (Ratio(0.98, 0.94, 1.03), "2 % (-3 to 6)"),
        (Ratio(1.20, 1.10, 1.30), "**-20 %** (-30 to -10)"),
        (None, ""),
    ],
)
def test_percent(ratio: Ratio | None, shown: str) -> None:
    assert faster_by(ratio) == shown


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(path, EXAMPLE)
    assert read(path) == EXAMPLE
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "smartspec-bench", "version": 1, "about": {}, "phases": [{}]}'],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"other\.json"):
        read(path)
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert "other.json" in result.stderr


def test_the_report_says_what_failed_and_what_was_measured(tmp_path: Path) -> None:
    failed = replace(EXAMPLE, error="interrupted")
    failed.phases[0] = replace(phase("none", 0, 1000.0, num_failed=3), failure="no token")
    write(tmp_path / "r.json", failed)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "r.json")])
    assert result.stdout.strip() == markdown(failed).strip()
    for text in (
        "interrupted",
        "3 requests failed: no token.",
        "| goodput | 707 |",
        "- title: A run",
    ):
        assert text in result.stdout


def test_spreads_without_values() -> None:
    nothing = phase_of("none", STEADY, 0, [Exchange(0, 0.0, error="refused")])
    assert (nothing.num_failed, nothing.e2e_ms["mean"]) == (1, None)
    assert nothing.failure == "refused"
    ended = phase_of("none", STEADY, 0, [Exchange(0, 0.0, last={"finish_reason": "stop"})])
    assert ended.failure is not None
    assert ended.failure.endswith("see --model")
    assert markdown(Document({}, [nothing]))


def test_a_result_may_go_to_a_device(tmp_path: Path) -> None:
    """Root could replace it by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)
    write(pipe, Document({"title": "small"}))
    assert json.loads(os.read(opened, 1 << 16))["about"] == {"title": "small"}
    os.close(opened)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
