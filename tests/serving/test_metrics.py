"""The meter: sums by hand, what a flush hands over and when, and the one thread of Triton's."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from harness import COST, record

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import PlannerSettings
from smartspec_py.core.types import DraftOption, FinishReason, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving import metric_families as families
from smartspec_py.serving.messages import LoopState, Progress
from smartspec_py.serving.metric_families import FAMILIES, Family, Kind
from smartspec_py.serving.metrics import FLUSH_S, Meter
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.step import Decision, Reason, StepRecord

DOCS = Path(__file__).parents[2] / "docs" / "operate" / "metrics.md"


class MemoryMetrics:
    """A sink that keeps everything by name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.observations: dict[str, list[float]] = {}

    def put(self, family: Family, labels: tuple[str, ...], value: float) -> None:
        name = family.name.removeprefix("smartspec_")
        assert len(labels) == len(family.labels)
        if family.kind is Kind.HISTOGRAM:
            self.observations.setdefault(name, []).append(value)
            return
        assert value >= 0 or family.kind is Kind.GAUGE, f"{name} falls"
        before = self.values.get((name, *labels), 0.0) if family.kind is Kind.COUNTER else 0.0
        self.values[name, *labels] = before + value


def new_meter() -> Meter:
    return Meter("draft_model", 4, "goodput", "Qwen/Q")


def step(
    verifications: Sequence[tuple[int, int]] = (),
    num_undrafted: int = 0,
    expected: tuple[float, float] = (0.0, 0.0),
    reason: Reason = Reason.PLANNED,
    cost: CostModel = COST,
    **fields: Any,
) -> StepRecord:
    """10 ms. expected: tokens and seconds of the plan."""
    events = [Event(n, (), *drafts) for n, drafts in enumerate(verifications)]
    events += [Event(len(events) + n, (1,)) for n in range(num_undrafted)]
    lengths = {event.sequence: event.num_drafted for event in events}
    option = DraftOption(4, (0.5,) * 4)
    views = [SequenceView(sequence, 10, 40, "goodput", (option,)) for sequence in lengths]
    decision = Decision(SpecPlan(lengths, *expected), views, cost, PlannerSettings(), reason)
    return record(decision, **{"events": events, "total_s": 0.01} | fields)


def flushed(meter: Meter) -> MemoryMetrics:
    """All that is new, at once."""
    metrics = MemoryMetrics()
    meter.flush_if_due(metrics.put, math.inf if meter.due_s is None else max(0.0, meter.due_s))
    return metrics


def test_names_follow_the_rules() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith("smartspec_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER), family.name
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM), family.name
        assert all(a < b for a, b in pairwise(family.buckets)), family.name


def test_the_docs_have_no_other_names() -> None:
    """In PromQL a histogram has its parts."""
    known = {family.name for family in FAMILIES}
    histograms = [family.name for family in FAMILIES if family.buckets]
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "count")}
    assert set(re.findall(r"\bsmartspec_\w+", DOCS.read_text())) <= known


def test_all_counters_are_there_before_anything_happened() -> None:
    """Two counters have 4 positions, one 3 reasons to end, one 3 to be refused, one 4 deciders, one
    3 causes."""
    values = flushed(new_meter()).values
    assert values.pop(("config_info", "draft_model", "4", "goodput", "Qwen/Q")) == 1
    counters = {f.name.removeprefix("smartspec_") for f in FAMILIES if f.kind is Kind.COUNTER}
    assert {name for name, *_ in values} == counters
    assert len(values) == len(counters) + 3 + 3 + 2 + 2 + 3 + 2
    assert set(values.values()) == {0}


