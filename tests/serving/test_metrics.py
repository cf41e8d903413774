"""The meter: sums by hand, what a flush hands over and when, and the one thread of Triton's."""

from __future__ import annotations

import importlib
import math
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import COST, record
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import PlannerSettings
from smartspec_py.core.types import DraftOption, FinishReason, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.messages import LoopState, Progress
from smartspec_py.serving.metric_families import FAMILIES, Family, Kind, Labels, Series
from smartspec_py.serving.metrics import FLUSH_S, Meter
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.step import Decision, Reason, StepRecord

DOCS = Path(__file__).parents[2] / "docs" / "operate" / "metrics.md"
SPEC = "spec_decode_"


class MemoryMetrics:
    """A sink that keeps everything by (name, labels), and takes only what the table has."""

    def __init__(self) -> None:
        self._families = {family.name: family for family in FAMILIES}
        self.values: dict[Series, float] = {}
        self.observations: dict[str, list[float]] = {}

    def put(self, name: str, labels: Labels, value: float) -> None:
        family = self._families[name]
        assert tuple(label for label, _ in labels) == family.labels, f"{name} has other labels"
        if family.kind is Kind.HISTOGRAM:
            self.observations.setdefault(name.removeprefix("smartspec_"), []).append(value)
        elif family.kind is Kind.COUNTER:
            assert value >= 0, f"{name} falls"
            self.values[name, labels] = self.values.get((name, labels), 0.0) + value
        else:
            self.values[name, labels] = value

    def of(self, name: str, **labels: str) -> float:
        return self.values[f"smartspec_{name}", tuple(labels.items())]


def new_meter() -> Meter:
    return Meter("draft_model", 4, "goodput")


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


def flushed(meter: Meter, metrics: MemoryMetrics | None = None) -> MemoryMetrics:
    """All that is new, at once."""
    metrics = metrics or MemoryMetrics()
    meter.flush_if_due(metrics.put, math.inf if meter.due_s is None else max(0.0, meter.due_s))
    return metrics


# The table


def test_names_follow_the_rules() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("smartspec_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER), family.name
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM), family.name
        assert all(a < b for a, b in pairwise(family.buckets)), family.name


def table_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |"


