"""Several runs as one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from made import phase
from runs import ABOUT
from typer.testing import CliRunner

from smartspec_bench.document import Document, Series, read, write
from smartspec_bench.merged import MergeError, merged
from smartspec_cli.app import app


def run(seed: int, goodput_ms: float) -> Document:
    """Two repeats of three policies, of which fixed:2 takes 100 ms."""
    means = (("none", 200.0), ("fixed:2", 100.0), ("goodput", goodput_ms))
    return Document(
        replace(ABOUT, command=f"bench --seed {seed}"),
        phases=[
            replace(phase(name, mean, repeat), seed=10 * seed + repeat)
            for repeat in range(2)
            for name, mean in means
        ],
    )


def test_repeats_follow_each_other_and_are_judged_together() -> None:
    """Ratios 0.9, 0.9, 0.8, 0.8: their geometric mean is the root of 0.72."""
    whole = merged([run(1, 90.0), run(2, 80.0)])
    assert [one.repeat for one in whole.phases if one.policy == "none"] == [0, 1, 2, 3]
    over = next(c for c in whole.comparisons if (c.role, c.metric) == ("best fixed", "e2e_ms.mean"))
    assert over.num_pairs == 4
    assert over.ratio == pytest.approx(0.72**0.5)
    assert whole.about.command == "bench --seed 1 ; bench --seed 2"
    assert whole.summary


def test_series_are_kept_of_the_first_repeat_of_a_load_that_changes() -> None:
    series = Series(time_s=[0.0, 1.0])
    made = [
        replace(phase("none", 100.0, repeat), shape=shape, seed=seed, series=series)
        for seed, (shape, repeat) in enumerate(product(("steady", "step"), range(2)))
    ]
    kept = merged([Document(ABOUT, phases=made)]).phases
    assert [(one.shape, one.repeat) for one in kept if one.series.time_s] == [("step", 0)]


def test_a_document_has_a_line_for_each_phase(tmp_path: Path) -> None:
    write(tmp_path / "run.json", run(1, 90.0))
    lines = (tmp_path / "run.json").read_text().splitlines()
    assert sum('"policy": "goodput"' in line for line in lines) == 2
    assert json.loads("".join(lines)) == run(1, 90.0).to_json()


def test_runs_that_are_no_repeats_are_refused() -> None:
    with pytest.raises(MergeError, match="same seed"):
        merged([run(1, 90.0), run(1, 90.0)])
    other = run(2, 90.0)
    with pytest.raises(MergeError, match="commit of run 2 is 'x'"):
        merged([run(1, 90.0), replace(other, about=replace(other.about, commit="x"))])
    with pytest.raises(MergeError, match="one at least"):
        merged([])


def test_on_the_command_line(tmp_path: Path) -> None:
    for seed in (1, 2):
        write(tmp_path / f"{seed}.json", run(seed, 90.0))
    paths = [str(tmp_path / name) for name in ("1.json", "2.json")]
    shown = CliRunner().invoke(app, ["bench", "merge", *paths, "--json", str(tmp_path / "a.json")])
    assert shown.exit_code == 0, shown.stderr
    assert len(read(tmp_path / "a.json").phases) == 12
    command = ["bench", "merge", paths[0], paths[0], "--json", str(tmp_path / "b.json")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "same seed" in refused.stderr
    assert not (tmp_path / "b.json").exists()
