"""From exchanges to a phase: figures by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made import phases

from smartspec_bench.client import FullQueue
from smartspec_bench.document import (
    About,
    Document,
    DocumentError,
    Phase,
    read,
    write,
)
from smartspec_bench.phases import draft_lens, itl_s, phase_of, series_of, time_shares
from smartspec_bench.plan import Point, Stretch, Turn
from smartspec_bench.streams import Exchange
from smartspec_bench.tables import compare_table, write_csv
from smartspec_bench.warm_up import saturation_rps
from smartspec_sim.latency import Slo

POINT = Point(0, "steady", "chat", 0.5, ("none",), (Stretch(4.0, 2.0, "chat"),), 8)
TURN = Turn(POINT, "goodput", 1, 7)


def exchange(
    due_s: float,
    chunks: list[tuple[float, int]],
    steps: list[tuple[int, int]],
    num_steps: int,
    error: str | None = None,
) -> Exchange:
    """chunks: time and tokens. steps: drafted and accepted of those with drafts."""
    detail = {
        "per_step_drafted": [drafted for drafted, _ in steps],
        "per_step_accepted": [accepted for _, accepted in steps],
    }
    metrics = json.dumps({"speculative_decoding": detail} if steps else {})
    return Exchange(
        index=0,
        scheduled_s=due_s,
        sent_s=due_s + 0.01,
        chunk_s=[time_s for time_s, _ in chunks],
        chunk_tokens=[num for _, num in chunks],
        last={"metrics": metrics, "num_steps": num_steps, "finish_reason": "stop"},
        error=error,
    )


FIRST = exchange(0.0, [(0.5, 1), (1.5, 3), (2.5, 1)], [(4, 2)], 2)
"""A step of 4 drafts, 2 accepted; then one without drafts. 5 tokens."""

SECOND = exchange(1.0, [(1.2, 1), (2.2, 1)], [], 1)
FAILED = exchange(1.5, [], [], 0, error="HTTP 500")


def test_a_phase_by_hand() -> None:
    """e2e: 2,500 and 1,200 ms. Drafted 4 in 3 steps, 2 accepted. 7 tokens in 2.5 s."""
    found = phase_of(TURN, [FIRST, SECOND, FAILED], Slo(e2e_ms=2000.0), (0.5, 1.0))
    assert (found.num_sent, found.num_finished, found.num_failed) == (3, 2, 1)
    assert found.duration_s == pytest.approx(2.5)
    assert found.e2e_ms.mean == pytest.approx(1850.0)
    assert found.ttft_ms.mean == pytest.approx(350.0)
    assert found.send_lag_ms.mean == pytest.approx(10.0)
    assert found.token_goodput_tps == pytest.approx(7 / 2.5)
    assert found.slo_goodput_rps == pytest.approx(1 / 2.5)
    assert found.mean_draft_len == pytest.approx(4 / 3)
    assert found.acceptance_rate == pytest.approx(0.5)
    assert found.draft_len_counts == [2, 0, 0, 0, 1]
    assert found.accepted_counts == [0, 0, 1]
    assert found.rate_rps == pytest.approx(2.0)


def test_itl_is_over_the_tokens_behind_the_first_chunk() -> None:
    """2 s for 4 tokens; a request of one chunk has none."""
    assert itl_s(FIRST) == pytest.approx(0.5)
    assert itl_s(exchange(0.0, [(0.5, 4)], [], 1)) is None


def test_steps_without_drafts_lie_between_the_others() -> None:
    assert draft_lens(exchange(0, [(1, 1)], [(3, 1), (5, 0)], 4)) == [0, 3, 0, 5]
    assert draft_lens(exchange(0, [(1, 1)], [(3, 1), (5, 0)], 2)) == [3, 5]
    assert draft_lens(exchange(0, [(1, 1)], [], 3)) == [0, 0, 0]


def test_series_by_hand() -> None:
    """FIRST is out from 0 to 2.5 s, SECOND from 1 to 2.2 s."""
    series = series_of([FIRST, SECOND, FAILED])
    assert series.time_s == [0.5, 1.5, 2.5]
    assert series.rate_rps == [1.0, 2.0, 0.0]
    assert series.running == pytest.approx([1.0, 2.0, 0.7])
    assert sum(series.draft_len) > 0


def test_series_of_no_answer_is_empty() -> None:
    assert series_of([FAILED]).time_s == []


def test_time_shares_by_hand() -> None:
    """Requests were out from 0.01 to 2.5 s without a gap: 2.49 s."""
    shares = time_shares([FIRST.timing, SECOND.timing], (0.249, 1.245))
    assert shares == pytest.approx({"draft": 0.1, "target": 0.5, "host": 0.4})
    assert time_shares([FIRST.timing], (0.0, 0.0)) == {}


def test_saturation_by_hand() -> None:
    """From 1 to 3 s come 5 tokens; a whole request has 2.5 on average, and the one cut short counts
    in no mean: 1 request/s."""
    sent = [
        exchange(0.0, [(0.5, 1), (1.0, 1)], [], 1),
        exchange(0.0, [(0.9, 1), (1.5, 2)], [], 1),
        exchange(1.0, [(2.0, 1), (2.9, 1)], [], 1),
    ]
    assert saturation_rps(FullQueue(sent, 1.0, 3.0), 1) == pytest.approx(1.0)


ABOUT = About("t", "2026-01-01", "c", "m", 2, {}, "", "p", {}, "short", "d")


def test_document_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    document = Document(ABOUT, phases=[phase_of(TURN, [FIRST, SECOND], None, (0.5, 1.0))])
    write(path, document)
    assert read(path) == document
    assert list(json.loads(path.read_text()))[:2] == ["format", "version"]


def test_the_example_is_a_document() -> None:
    document = read(Path(__file__).parent / "example.json")
    assert {phase.shape for phase in document.phases} == {"steady", "step", "mix", "closed"}
    assert document.comparisons


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "Expecting value"),
        ("[]", "must be a document of `bench load`, version 1, but is a JSON list"),
        ('{"format": "smartspec-bench", "version": 2}', "but is version 2"),
        ('{"format": "smartspec-arms", "version": 1}', "but is a document of `bench arms`"),
        ('{"machine": "x", "arms": {}}', "but is a document of `bench arms`"),
        ('{"format": "smartspec-overhead"}', "but is a document of `bench overhead`"),
        ('{"format": ["x"]}', "but is JSON of the format"),
        ('{"format": "smartspec-bench", "version": 1, "about": {}}', "about.title"),
    ],
)
def test_what_is_no_document_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=message):
        read(path)


def test_csv_has_a_line_a_phase(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    found: list[Phase] = phases({"none": [100.0, 110.0]})
    write_csv(path, found)
    header, *lines = path.read_text().splitlines()
    assert len(lines) == 2
    cells = dict(zip(header.split(","), lines[1].split(","), strict=True))
    assert cells["policy"] == "none"
    assert cells["e2e_ms_mean"] == "110.0"
    assert "goodput" not in cells


def test_comparison_of_two_runs() -> None:
    """Twice as slow in both repeats, sqrt(100 * 110) = 104.9 before; a policy that one run lacks is
    left out."""
    before = Document(ABOUT, phases=phases({"none": [100.0, 110.0], "goodput": [1.0, 1.0]}))
    after = Document(ABOUT, phases=phases({"none": [200.0, 220.0]}))
    table = compare_table(before, after)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert set(columns["policy"]) == {"none"}
    row = columns["measure"].index("e2e_ms mean")
    shown = [columns[name][row] for name in ("before", "after", "ratio", "low", "high")]
    assert shown == ["104.9", "209.8", "2.000", "2.000", "2.000"]
