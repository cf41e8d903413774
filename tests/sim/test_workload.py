"""Workloads: drawn, read, and refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_sim.acceptance import NO_DRAFT, draw_runs, num_accepted, runs_of, with_pauses
from smartspec_sim.record import read_record
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    WorkloadError,
    WorkloadSpec,
    draw,
    offered_rate,
    read_spec,
)

KINDS = (
    KindSpec(name="chat", prompt=LengthSpec(mean=20), output=LengthSpec(mean=30), accept=0.8),
    KindSpec(name="sql", prompt=LengthSpec(mean=40), output=LengthSpec(mean=10), accept=0.4),
)


def test_runs_by_hand() -> None:
    """Right, right, wrong, right: 2 right drafts from 0, 1 from 1, none from 2, 1 from 3."""
    runs = runs_of([True, True, False, True])
    assert [num_accepted(runs, position, 7) for position in range(5)] == [2, 1, 0, 1, 0]
    assert [num_accepted(runs, 0, k) for k in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize("persistence", [0.0, 0.5])
def test_drawn_runs_have_their_probability(persistence: float) -> None:
    """40,000 positions. The standard deviation of the mean is 0.0023, and sqrt(3) times that if
    neighbours correlate by a half; 4.5 of them fail in 7e-6 of cases."""
    runs = draw_runs(np.random.default_rng(1), 40_000, 0.7, persistence)
    is_right = np.minimum(runs, 1)
    assert is_right.mean() == pytest.approx(0.7, abs=4.5 * 0.0023 * 3**0.5)
    found = np.corrcoef(is_right[1:], is_right[:-1])[0, 1]
    assert found == pytest.approx(persistence, abs=0.025)


def test_matches_pause() -> None:
    """40,000 positions that are all right: a run counts the positions up to the next pause."""
    right = list(range(40_000, 0, -1))
    runs = with_pauses(right, np.random.default_rng(1), match_len=20.0, pause_len=5.0)
    is_paused = [run == NO_DRAFT for run in runs]
    assert runs == [
        NO_DRAFT if paused else run
        for paused, run in zip(is_paused, _runs_to(is_paused), strict=True)
    ]
    num_passages = sum(now and not before for before, now in pairwise(is_paused))
    assert sum(is_paused) / num_passages == pytest.approx(5.0, rel=0.1)
    assert (40_000 - sum(is_paused)) / num_passages == pytest.approx(20.0, rel=0.1)
    assert num_accepted(runs, is_paused.index(True), 3) == 0


def _runs_to(is_paused: list[bool]) -> list[int]:
    return runs_of([not paused for paused in is_paused])


def test_only_prompt_lookup_pauses() -> None:
    with pytest.raises(
        ValueError, match="pause_len is for prompt_lookup, got the proposer draft_m"
    ):
        KindSpec(pause_len=3.0)
    assert KindSpec(proposer=PROMPT_LOOKUP, pause_len=3.0).pause_len == 3.0


def test_phases_shift_the_mixture() -> None:
    phases = (
        PhaseSpec(duration_s=10, rate=5, mix={"chat": 1}),
        PhaseSpec(duration_s=10, rate=5, mix={"sql": 1}),
    )
    spec = WorkloadSpec(kinds=KINDS, phases=phases, arrivals="constant")
    requests = draw(spec)
    assert [request.acceptance_group for request in requests] == ["chat"] * 50 + ["sql"] * 50
    assert (requests[0].prompt_len, requests[0].output_len) == (20, 30)


def test_a_request_is_the_same_at_every_rate() -> None:
    slow, fast = (
        draw(WorkloadSpec(kinds=KINDS, phases=(PhaseSpec(duration_s=20, rate=rate),)))
        for rate in (4, 8)
    )
    assert len(fast) > len(slow) > 20
    for one, other in zip(slow, fast, strict=False):
        assert (one.acceptance_group, one.prompt_len, one.runs) == (
            other.acceptance_group,
            other.prompt_len,
            other.runs,
        )


def test_specs_are_read_from_toml_and_json(tmp_path: Path) -> None:
    toml = tmp_path / "load.toml"
    toml.write_text(
        'arrivals = "gamma"\nburstiness = 0.5\n'
        '[[kinds]]\nname = "sql"\naccept = 0.9\noutput = {mean = 64}\n'
        "[[phases]]\nduration_s = 40\nrate = 1\nend_rate = 16\n"
    )
    spec = read_spec(toml)
    assert spec.kinds[0].output.mean == 64
    assert spec.phases[0].rates.num_expected == 340
    twin = tmp_path / "load.json"
    twin.write_text(spec.model_dump_json())
    assert read_spec(twin) == spec


PHASE = "[[phases]]\nduration_s = 1\nrate = 1\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rate = 3", "phases: Field required"),
        ("[[phases]]\nduration_s = 0\nrate = 1", "duration_s"),
        (f"{PHASE}mix = {{poem = 1}}", "'poem' must be one of chat"),
        (f"{PHASE}mix = {{chat = 0}}", "all weights are 0"),
        (f"{PHASE}[[kinds]]\naccept = 1.5", "accept"),
        (f"{PHASE}[[kinds]]\naccept = 1.0", "accept_sd must be below"),
        (f"burstiness = 0\n{PHASE}", "burstiness"),
        ("[[phases]", "load.toml"),
    ],
)
def test_wrong_specs_are_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "load.toml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=word):
        read_spec(path)


def test_a_record_is_read(tmp_path: Path) -> None:
    names = ("scheduled_s", "num_input_tokens", "num_output_tokens", "accept_prob", "kind")
    rows = [(12.0, 5, 3, None, ""), (10.0, 4, 2, 1.0, "sql"), (11.0, 4, 0, 1.0, "")]
    lines = [dict(zip(names, row, strict=True)) for row in rows]
    lines.append({"scheduled_s": 14.0, "num_input_tokens": 1, "num_output_tokens": 2})
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    requests = read_record(path, accept=0.0)
    assert [request.arrival_s for request in requests] == [0.0, 2.0, 4.0]
    assert [request.acceptance_group for request in requests] == ["sql", "", ""]
    assert [request.runs[DRAFT_MODEL][0] for request in requests] == [2, 0, 0]
    assert offered_rate(requests) == 0.5


@pytest.mark.parametrize("line", ["{", '{"scheduled_s": 1}', "[1]"])
def test_a_wrong_record_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "record.jsonl"
    right = {"scheduled_s": 1, "num_input_tokens": 1, "num_output_tokens": 1}
    path.write_text(f"{json.dumps(right)}\n{line}\n")
    with pytest.raises(WorkloadError, match="line 2"):
        read_record(path, accept=0.5)
