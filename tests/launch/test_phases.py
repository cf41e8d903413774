"""The phases of a start: how they are reported, and how a person sees them."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_models import make_model
from rich.console import Console

from smartspec_launch.phases import PhaseDisplay, shown
from smartspec_py.engines.phases import MEASURING, READING, Phase, Steps
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import RunnerConfig

LOGGER = "smartspec_py.engines.phases"
PHASES = (
    Phase("starting Triton"),
    Phase(READING, 0.0, 3_100_000_000),
    Phase(READING, 0.5, 3_100_000_000),
    Phase(MEASURING, 0.25),
)


def phases_of(caplog: pytest.LogCaptureFixture) -> list[Phase]:
    return [record.phase for record in caplog.records if hasattr(record, "phase")]


def test_a_phase_is_one_line_of_the_log_and_at_most_a_hundred_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER):
        steps = Steps(READING, 1000, num_bytes=5_000_000)
        for _ in range(1000):
            steps.add()
    phases = phases_of(caplog)
    assert len(phases) == 101
    assert phases[0] == Phase(READING, 0.0, 5_000_000)
    assert [phase.amount for phase in phases[49:52]] == [
        "2 MB of 5 MB",
        "2 MB of 5 MB",
        "3 MB of 5 MB",
    ]
    assert phases[-1].share == 1.0
    assert [record.levelno for record in caplog.records].count(logging.INFO) == 1


@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_reading_weights_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Callable[[RunnerConfig], Any]
) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    config = RunnerConfig(
        path=tmp_path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_rows=2,
        max_len=32,
        vocab_size=model.config.vocab_size,
    )
    with caplog.at_level(logging.DEBUG, LOGGER):
        load(config)
    reading = [phase for phase in phases_of(caplog) if phase.name == READING]
    assert {phase.num_bytes for phase in reading} == {size}
    assert reading[0].share == 0.0
    assert reading[-1].share == 1.0
    assert [phase.share for phase in reading] == sorted(phase.share for phase in reading)


def test_without_a_terminal_each_phase_is_a_line() -> None:
    shown = io.StringIO()
    with PhaseDisplay(Console(file=shown)) as display:
        for phase in PHASES:
            display.show(phase)
    lines = ["Starting Triton", "Reading weights, 3.1 GB", "Measuring costs"]
    assert shown.getvalue().splitlines() == lines


def test_without_a_terminal_a_long_phase_goes_on_with_words() -> None:
    """Every 4 s, with the time since its beginning, and how far it is if that is known."""
    shown, now_s = io.StringIO(), [0.0]
    with PhaseDisplay(Console(file=shown), clock=lambda: now_s[0]) as display:
        for now_s[0], phase in ((0.0, PHASES[0]), (3.0, PHASES[0]), (6.0, PHASES[0])):
            display.show(phase)
        for now_s[0], phase in ((7.0, PHASES[1]), (10.0, PHASES[2]), (13.0, PHASES[2])):
            display.show(phase)
    lines = ["Starting Triton", "  6 s", "Reading weights, 3.1 GB", "  6 s, 1.6 GB of 3.1 GB"]
    assert shown.getvalue().splitlines() == lines


def test_a_terminal_has_bars() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with PhaseDisplay(console) as display:
        for phase in PHASES:
            display.show(phase)
        display._bars.refresh()
        *_, last = shown.getvalue().split("Starting Triton")
    assert "Reading weights" in last
    assert "Measuring costs" in last
    assert "25%" in last


def test_a_long_block_is_shown_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block ends when it has been shown twice. A short one may be left out."""
    output = Output()
    console = Console(file=output)
    with shown("never", console, after_s=60.0):
        pass
    assert output.getvalue() == ""
    with shown("once", console):
        pass
    assert output.getvalue() == "Once\n"
    monkeypatch.setattr("smartspec_launch.phases.SHORT_S", 0.001)
    monkeypatch.setattr("smartspec_launch.phases.LINE_EVERY_S", 0.0)
    with shown("checking", console):
        assert output.is_shown_twice.wait(30.0)
    _, first, second, *_ = output.getvalue().splitlines()
    assert (first, second) == ("Checking", "  0 s")


class Output(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.is_shown_twice = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") > 2:
            self.is_shown_twice.set()
        return written
