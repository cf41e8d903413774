"""Policies in turns in one process, on an engine that is made up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from runs import ABOUT, LIMITS, SETTINGS, Heard, load
from servers import fake_config

from smartspec_bench.document import read
from smartspec_bench.lockstep import OpenFeed, Side, SlotFeed, policies_of, run, serve
from smartspec_bench.plan import Due
from smartspec_bench.prompts import Prompt, generated
from smartspec_bench.session import Kept
from smartspec_py.serving.build import build_engine
from smartspec_testing.clock import Stopwatch

HOUR_S = 3600.0
FIELDS = {"max_tokens": 8, "temperature": 0.0, "reuse_prefix": False}


def side(policy: str, step_s: float = 0.0) -> Side:
    config = fake_config(step_s, limits=LIMITS)
    return Side(policy, build_engine(config, Path.cwd()), config, FIELDS)


def prompts(number: int) -> list[Prompt]:
    return list(islice(generated("mixed"), number))


def test_a_stopwatch_counts_what_runs_and_what_is_slept() -> None:
    watch = Stopwatch()
    time.sleep(0.02)
    assert watch.now() == 0.0
    with watch.running():
        time.sleep(0.01)
        inside = watch.now()
    assert 0.01 <= inside <= watch.now() == watch.ran_s
    watch.sleep(HOUR_S)
    assert watch.now() == watch.ran_s + HOUR_S
    with pytest.raises(ValueError, match="-1"):
        watch.sleep(-1)


def test_idle_hours_pass_at_once_and_are_in_no_latency() -> None:
    one = side("none")
    due = [Due(hour * HOUR_S, prompt) for hour, prompt in enumerate(prompts(3))]
    one.begin(OpenFeed(due))
    start_s = time.monotonic()
    serve([one])
    assert time.monotonic() - start_s < 60.0
    assert [e.timing.scheduled_s for e in one.exchanges] == [0.0, HOUR_S, 2 * HOUR_S]
    assert all(e.timing.is_finished and e.num_tokens for e in one.exchanges)
    assert all(0 < e.chunk_s[-1] - e.scheduled_s < 60.0 for e in one.exchanges)
    assert one.served_s < 60.0 < one.now_s


def test_latency_counts_from_when_a_request_was_due_and_queues_count() -> None:
    """8 tokens at 5 ms each on 4 rows: the ninth of nine at once waits for two before it."""
    one = side("none", step_s=0.005)
    one.begin(OpenFeed([Due(1.0, prompt) for prompt in prompts(9)]))
    serve([one])
    first, *_, last = sorted(e.chunk_s[-1] - e.scheduled_s for e in one.exchanges)
    assert first >= 8 * 0.005
    assert last >= 3 * 8 * 0.005


def test_slots_send_the_next_when_one_has_ended() -> None:
    one = side("none")
    one.begin(SlotFeed(iter(prompts(5)), 2))
    serve([one])
    starts = [e.scheduled_s for e in one.exchanges]
    ends = sorted(e.chunk_s[-1] for e in one.exchanges)
    assert starts[:2] == [0.0, starts[1]]
    assert all(end <= start for start, end in zip(starts[2:], ends, strict=False))
    feed = SlotFeed(iter([]), 1)
    assert feed.next_s(0.0, 1) == math.inf
    assert feed.next_s(0.0, 0) is None


def test_who_served_least_has_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side whose steps are four times as long has a quarter of the turns, while both are busy."""
    slow, fast = side("none", step_s=0.008), side("none", step_s=0.002)
    turns: list[str] = []

    def noted(name: str, step: Callable[[], None]) -> None:
        turns.append(name)
        step()

    for name, one in (("slow", slow), ("fast", fast)):
        monkeypatch.setattr(one, "step", partial(noted, name, one.step))
        one.begin(OpenFeed([Due(0.0, prompt) for prompt in prompts(4)]))
    serve([slow, fast])
    both = turns[: len(turns) - turns[::-1].index("fast")]
    assert both.count("fast") > 2 * both.count("slow") > 0
    assert turns[-1] == "slow"


def test_every_policy_has_the_same_requests_and_texts() -> None:
    sides = [side("none"), side("fixed:2"), side("goodput")]
    for one in sides:
        one.begin(OpenFeed([Due(0.0, prompt) for prompt in prompts(6)]))
    serve(sides)
    counts = [[e.num_tokens for e in one.exchanges] for one in sides]
    assert counts[0] == counts[1] == counts[2]
    assert [one.exchanges[0].accept_prob is not None for one in sides][:2] == [False, True]


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases of a live run, with their order, counts and verdicts."""
    monkeypatch.setattr("smartspec_bench.warm_up.COPY_BYTES", 1 << 22)
    settings = replace(SETTINGS, saturation_s=0.05)
    path = tmp_path / "run.json"
    kept, heard = Kept(ABOUT, path), Heard()
    sides = {policy: side(policy, step_s=0.001) for policy in policies_of(settings)}
    run(sides, LIMITS.max_sequences, load(settings), kept, heard.listener)
    whole = read(path)
    assert heard.left == list(range(14, -1, -1))
    assert whole.phases == heard.phases
    assert all(phase.num_failed == 0 for phase in whole.phases)
    assert set(whole.ceilings.saturation_rps) == {"none", "fixed:2", "goodput", "goodput_global"}
    assert all(rps > 0 for rps in whole.ceilings.saturation_rps.values())
    assert {c.shape for c in whole.comparisons} == set(settings.shapes)
    assert {p.mean_draft_len for p in whole.phases if p.policy == "fixed:2"} != {0.0}
    assert any("lockstep" in note for note in whole.ceilings.notes)


def test_minutes_end_a_run_between_two_points(tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("none", "goodput"), saturation_s=0.05)
    kept, heard = Kept(ABOUT, tmp_path / "run.json"), Heard()
    sides = {policy: side(policy) for policy in policies_of(settings)}
    run(sides, LIMITS.max_sequences, load(settings, minutes=1e-9), kept, heard.listener)
    assert heard.phases == []