def test_the_docs_have_the_table_and_the_buckets_and_no_other_names() -> None:
    """In PromQL a histogram has its parts."""
    text = DOCS.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `smartspec_")]
    assert rows == [table_row(family) for family in FAMILIES]
    items = [" ".join(item.split()) for item in text.split("\n- ")]
    histograms = [family for family in FAMILIES if family.buckets]
    for family in histograms:
        assert f"`{family.name}`: {', '.join(f'{edge:g}' for edge in family.buckets)}" in items
    known = {family.name for family in FAMILIES}
    known |= {f"{family.name}_{part}" for family in histograms for part in ("bucket", "count")}
    assert set(re.findall(r"\bsmartspec_\w+", text)) <= known


# Steps


def test_all_counters_are_there_before_anything_happened() -> None:
    """Two counters have 4 positions, one 3 reasons to end, one 3 to be refused, one 4 deciders."""
    metrics = flushed(new_meter())
    assert metrics.of("config_info", method="draft_model", k_max="4", policy="goodput") == 1
    counters = {family.name for family in FAMILIES if family.kind is Kind.COUNTER}
    values = {series: v for series, v in metrics.values.items() if series[0] in counters}
    assert {name for name, _ in values} == counters
    assert len(values) == len(metrics.values) - 1 == len(counters) + 3 + 3 + 2 + 2 + 3
    assert set(values.values()) == {0}


def test_acceptance_of_a_step() -> None:
    """4 sequences: 2 of 4, 4 of 4, 0 of 2, and one without drafts. 6 of 10 in 3 verifications."""
    meter = new_meter()
    meter.add_step(step(verifications=[(4, 2), (4, 4), (2, 0)], num_undrafted=1))
    metrics = flushed(meter)
    assert metrics.of(f"{SPEC}num_drafts_total") == 3
    assert metrics.of(f"{SPEC}num_draft_tokens_total") == 10
    assert metrics.of(f"{SPEC}num_accepted_tokens_total") == 6
    assert metrics.of(f"{SPEC}disabled_steps_total") == 1
    for stem, expected in (("draft", [3, 3, 2, 2]), ("accepted", [2, 2, 1, 1])):
        name = f"{SPEC}num_{stem}_tokens_per_pos_total"
        assert [metrics.of(name, position=str(p)) for p in range(1, 5)] == expected
    assert metrics.observations[f"{SPEC}proposed_length_tokens"] == [2.5]


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6))), st.booleans()),
        max_size=20,
    )
)
def test_positions_add_up_to_totals(steps: list[tuple[list[tuple[int, int]], bool]]) -> None:
    """However often it is flushed in between, and for drafts longer than k_max too."""
    meter, metrics = new_meter(), MemoryMetrics()
    pairs = []
    for verifications, is_flushed in steps:
        verified = [(k, min(k, a)) for k, a in verifications]
        pairs += verified
        meter.add_step(step(verifications=verified))
        if is_flushed:
            flushed(meter, metrics)
    flushed(meter, metrics)
    assert metrics.of(f"{SPEC}num_drafts_total") == len(pairs)
    for index, stem in enumerate(("num_draft_tokens", "num_accepted_tokens")):
        by_position = [
            value
            for (name, _), value in sorted(metrics.values.items())
            if name == f"smartspec_{SPEC}{stem}_per_pos_total"
        ]
        total = metrics.of(f"{SPEC}{stem}_total")
        assert sum(by_position) == total == sum(pair[index] for pair in pairs)
        assert by_position == sorted(by_position, reverse=True)


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
    assert {name: metrics.of(name) for name in expected} == pytest.approx(expected)
    assert metrics.observations["step_latency_seconds"] == [0.4], "the last step"


def test_times_and_load_and_what_was_decided() -> None:
    meter = new_meter()
    first = replace(COST, target_base=1.1, target_slope=1.4, draft_factor=0.9)
    second = replace(COST, target_base=1.2, target_slope=1.5, draft_factor=0.8)
    meter.add_step(step(num_undrafted=1, cost=first, draft_s=0.5, target_s=1.5))
    meter.set_state(LoopState(3, 2, 0.25, num_preemptions=2, time_errors=(0.3, 0.04)))
    meter.add_step(
        step(num_undrafted=1, cost=second, reason=Reason.GUARD, draft_s=0.25, target_s=1)
    )
    meter.set_state(LoopState(4, 0, 0.5, 3, num_switches=1, time_errors=(0.2, 0.05)))
    meter.add_step(step(num_prefill_tokens=64))  # nothing decoded, nothing was decided
    metrics = flushed(meter)
    expected = {
        "draft_time_seconds_total": 0.75,
        "verify_time_seconds_total": 2.5,
        "num_preemptions_total": 3,
        "num_requests_running": 4,
        "num_requests_waiting": 0,
        "kv_cache_utilization": 0.5,
        "guard_switches_total": 1,
    }
    assert {name: metrics.of(name) for name in expected} == expected
    by_label = {
        ("decoding_steps_total", "decider"): {"planned": 1, "guard": 1, "probe": 0},
        ("cost_factor", "part"): {"target_base": 1.2, "target_slope": 1.5, "draft": 0.8},
        ("step_latency_relative_error", "predictor"): {"profile": 0.2, "corrected": 0.05},
    }
    for (name, label), by_value in by_label.items():
        assert {v: metrics.of(name, **{label: v}) for v in by_value} == by_value


# Requests


@pytest.mark.parametrize(
    ("reason", "name", "labels", "is_whole"),
    [
        (FinishReason.STOP, "success", {"finished_reason": "stop"}, True),
        (FinishReason.LENGTH, "success", {"finished_reason": "length"}, True),
        (FinishReason.DEADLINE, "success", {"finished_reason": "deadline"}, True),
        (FinishReason.CANCELLED, "cancelled", {}, False),
        (None, "failed", {}, False),
    ],
)
@pytest.mark.parametrize(
    ("times", "num_generated", "expected"),
    [
        # Waited 1 s, first token after 2 s; the other 5 took 0.5 s each; over after 5 s.
        ((1.0, 2.0, 3.0, 5.5), 6, [1.0, 2.0, 0.5, 5.0]),
        ((1.0, 2.0, 3.0, 3.0), 1, [1.0, 2.0, None, 5.0]),  # one token has no next
        ((1.0, 2.0, None, None), 0, [1.0, None, None, 5.0]),
        ((1.0, None, None, None), 0, [None, None, None, 5.0]),
    ],
)
def test_how_requests_end(
    reason: FinishReason | None,
    name: str,
    labels: dict[str, str],
    is_whole: bool,
    times: tuple[float | None, ...],
    num_generated: int,
    expected: list[float | None],
) -> None:
    """Cancelled and failed requests do not count in the latencies of whole requests."""
    meter = new_meter()
    meter.add_request(Progress(0, 0, 0, "", 0, *times), 6.0, num_generated, reason)
    metrics = flushed(meter)
    ends = [f"smartspec_request_{end}_total" for end in ("success", "cancelled", "failed")]
    assert sum(value for (end, _), value in metrics.values.items() if end in ends) == 1
    assert metrics.of(f"request_{name}_total", **labels) == 1
    found = [
        metrics.observations.get(f"{histogram}_seconds", [None])[0]
        for histogram in (
            *("request_queue_time", "time_to_first_token"),
            *("time_per_output_token", "e2e_request_latency"),
        )
    ]
    assert found == (expected if is_whole else [*expected[:2], None, None])


@pytest.mark.parametrize("code", ErrorCode)
def test_rejections(code: ErrorCode) -> None:
    meter = new_meter()
    meter.add_rejection(code)
    assert flushed(meter).of("request_rejected_total", reason=code.name.lower()) == 1


# Flushing


def test_a_flush_hands_over_what_changed() -> None:
    meter = new_meter()
    meter.add_step(step(num_generated=3))
    meter.set_state(LoopState(1, 0))
    flushed(meter)
    meter.add_step(step(num_generated=4))
    meter.set_state(LoopState(2, 0))
    metrics = flushed(meter)
    assert metrics.values == {
        ("smartspec_generation_tokens_total", ()): 4,
        ("smartspec_num_requests_running", ()): 2,
    }
    assert metrics.observations == {"step_latency_seconds": [0.01]}
    metrics = flushed(meter)
    assert (metrics.values, metrics.observations) == ({}, {})


def test_flushes_are_due_while_something_changed() -> None:
    """At once at the start, then FLUSH_S after the last one, and not where nothing is new. What
    was lost by an error of the sink is not sent again."""
    meter, metrics = new_meter(), MemoryMetrics()
    assert meter.due_s == -math.inf

    def broken(name: str, labels: Labels, value: float) -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        meter.flush_if_due(broken, 100.0)
    assert meter.due_s is None
    meter.add_rejection(ErrorCode.INTERNAL)
    assert meter.due_s == 100.0 + FLUSH_S
    meter.flush_if_due(metrics.put, 100.0 + 0.9 * FLUSH_S)
    assert metrics.values == {}
    meter.flush_if_due(metrics.put, 100.0 + FLUSH_S)
    assert list(metrics.values.values()) == [1]
    assert meter.due_s is None


# Triton's


class FakeFamily:
    """Stands in for pb_utils.MetricFamily: keeps every metric that was made, and its values."""

    COUNTER, GAUGE, HISTOGRAM = Kind
    made: list[tuple[str, dict[str, str], list[float] | None]]
    calls: list[tuple[str, float]]

    def __init__(self, name: str, description: str, kind: Kind) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None) -> Any:
        self.made.append((self.name, labels, buckets))
        return self

    def increment(self, value: float) -> None:
        self.calls.append(("increment", value))

    def set(self, value: float) -> None:
        self.calls.append(("set", value))

    def observe(self, value: float) -> None:
        self.calls.append(("observe", value))


@pytest.fixture
def triton_metrics(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TritonMetrics on a stand-in of Triton's module."""
    module = ModuleType("triton_python_backend_utils")
    FakeFamily.made, FakeFamily.calls = [], []
    module.MetricFamily = FakeFamily
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics", raising=False)
    loaded = importlib.import_module("smartspec_py.triton_metrics")
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics")
    return loaded.TritonMetrics("smartspec", "1")


def test_each_series_has_one_object(triton_metrics: Any) -> None:
    name = f"smartspec_{SPEC}num_accepted_tokens_per_pos_total"
    for position in ("1", "2", "1"):
        triton_metrics.put(name, (("position", position),), 1)
    triton_metrics.put("smartspec_num_requests_running", (), 3)
    triton_metrics.put(f"smartspec_{SPEC}proposed_length_tokens", (), 2)
    model = {"model": "smartspec", "version": "1"}
    assert FakeFamily.made[:3] == [
        (name, model | {"position": "1"}, None),
        (name, model | {"position": "2"}, None),
        ("smartspec_num_requests_running", model, None),
    ]
    assert FakeFamily.made[3][2][:3] == [0.0, 0.5, 1.0]
    assert FakeFamily.calls == [*[("increment", 1)] * 3, ("set", 3), ("observe", 2)]


def test_only_the_first_thread_may_use_it(triton_metrics: Any) -> None:
    name = "smartspec_num_requests_running"
    triton_metrics.put(name, (), 1)
    errors: list[str] = []

    def use() -> None:
        try:
            triton_metrics.put(name, (), 1)
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == [f"{name}: another thread owns the metrics"]
