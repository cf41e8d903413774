"""Policies in turns in one process, on an engine that is made up."""

from __future__ import annotations

import math
import time
from itertools import islice
from pathlib import Path

import pytest
from servers import fake_config

from smartspec_bench.lockstep import Feed, Side, run, serve
from smartspec_bench.plan import SHAPES, Due, Settings, points, requests, rounds
from smartspec_bench.prompts import Prompt, generated
from smartspec_bench.results import Recorder, read
from smartspec_py.config import LimitsConfig, LookupConfig
from smartspec_py.serving.build import build_engine
from smartspec_testing.clock import Stopwatch

HOUR_S = 3600.0
LIMITS = LimitsConfig(max_sequences=4)
SETTINGS = Settings(
    policies=("none", "fixed:2", "goodput"),
    shapes=SHAPES,
    loads=(0.5,),
    repeats=2,
    seconds=0.05,
    num_closed=2,
    saturation_s=0.05,
    max_tokens=8,
)
FIELDS = {"max_tokens": 8, "temperature": 0.0, "reuse_prefix": False}


def side(policy: str, step_s: float = 0.0) -> Side:
    config = fake_config(step_s, limits=LIMITS)
    return Side(policy, build_engine(config, Path.cwd()), config.limits, FIELDS)


def prompts(number: int) -> list[Prompt]:
    return list(islice(generated("mixed"), number))