def test_acceptance() -> None:
    """4 sequences: 2 of 4, 4 of 4, 0 of 2, and one without drafts. 6 of 10 in 3 verifications."""
    meter = new_meter()
    meter.add_step(step(verifications=[(4, 2), (4, 4), (2, 0)], num_undrafted=1))
    metrics = flushed(meter)
    expected = {"drafts": 3, "draft_tokens": 10, "accepted_tokens": 6}
    for name, value in expected.items():
        assert metrics.values[f"spec_decode_num_{name}_total",] == value
    assert metrics.values["spec_decode_disabled_steps_total",] == 1
    for stem, counts in (("draft", [3, 3, 2, 2]), ("accepted", [2, 2, 1, 1])):
        name = f"spec_decode_num_{stem}_tokens_per_pos_total"
        assert [metrics.values[name, str(p)] for p in range(1, 5)] == counts
    assert metrics.observations["spec_decode_proposed_length_tokens"] == [2.5]


def test_goodput_is_that_of_steps_without_prompt_chunks() -> None:
    """Expected 6 tokens in 20 ms and 4 in 30 ms, got 5 in 20 ms and 3 in 60 ms."""
    meter = new_meter()
    meter.add_step(step((), 1, (6, 0.02), num_generated=5, total_s=0.02))
    meter.add_step(step((), 1, (4, 0.03), num_generated=3, total_s=0.06))
    meter.add_step(step((), 1, (9, 0.03), num_prefill_tokens=64, total_s=0.5))
    meter.add_step(step(num_prefill_tokens=36, total_s=0.4))  # prompts alone: no plan
    metrics = flushed(meter)
    expected = {
        "token_goodput_predicted_tokens_per_second": 200,
        "token_goodput_actual_tokens_per_second": 100,
        "step_latency_predicted_seconds": 0.025,
        "step_time_seconds_total": 0.58,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 8,
    }
    assert {name: metrics.values[name,] for name in expected} == pytest.approx(expected)
    assert metrics.observations["step_latency_seconds"] == [0.4], "the last step"


def test_times_and_load_and_what_was_decided() -> None:
    meter = new_meter()
    first = replace(COST, target_base=1.1, target_slope=1.4, draft_factor=0.9)
    second = replace(COST, target_base=1.2, target_slope=1.5, draft_factor=0.8)
    meter.add_step(step((), 1, cost=first, draft_s=0.5, target_s=1.5))
    meter.set_state(LoopState(3, 2, 0.25, num_preemptions=2, time_errors=(0.3, 0.04)))
    meter.add_step(step((), 1, cost=second, reason=Reason.GUARD, draft_s=0.25, target_s=1))
    meter.set_state(LoopState(4, 0, 0.5, 3, num_switches=1, time_errors=(0.2, 0.05)))
    for host_s in (1.5, 4.0):
        meter.set_state(LoopState(4, 0, 0.5, 3, 1, (0.2, 0.05), {"grammar": host_s}))
    meter.add_step(step(num_prefill_tokens=64))  # nothing decoded, nothing was decided
    expected = {
        ("draft_time_seconds_total",): 0.75,
        ("verify_time_seconds_total",): 2.5,
        ("num_preemptions_total",): 3,
        ("num_requests_running",): 4,
        ("num_requests_waiting",): 0,
        ("kv_cache_utilization",): 0.5,
        ("guard_switches_total",): 1,
        ("request_host_time_seconds_total", "grammar"): 4.0,
        ("decoding_steps_total", "planned"): 1,
        ("decoding_steps_total", "guard"): 1,
        ("decoding_steps_total", "probe"): 0,
        ("cost_factor", "target_base"): 1.2,
        ("cost_factor", "target_slope"): 1.5,
        ("cost_factor", "draft"): 0.8,
        ("step_latency_relative_error", "profile"): 0.2,
        ("step_latency_relative_error", "corrected"): 0.05,
    }
    values = flushed(meter).values
    assert {series: values[series] for series in expected} == expected


