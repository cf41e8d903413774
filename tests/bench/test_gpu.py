"""The script for a GPU, tried on a CPU: each part prints its tables."""

from __future__ import annotations

import pytest

from smartspec_bench import gpu


@pytest.mark.slow
def test_served_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each precision is float32 here, so no text may differ."""
    monkeypatch.setattr(gpu, "FIXED", ("fixed:3",))
    monkeypatch.setattr(gpu, "CHECKED", {"fp8": 1})
    gpu.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    tables = [text.splitlines() for text in printed.split("### ")[1:]]
    titles = [lines[0] for lines in tables]
    loads = ["3 requests, 1 at once", "3 requests, 2 at once"]
    checks = [f"Texts in {precision}" for precision in gpu.CHECKED]
    assert titles == [*loads, *loads, *loads, *checks]
    rows = []
    for lines in tables:
        head, _, *body = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        rows += [dict(zip(head, cells, strict=True)) for cells in body]
    assert len(rows) > 20
    assert {row["texts differ"] for row in rows} == {"0"}
    drafted = [row for row in rows if row["policy"].startswith(("goodput", "fixed"))]
    assert any(float(row["drafts"]) > 0 for row in drafted if "drafts" in row)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["polices"], "PART: got 'polices', must be one of policies, "),
        (["--heads", "nowhere"], "--heads: nowhere is no folder"),
    ],
)
def test_a_wrong_option_takes_no_time_on_a_gpu(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert reason in capsys.readouterr().err
