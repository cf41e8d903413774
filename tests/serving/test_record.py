"""The record of a request's speculation: a case by hand, and what its readers rely on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.types import SpecMetrics
from smartspec_py.serving.messages import SpecRecord

STEPS = [(3, 3), (3, 0), (0, 0), (2, 1), (1, 0)]
"""4 of 9 drafts accepted in 4 verifications; one step without drafts."""

SUMMARY = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": pytest.approx(4 / 9),
    "acceptance_histogram": [2, 1, 0, 1, 0, 0],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 9,
    "num_spec_tokens": 5,
}
PER_STEP = {"per_step_accepted": [3, 0, 1, 0], "per_step_drafted": [3, 3, 2, 1]}


def record_of(steps: list[tuple[int, int]], num_spec_tokens: int = 5) -> SpecRecord:
    record = SpecRecord(num_spec_tokens)
    for num_drafted, num_accepted in steps:
        record.add(num_drafted, num_accepted)
    return record


@pytest.mark.parametrize(
    ("level", "expected"),
    [(SpecMetrics.SUMMARY, SUMMARY), (SpecMetrics.DETAILED, SUMMARY | PER_STEP)],
)
def test_document(level: SpecMetrics, expected: dict[str, object]) -> None:
    document = json.loads(record_of(STEPS).to_json(level))
    assert document == {"speculative_decoding": expected}


def test_nothing_where_it_was_not_asked_for() -> None:
    assert record_of(STEPS).to_json(SpecMetrics.NONE) == ""


@pytest.mark.parametrize("steps", [[], [(0, 0), (0, 0)]])
def test_no_block_without_a_verification(steps: list[tuple[int, int]]) -> None:
    assert record_of(steps).to_json(SpecMetrics.DETAILED) == "{}"
    assert record_of(steps, 0).to_json(SpecMetrics.SUMMARY) == "{}"


@pytest.mark.parametrize("step", [(2, 3), (6, 0), (2, -1)])
def test_impossible_steps(step: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="not a verification"):
        record_of([step])


@given(
    drafted=st.lists(st.integers(0, 8), max_size=40),
    shares=st.lists(st.floats(0, 1), min_size=40, max_size=40),
)
def test_what_readers_rely_on(drafted: list[int], shares: list[float]) -> None:
    """The checks by which AIPerf drops a record."""
    steps = [(k, round(k * share)) for k, share in zip(drafted, shares, strict=False)]
    document = json.loads(record_of(steps, 8).to_json(SpecMetrics.DETAILED))
    assert bool(document) == any(drafted)
    if not document:
        return
    fields = document["speculative_decoding"]
    histogram, num_steps = fields["acceptance_histogram"], fields["num_spec_steps"]
    accepted, num_drafted = fields["num_accepted_draft_tokens"], fields["num_draft_tokens"]
    assert len(histogram) == fields["num_spec_tokens"] + 1
    assert sum(histogram) == num_steps
    assert sum(j * count for j, count in enumerate(histogram)) == accepted <= num_drafted
    assert fields["mean_acceptance_length"] == pytest.approx(1 + accepted / num_steps)
    assert fields["draft_acceptance_rate"] == pytest.approx(accepted / num_drafted)
    per_step = list(zip(fields["per_step_drafted"], fields["per_step_accepted"], strict=True))
    assert len(per_step) == num_steps
    assert all(0 <= a <= k <= fields["num_spec_tokens"] for k, a in per_step)
    assert (sum(k for k, _ in per_step), sum(a for _, a in per_step)) == (num_drafted, accepted)
