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
from smartspec_py.serving.messages import LoopState, Times
from smartspec_py.serving.metric_families import FAMILIES, Family, Kind, Labels, Series
from smartspec_py.serving.metrics import (
    FLUSH_S,
    NUM_STEPS_SHOWN,
    ConfigInfo,
    Meter,
    NoMetrics,
)
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.step import Decision, Reason, StepRecord

DOCS = Path(__file__).parents[2] / "docs" / "operate" / "metrics.md"
INFO = ConfigInfo(method="draft_model", k_max=4, policy="goodput")
SPEC = "smartspec_spec_decode_"
TIMES = Times(1_000_000_000, 1_100_000_000, 1_200_000_000, 1_500_000_000)
"""Waited 0.1 s, first token after 0.2 s, 30 more in 0.3 s."""


class MemoryMetrics(NoMetrics):
    """A sink that keeps everything by (name, labels), and takes only what the table has."""

    def __init__(self) -> None:
        self._families = {family.name: family for family in FAMILIES}
        self.values: dict[Series, float] = {}
        self.observations: dict[Series, list[float]] = {}

    def increment(self, name: str, labels: Labels, by: float) -> None:
        assert by >= 0, f"{name} falls"
        series = self._checked(Kind.COUNTER, name, labels)
        self.values[series] = self.values.get(series, 0.0) + by

    def set(self, name: str, labels: Labels, value: float) -> None:
        self.values[self._checked(Kind.GAUGE, name, labels)] = value

    def observe(self, name: str, labels: Labels, value: float) -> None:
        series = self._checked(Kind.HISTOGRAM, name, labels)
        self.observations.setdefault(series, []).append(value)

    def _checked(self, kind: Kind, name: str, labels: Labels) -> Series:
        family = self._families[name]
        assert family.kind is kind, f"{name} is a {family.kind}"
        assert tuple(label for label, _ in labels) == family.labels, f"{name} has other labels"
        return name, labels


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
    views = [view_of(sequence) for sequence in lengths]
    plan = SpecPlan(lengths, *expected)
    decision = Decision(plan, views, cost, PlannerSettings(), reason)
    return record(decision, **{"events": events, "total_s": 0.01} | fields)


def view_of(sequence: int) -> SequenceView:
    return SequenceView(sequence, 10, 40, "goodput", (DraftOption(4, (0.5,) * 4),))


def flushed(meter: Meter) -> MemoryMetrics:
    metrics = MemoryMetrics()
    flush(meter, metrics)
    return metrics


def flush(meter: Meter, metrics: NoMetrics) -> None:
    """All that is new, at once."""
    now_s = 0.0 if meter.due_s is None else max(0.0, meter.due_s)
    while meter.due_s is not None and meter.due_s <= now_s:
        meter.flush_if_due(metrics, now_s)


def at(name: str, position: int) -> tuple[str, Labels]:
    return f"{SPEC}{name}_per_pos_total", (("position", str(position)),)


# The table


def test_names_follow_the_rules() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("smartspec_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER), family.name
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM), family.name
        assert all(a < b for a, b in pairwise(family.buckets)), family.name
        assert "|" not in family.meaning


def table_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |"