@pytest.mark.parametrize(
    ("reason", "series"),
    [
        (FinishReason.STOP, ("request_success_total", "stop")),
        (FinishReason.LENGTH, ("request_success_total", "length")),
        (FinishReason.DEADLINE, ("request_success_total", "deadline")),
        (FinishReason.CANCELLED, ("request_cancelled_total",)),
        (None, ("request_failed_total",)),
    ],
)
@pytest.mark.parametrize(
    ("times", "num_generated", "expected"),
    [
        # Waited 1 s, first token after 2 s; the other 5 took 0.5 s each; over after 5 s.
        ((1.0, 2.0, 3.0, 5.5), 6, [1.0, 2.0, 0.5, 5.0]),
        ((1.0, 2.0, 3.0, 3.0), 1, [1.0, 2.0, None, 5.0]),  # one token has no next
        ((1.0, None, None, None), 0, [None, None, None, 5.0]),
    ],
)
def test_how_requests_end(
    reason: FinishReason | None,
    series: tuple[str, ...],
    times: tuple[float | None, ...],
    num_generated: int,
    expected: list[float | None],
) -> None:
    """Cancelled and failed requests do not count in the latencies of whole requests."""
    meter = new_meter()
    meter.add_request(Progress(0, 0, 0, "", 0, *times), 6.0, num_generated, reason)
    metrics = flushed(meter)
    ended = {s: n for s, n in metrics.values.items() if n and s[0].startswith("request_")}
    assert ended == {series: 1}
    latencies = (families.QUEUE_TIME, families.TTFT, families.TPOT, families.E2E)
    names = [family.name.removeprefix("smartspec_") for family in latencies]
    is_whole = series[0] == "request_success_total"
    found = [metrics.observations.get(name, [None])[0] for name in names]
    assert found == (expected if is_whole else [*expected[:2], None, None])


def test_a_flush_hands_over_what_changed() -> None:
    meter = new_meter()
    meter.add_step(step(num_generated=3))
    meter.set_state(LoopState(1, 0))
    flushed(meter)
    meter.add_step(step(num_generated=4))
    meter.set_state(LoopState(2, 0))
    metrics = flushed(meter)
    expected = {("generation_tokens_total",): 4, ("num_requests_running",): 2}
    assert metrics.values == expected
    assert metrics.observations == {"step_latency_seconds": [0.01]}
    metrics = flushed(meter)
    assert (metrics.values, metrics.observations) == ({}, {})


def test_flushes_are_due_while_something_changed() -> None:
    """At once at the start, then FLUSH_S after the last one, and not where nothing is new. What
    was lost by an error of the sink is not sent again."""
    meter, metrics = new_meter(), MemoryMetrics()
    assert meter.due_s == -math.inf
    with pytest.raises(RuntimeError, match="gone"):
        meter.flush_if_due(MagicMock(side_effect=RuntimeError("gone")), 100.0)
    assert meter.due_s is None
    meter.add_rejection(ErrorCode.INTERNAL)
    assert meter.due_s == 100.0 + FLUSH_S
    meter.flush_if_due(metrics.put, 100.0 + 0.9 * FLUSH_S)
    assert metrics.values == {}
    meter.flush_if_due(metrics.put, 100.0 + FLUSH_S)
    assert metrics.values == {("request_rejected_total", "internal"): 1}
    assert meter.due_s is None


def test_triton_has_one_object_for_each_series_and_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType("triton_python_backend_utils")
    module.MetricFamily = MagicMock()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics", raising=False)
    loaded = importlib.import_module("smartspec_py.triton_metrics")
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics")
    metrics = loaded.TritonMetrics("smartspec", "1")
    for position in ("1", "2", "1"):
        metrics.put(families.ACCEPTED_AT, (position,), 1)
    metrics.put(families.RUNNING, (), 3)
    metrics.put(families.PROPOSED_LENGTHS, (), 2)
    model = {"model": "smartspec", "version": "1"}
    make = module.MetricFamily.return_value.Metric
    assert make.call_args_list == [
        call(labels=model | {"position": "1"}, buckets=None),
        call(labels=model | {"position": "2"}, buckets=None),
        call(labels=model, buckets=None),
        call(labels=model, buckets=list(map(float, families.PROPOSED_LENGTHS.buckets))),
    ]
    calls = [call.increment(1)] * 3 + [call.set(3), call.observe(2)]
    assert make.return_value.method_calls == calls
    with ThreadPoolExecutor() as other, pytest.raises(AssertionError, match="another thread"):
        other.submit(metrics.put, families.RUNNING, (), 1).result()