def test_a_stopwatch_counts_what_runs_and_what_is_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs from second 10 to 13; then it sleeps an hour."""
    times = iter((10.0, 12.0, 13.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    watch = Stopwatch()
    assert watch.now() == 0.0
    with watch.running():
        assert watch.now() == 2.0
    assert watch.now() == watch.ran_s == 3.0
    watch.sleep(HOUR_S)
    assert watch.now() == 3.0 + HOUR_S
    with pytest.raises(ValueError, match="-1"):
        watch.sleep(-1)


def test_earlier_texts_are_drafted_within_a_phase_only() -> None:
    """The fake engine generates 8 different tokens, the same ones after the same prompt."""
    keys = {"lookup": LookupConfig(history_tokens=1000)}
    config = fake_config(limits=LIMITS).model_copy(update=keys)
    fields = {**FIELDS, "reuse_prefix": True, "proposer": "prompt_lookup"}
    one = Side("fixed:2", build_engine(config, Path.cwd()), config.limits, fields)
    for _ in range(2):
        one.begin(Feed([Due(0.0, prompt) for prompt in prompts(1) * 2], num_slots=1))
        serve([one])
        accepted = [e.last["total_accepted_draft_tokens"] for e in one.exchanges]
        assert accepted[0] == 0
        assert accepted[1] >= 3


def test_idle_hours_pass_at_once_and_are_in_no_latency() -> None:
    one = side("none")
    due = [Due(hour * HOUR_S, prompt) for hour, prompt in enumerate(prompts(3))]
    one.begin(Feed(due))
    serve([one])
    assert [e.timing.scheduled_s for e in one.exchanges] == [0.0, HOUR_S, 2 * HOUR_S]
    assert all(e.timing.is_finished and e.num_tokens for e in one.exchanges)
    assert all(0 < e.chunk_s[-1] - e.scheduled_s < HOUR_S for e in one.exchanges)
    assert one.served_s < HOUR_S < one.now_s


def test_latency_counts_from_when_a_request_was_due_and_queues_count() -> None:
    """8 tokens at 5 ms each on 4 rows: the ninth of nine at once waits for two before it."""
    one = side("none", step_s=0.005)
    one.begin(Feed([Due(1.0, prompt) for prompt in prompts(9)]))
    serve([one])
    first, *_, last = sorted(e.chunk_s[-1] - e.scheduled_s for e in one.exchanges)
    assert first >= 8 * 0.005
    assert last >= 3 * 8 * 0.005


def test_slots_send_the_next_when_one_has_ended() -> None:
    one = side("none")
    one.begin(Feed([Due(0.0, prompt) for prompt in prompts(5)], 2))
    serve([one])
    starts = [e.scheduled_s for e in one.exchanges]
    ends = sorted(e.chunk_s[-1] for e in one.exchanges)
    assert starts[:2] == [0.0, starts[1]]
    assert all(end <= start for start, end in zip(starts[2:], ends, strict=False))
    feed = Feed([], 1)
    assert feed.next_s(0.0, 1) == math.inf
    assert feed.next_s(0.0, 0) is None


def test_who_served_least_has_the_next_step() -> None:
    """Steps of 4 s and of 1 s, three of each: the first turn goes to the first of two equals."""
    turns: list[str] = []

    class Fake:
        def __init__(self, name: str, step_s: float) -> None:
            self.name, self.step_s, self.served_s = name, step_s, 0.0

        @property
        def is_over(self) -> bool:
            return turns.count(self.name) == 3

        def step(self) -> None:
            turns.append(self.name)
            self.served_s += self.step_s

    serve([Fake("slow", 4.0), Fake("fast", 1.0)])  # type: ignore[list-item]
    assert turns == ["slow", "fast", "fast", "fast", "slow", "slow"]


def test_every_policy_has_the_same_requests_and_texts() -> None:
    sides = [side("none"), side("fixed:2"), side("goodput")]
    for one in sides:
        one.begin(Feed([Due(0.0, prompt) for prompt in prompts(6)]))
    serve(sides)
    assert sides[0].tokens == sides[1].tokens == sides[2].tokens
    assert all(sides[0].tokens)


def test_a_run(tmp_path: Path) -> None:
    """All shapes in two repeats, for three policies; the file has what the recorder was given."""
    path = tmp_path / "run.json"
    recorder = Recorder({"title": "a test"}, path)
    sides = {policy: side(policy, step_s=0.001) for policy in SETTINGS.policies}
    run(sides, LIMITS.max_sequences, SETTINGS, recorder)
    found = read(path)
    assert found.phases == recorder.document.phases
    assert len(found.phases) == len(SHAPES) * 2 * 3
    assert {phase.shape for phase in found.phases} == set(SHAPES)
    assert all(phase.num_failed == 0 for phase in found.phases)
    assert all(phase.num_same_texts == phase.num_finished > 0 for phase in found.phases)
    drafted = {phase.policy: phase.mean_draft_len for phase in found.phases}
    assert drafted["none"] == 0.0 < drafted["fixed:2"]
    assert found.about["saturation_rps"] > 0


def test_minutes_end_a_run_between_two_points() -> None:
    recorder = Recorder({}, None)
    sides = {policy: side(policy) for policy in SETTINGS.policies}
    run(sides, LIMITS.max_sequences, SETTINGS, recorder, minutes=-1.0)
    assert recorder.document.phases == []


def test_saturation_is_measured_until_a_request_has_ended() -> None:
    """However short the time is, and however slow the machine: 8 requests are open, 4 of which are
    served at once with 8 steps of at least 2 ms each, so at most 250 requests end per second."""
    sides = {"none": side("none", step_s=0.002)}
    short = Settings(policies=("none",), shapes=("closed",), saturation_s=1e-9, max_tokens=8)
    recorder = Recorder({}, None)
    run(sides, LIMITS.max_sequences, short, recorder, minutes=-1.0)
    assert 0 < recorder.document.about["saturation_rps"] < 1000


def test_arrivals_have_the_rates_of_the_plan() -> None:
    """20 requests per second at saturation. 50 seconds at 0.5 are 500 +- 100 requests: 4.5 standard
    deviations. The step's first and second 50 seconds have loads of 0.025 and 0.4."""
    settings = Settings(loads=(0.5,), seconds=50.0, num_closed=5)
    found = points(settings, 20.0)
    times = {p.shape: [one.time_s for one in requests(p, settings, 1)] for p in found}
    assert times["closed"] == [0.0] * 5
    assert abs(len(times["steady"]) - 500) < 100
    first, second = (sum(s // 50 == part for s in times["step"]) for part in (0, 1))
    assert second > 5 * first
    again = [(repeat, point.shape) for repeat, point, _ in rounds(found, settings)]
    assert again == [(repeat, point.shape) for repeat, point, _ in rounds(found, settings)]
    assert len(again) == settings.repeats * 3
