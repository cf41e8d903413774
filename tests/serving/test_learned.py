"""What a server has learned, from an orderly stop to the next start."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import CAPABILITIES, COST, LoopHarness

from smartspec_py.serving.learned import (
    HALF_LIFE_S,
    MOST_KEPT,
    restore_learned,
    store_learned,
)
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import FakeTarget


def served(**of_harness: Any) -> LoopHarness:
    """A loop that has served a few requests."""
    harness = LoopHarness(**{"accept_prob": 0.2} | of_harness)
    for number in range(6):
        harness.submit((number, 5, 7), 40)
    harness.step(100)
    assert not harness.loop.num_live
    return harness


def first_probs(harness: LoopHarness) -> list[float]:
    tracker = next(iter(harness.loop._speculation._sources.values()))._acceptance
    return [float(p) for p in tracker.accept_probs([10_000], 4)[0]]


def test_a_loop_goes_on_with_what_another_learned(tmp_path: Path) -> None:
    profile = tmp_path / "profile-0123.json"
    before, fresh, after = served(), LoopHarness(), LoopHarness()
    store_learned(before.loop, profile)
    assert restore_learned(after.loop, profile)
    first = first_probs(fresh)[0]
    assert first_probs(before)[0] < first_probs(after)[0] < first
    learned, known = (one.loop.controller._corrections.cost for one in (before, after))
    assert abs(known.target_base - learned.target_base) <= abs(1.0 - learned.target_base)


def test_what_is_old_counts_for_less(tmp_path: Path) -> None:
    profile = tmp_path / "profile-0123.json"
    store_learned(served().loop, profile)
    found = []
    for age_s in (0.0, 2 * HALF_LIFE_S, 40 * HALF_LIFE_S):
        document = json.loads(profile.read_text())
        document["learned"]["time_s"] = time.time() - age_s
        profile.write_text(json.dumps(document))
        harness = LoopHarness()
        assert restore_learned(harness.loop, profile)
        found.append(first_probs(harness)[0])
    assert found[0] < found[1] < found[2] == pytest.approx(first_probs(LoopHarness())[0], abs=1e-4)
    assert MOST_KEPT < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 0, "time_s": 0, "state": {}}', "version 0, not 7"),
        ('{"version": 7, "time_s": 0, "state": {}}', "speculation"),
        ('{"version": 7, "time_s": 0, "state": {"speculation": []}}', "list indices"),
        (
            '{"version": 7, "time_s": 0, "state": {"speculation": {"acceptance": []}}}',
            "has no attribute",
        ),
        ('{"version": 7, "time_s": NaN, "state": {}}', "NaN is not a finite number"),
        ('{"version": 7, "time_s": null, "state": {}}', "unsupported operand"),
        ("[]", "list indices"),
    ],
)
def test_estimates_that_cannot_be_used_are_logged(
    text: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = tmp_path / "profile-0123.json"
    profile.write_text(f'{{"learned": {text}}}')
    with caplog.at_level(logging.WARNING):
        assert not restore_learned(LoopHarness().loop, profile)
    assert message in caplog.text


def test_without_a_file_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not restore_learned(LoopHarness().loop, tmp_path / "profile-0123.json")
    assert not caplog.records


def test_a_profile_of_a_busy_machine_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes that take half of the profile's time remove it. Twice its time may be other load."""
    profile = tmp_path / "profile-0123.json"
    for factor, is_kept in ((0.5, False), (1.0, True), (2.0, True)):
        profile.write_text("{}")
        clock = VirtualClock()
        target = FakeTarget(CAPABILITIES, cost=replace(COST, target_base=factor), clock=clock)
        store_learned(served(target=target, clock=clock).loop, profile)
        assert profile.exists() is is_kept
    assert "predicted step times were" in caplog.text


def test_what_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store_learned(LoopHarness().loop, tmp_path / "file" / "profile-0123.json")
    assert "cannot be stored" in caplog.text