def test_the_docs_have_the_table() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `smartspec_")]
    assert rows == [table_row(family) for family in FAMILIES]


def test_the_docs_have_the_buckets() -> None:
    items = [" ".join(item.split()) for item in DOCS.read_text().split("\n- ")]
    for family in FAMILIES:
        if family.buckets:
            edges = ", ".join(f"{edge:g}" for edge in family.buckets)
            assert f"`{family.name}`: {edges}" in items


def test_the_docs_ask_for_no_other_names() -> None:
    """In PromQL a histogram has its parts."""
    parts = {"": Kind, "_bucket": [Kind.HISTOGRAM], "_count": [Kind.HISTOGRAM]}
    known = {
        f.name + suffix for suffix, kinds in parts.items() for f in FAMILIES if f.kind in kinds
    }
    assert set(re.findall(r"\bsmartspec_\w+", DOCS.read_text())) <= known


# Steps


def test_all_counters_are_there_before_anything_happened() -> None:
    """Of the counters two have 4 positions, one 3 reasons to end, one 3 to be refused, and one 4
    deciders."""
    values = flushed(Meter(INFO)).values
    counters = [family for family in FAMILIES if family.kind is Kind.COUNTER]
    assert {name for name, _ in values} == {family.name for family in counters} | {
        "smartspec_config_info"
    }
    assert len(values) == len(counters) + 3 + 3 + 2 + 2 + 3 + 1
    labels = (("method", "draft_model"), ("k_max", "4"), ("policy", "goodput"))
    assert values.pop(("smartspec_config_info", labels)) == 1
    assert set(values.values()) == {0}


def test_acceptance_of_a_step() -> None:
    """4 sequences: 2 of 4, 4 of 4, 0 of 2, and one without drafts. 6 of 10 in 3 verifications."""
    meter = Meter(INFO)
    meter.add_step(step(verifications=[(4, 2), (4, 4), (2, 0)], num_undrafted=1))
    metrics = flushed(meter)
    assert metrics.values[f"{SPEC}num_drafts_total", ()] == 3
    assert metrics.values[f"{SPEC}num_draft_tokens_total", ()] == 10
    assert metrics.values[f"{SPEC}num_accepted_tokens_total", ()] == 6
    assert metrics.values[f"{SPEC}disabled_steps_total", ()] == 1
    drafted = [metrics.values[at("num_draft_tokens", position)] for position in range(1, 5)]
    accepted = [metrics.values[at("num_accepted_tokens", position)] for position in range(1, 5)]
    assert (drafted, accepted) == ([3, 3, 2, 2], [2, 2, 1, 1])
    assert metrics.values[f"{SPEC}acceptance_length", ()] == 3.0
    assert metrics.values[f"{SPEC}acceptance_rate", ()] == 0.6
    assert metrics.values[f"{SPEC}proposed_length", ()] == 2.5
    assert metrics.observations[f"{SPEC}proposed_length_tokens", ()] == [2.5]


def test_acceptance_gauges_fade() -> None:
    """After 6 of 10 in 3, then 0 of 4 in 1: 5.94 of 13.9 in 3.97."""
    meter = Meter(INFO)
    meter.add_step(step(verifications=[(4, 2), (4, 4), (2, 0)]))
    meter.add_step(step(num_undrafted=3))  # no verification, nothing fades
    meter.add_step(step(verifications=[(4, 0)]))
    values = flushed(meter).values
    assert values[f"{SPEC}acceptance_length", ()] == pytest.approx(2.496222, abs=1e-6)
    assert values[f"{SPEC}acceptance_rate", ()] == pytest.approx(0.427338, abs=1e-6)


def test_goodput_is_that_of_steps_without_prompt_chunks() -> None:
    """Expected 6 tokens in 20 ms and 4 in 30 ms, got 5 in 20 ms and 3 in 60 ms."""
    meter = Meter(INFO)
    meter.add_step(step((), 1, (6, 0.02), num_generated=5, total_s=0.02))
    meter.add_step(step((), 1, (4, 0.03), num_generated=3, total_s=0.06))
    meter.add_step(step((), 1, (9, 0.03), num_prefill_tokens=64, total_s=0.5))
    meter.add_step(step(num_prefill_tokens=36, total_s=0.4))  # prompts alone: no plan
    metrics = flushed(meter)
    predicted = metrics.values["smartspec_token_goodput_predicted_tokens_per_second", ()]
    assert predicted == pytest.approx(200)
    actual = metrics.values["smartspec_token_goodput_actual_tokens_per_second", ()]
    assert actual == pytest.approx(100)
    assert metrics.values["smartspec_step_latency_predicted_seconds", ()] == pytest.approx(0.025)
    assert metrics.values["smartspec_prompt_tokens_total", ()] == 100
    assert metrics.values["smartspec_generation_tokens_total", ()] == 8
    assert metrics.observations["smartspec_step_latency_seconds", ()] == [0.02, 0.06, 0.5, 0.4]
    assert metrics.observations[f"{SPEC}proposed_length_tokens", ()] == [0, 0, 0]


def test_times_and_load() -> None:
    meter = Meter(INFO)
    meter.add_step(step(draft_s=0.5, target_s=1.5))
    meter.set_state(LoopState(3, 2, 0.25, num_preemptions=2))
    meter.add_step(step(draft_s=0.25, target_s=1.0))
    meter.set_state(LoopState(4, 0, 0.5, num_preemptions=3))
    meter.add_send(0.001)
    meter.add_send(0.003)
    values = flushed(meter).values
    expected = {
        "draft_time_seconds_total": 0.75,
        "verify_time_seconds_total": 2.5,
        "num_preemptions_total": 3,
        "num_requests_running": 4,
        "num_requests_waiting": 0,
        "kv_cache_utilization": 0.5,
        "num_sends_total": 2,
        "send_seconds_total": 0.004,
    }
    for name, value in expected.items():
        assert values[f"smartspec_{name}", ()] == pytest.approx(value), name


def test_who_decided_and_what_was_learned() -> None:
    meter = Meter(INFO)
    first = replace(COST, target_base=1.1, target_slope=1.4, draft_factor=0.9)
    second = replace(COST, target_base=1.2, target_slope=1.5, draft_factor=0.8)
    meter.add_step(step(num_undrafted=1, cost=first))
    meter.set_state(LoopState(time_errors=(0.3, 0.04)))
    meter.add_step(step(num_undrafted=1, cost=second, reason=Reason.GUARD))
    meter.set_state(LoopState(num_switches=1, time_errors=(0.2, 0.05)))
    meter.add_step(step(num_prefill_tokens=64))  # nothing decoded, nothing was decided
    values = flushed(meter).values
    expected = {
        ("decoding_steps_total", "decider"): {"planned": 1, "guard": 1, "probe": 0},
        ("cost_factor", "part"): {"target_base": 1.2, "target_slope": 1.5, "draft": 0.8},
        ("step_latency_relative_error", "predictor"): {"profile": 0.2, "corrected": 0.05},
    }
    for (name, label), by_value in expected.items():
        found = {v: values[f"smartspec_{name}", ((label, v),)] for v in by_value}
        assert found == by_value
    assert values["smartspec_guard_switches_total", ()] == 1


# Requests


@pytest.mark.parametrize(
    ("reason", "name", "labels", "is_whole"),
    [
        (FinishReason.STOP, "request_success_total", (("finished_reason", "stop"),), True),
        (FinishReason.LENGTH, "request_success_total", (("finished_reason", "length"),), True),
        (FinishReason.DEADLINE, "request_success_total", (("finished_reason", "deadline"),), True),
        (FinishReason.CANCELLED, "request_cancelled_total", (), False),
        (None, "request_failed_total", (), False),
    ],
)
def test_how_requests_end(
    reason: FinishReason | None, name: str, labels: Labels, is_whole: bool
) -> None:
    """Only those that were not cut short say how long requests take."""
    meter = Meter(INFO)
    meter.add_request(TIMES, 1_500_000_000, 31, reason)
    metrics = flushed(meter)
    ends = ("request_success", "request_cancelled", "request_failed")
    found = {
        s: v for s, v in metrics.values.items() if s[0].removeprefix("smartspec_")[:-6] in ends
    }
    assert {series for series, value in found.items() if value} == {(f"smartspec_{name}", labels)}
    whole = {"time_per_output_token_seconds": 0.01, "e2e_request_latency_seconds": 0.5}
    always = {"request_queue_time_seconds": 0.1, "time_to_first_token_seconds": 0.2}
    expected = always | whole if is_whole else always
    assert metrics.observations == {
        (f"smartspec_{name}", ()): [value] for name, value in expected.items()
    }


def test_a_request_that_never_ran_has_no_times() -> None:
    meter = Meter(INFO)
    meter.add_request(Times(), 0, 0, FinishReason.CANCELLED)
    assert flushed(meter).observations == {}


@pytest.mark.parametrize("code", ErrorCode)
def test_rejections(code: ErrorCode) -> None:
    meter = Meter(INFO)
    meter.add_rejection(code)
    series = ("smartspec_request_rejected_total", (("reason", code.name.lower()),))
    assert flushed(meter).values[series] == 1


@pytest.mark.parametrize(
    ("times", "num_generated", "expected"),
    [
        # Waited 1 s, first token after 2 s; the other 5 took 0.5 s each; over after 5 s.
        ((1, 2, 3, 5.5), 6, (1.0, 2.0, 0.5, 5.0)),
        ((1, 2, 3, 3), 1, (1.0, 2.0, None, 5.0)),  # one token has no next
        ((1, 2, 0, 0), 0, (1.0, None, None, 5.0)),
        ((1, 0, 0, 0), 0, (None, None, None, 5.0)),
    ],
)
def test_times_of_a_request(
    times: tuple[float, ...], num_generated: int, expected: tuple[float | None, ...]
) -> None:
    in_ns = Times(*(int(second * 1e9) for second in times))
    meter = Meter(INFO)
    meter.add_request(in_ns, int(6e9), num_generated, FinishReason.STOP)
    found = flushed(meter).observations
    names = ("request_queue_time", "time_to_first_token", "time_per_output_token")
    assert expected == tuple(
        found.get((f"smartspec_{name}_seconds", ()), [None])[0]
        for name in (*names, "e2e_request_latency")
    )


# Flushing


def test_a_flush_hands_over_what_changed() -> None:
    meter = Meter(INFO)
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
    assert metrics.observations == {("smartspec_step_latency_seconds", ()): [0.01]}
    metrics = flushed(meter)
    assert (metrics.values, metrics.observations) == ({}, {})


def test_flushes_are_due_while_something_changed() -> None:
    """At once at the start, then FLUSH_S after the last one, and not where nothing is new."""
    meter, metrics = Meter(INFO), MemoryMetrics()
    assert meter.due_s == -math.inf
    meter.flush_if_due(metrics, 100.0)
    assert meter.due_s is None
    meter.add_send(0.001)
    assert meter.due_s == 100.0 + FLUSH_S
    meter.flush_if_due(metrics, 100.0 + 0.9 * FLUSH_S)
    assert metrics.values["smartspec_num_sends_total", ()] == 0
    meter.flush_if_due(metrics, 100.0 + FLUSH_S)
    assert metrics.values["smartspec_num_sends_total", ()] == 1
    assert meter.due_s is None


def test_a_sink_that_raises_is_asked_again_for_what_is_new_alone() -> None:
    class Broken(MemoryMetrics):
        def increment(self, name: str, labels: Labels, by: float) -> None:
            raise RuntimeError("gone")

    meter = Meter(INFO)
    with pytest.raises(RuntimeError, match="gone"):
        meter.flush_if_due(Broken(), 1.0)
    assert meter.due_s is None
    meter.add_send(0.001)
    assert flushed(meter).values["smartspec_num_sends_total", ()] == 1


def test_histograms_are_given_a_few_steps_of_each_flush() -> None:
    meter = Meter(INFO)
    for number in range(20):
        meter.add_step(step(total_s=float(number), num_undrafted=1))
    for expected in ([float(n) for n in range(NUM_STEPS_SHOWN)], [50.0]):
        observations = flushed(meter).observations
        assert observations["smartspec_step_latency_seconds", ()] == expected
        assert len(observations[f"{SPEC}proposed_length_tokens", ()]) == len(expected)
        meter.add_step(step(total_s=50.0, num_undrafted=1))


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6))), st.booleans()),
        max_size=20,
    )
)
def test_positions_add_up_to_totals(steps: list[tuple[list[tuple[int, int]], bool]]) -> None:
    """However often it is flushed in between, and for drafts longer than k_max too."""
    meter, metrics = Meter(INFO), MemoryMetrics()
    pairs = []
    for verifications, is_flushed in steps:
        verified = [(k, min(k, a)) for k, a in verifications]
        pairs += verified
        meter.add_step(step(verifications=verified))
        if is_flushed:
            flush(meter, metrics)
    flush(meter, metrics)
    for name, total in (
        ("num_draft_tokens", sum(k for k, _ in pairs)),
        ("num_accepted_tokens", sum(a for _, a in pairs)),
    ):
        assert metrics.values[f"{SPEC}{name}_total", ()] == total
        by_position = [metrics.values.get(at(name, position), 0) for position in range(1, 7)]
        assert sum(by_position) == total
        assert by_position == sorted(by_position, reverse=True)
    assert metrics.values[f"{SPEC}num_drafts_total", ()] == len(pairs)


def test_the_memory_sink_takes_only_what_the_table_has() -> None:
    metrics = MemoryMetrics()
    with pytest.raises(KeyError):
        metrics.increment("smartspec_unknown_total", (), 1)
    with pytest.raises(AssertionError, match="is a counter"):
        metrics.set("smartspec_num_sends_total", (), 1)
    with pytest.raises(AssertionError, match="other labels"):
        metrics.increment("smartspec_num_sends_total", (("position", "1"),), 1)


# Triton's


class FakeFamily:
    """Stands in for pb_utils.MetricFamily: keeps every metric that was made."""

    COUNTER, GAUGE, HISTOGRAM = Kind
    made: list[tuple[str, dict[str, str], list[float] | None]]

    def __init__(self, name: str, description: str, kind: Kind) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None) -> Any:
        self.made.append((self.name, labels, buckets))
        return self

    def increment(self, by: float) -> None: ...

    set = observe = increment


@pytest.fixture
def triton_metrics(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TritonMetrics on a stand-in of Triton's module."""
    module = ModuleType("triton_python_backend_utils")
    FakeFamily.made = []
    module.MetricFamily = FakeFamily
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics", raising=False)
    loaded = importlib.import_module("smartspec_py.triton_metrics")
    monkeypatch.delitem(sys.modules, "smartspec_py.triton_metrics")
    return loaded.TritonMetrics("smartspec", "1")


def test_one_object_a_series(triton_metrics: Any) -> None:
    name = f"{SPEC}num_accepted_tokens_per_pos_total"
    for position in ("1", "2", "1"):
        triton_metrics.increment(name, (("position", position),), 1)
    triton_metrics.observe(f"{SPEC}proposed_length_tokens", (), 2)
    model = {"model": "smartspec", "version": "1"}
    assert FakeFamily.made[:2] == [
        (name, model | {"position": "1"}, None),
        (name, model | {"position": "2"}, None),
    ]
    assert FakeFamily.made[2][1] == model
    assert FakeFamily.made[2][2][:3] == [0.0, 0.5, 1.0]


def test_only_the_first_thread_may_use_it(triton_metrics: Any) -> None:
    triton_metrics.set("smartspec_num_requests_running", (), 1)
    errors: list[str] = []

    def use() -> None:
        try:
            triton_metrics.increment("smartspec_num_sends_total", (), 1)
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == ["smartspec_num_sends_total: another thread owns the metrics"]
    triton_metrics.increment("smartspec_num_sends_total", (), 1)


def test_a_meter_fits_triton(triton_metrics: Any) -> None:
    meter = Meter(INFO)
    meter.add_step(step(verifications=[(2, 1)], num_generated=2))
    meter.set_state(LoopState(1, 0))
    meter.add_request(TIMES, 1_500_000_000, 31, FinishReason.STOP)
    flush(meter, triton_metrics)
    assert len({(name, tuple(labels.items())) for name, labels, _ in FakeFamily.made}) == len(
        FakeFamily.made
    )
