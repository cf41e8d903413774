"""The record of a request's speculation: a case by hand, and what its readers rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.types import SpecMetrics
from smartspec_py.serving.messages import spec_metrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tensors.md"
STEPS = [(3, 3), (3, 0), (2, 1), (1, 0)]
"""4 of 9 drafts accepted in 4 verifications."""

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


def test_document() -> None:
    found = [spec_metrics(STEPS, 5, level) for level in SpecMetrics]
    assert found[0] == ""
    documents = [json.loads(text)["speculative_decoding"] for text in found[1:]]
    assert documents == [SUMMARY, SUMMARY | PER_STEP]
    assert spec_metrics([], 5, SpecMetrics.DETAILED) == "{}"


def test_the_example_in_the_documentation_is_what_a_server_sends() -> None:
    [example] = PAGE.read_text(encoding="utf-8").split("```json\n")[1:]
    steps = [(3, 3), (3, 3), (2, 1), (2, 0)]
    found = spec_metrics(steps, 3, SpecMetrics.SUMMARY)
    assert json.loads(found) == json.loads(example.partition("```")[0])


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1)), min_size=1, max_size=40))
def test_what_readers_rely_on(shares: list[tuple[int, float]]) -> None:
    """The checks by which AIPerf drops a record."""
    steps = [(k, round(k * share)) for k, share in shares]
    fields = json.loads(spec_metrics(steps, 8, SpecMetrics.DETAILED))["speculative_decoding"]
    histogram, num_steps = fields["acceptance_histogram"], fields["num_spec_steps"]
    accepted, num_drafted = fields["num_accepted_draft_tokens"], fields["num_draft_tokens"]
    assert len(histogram) == fields["num_spec_tokens"] + 1
    assert sum(histogram) == num_steps
    assert sum(j * count for j, count in enumerate(histogram)) == accepted <= num_drafted
    assert fields["mean_acceptance_length"] == pytest.approx(1 + accepted / num_steps)
    assert fields["draft_acceptance_rate"] == pytest.approx(accepted / num_drafted)
    per_step = zip(fields["per_step_drafted"], fields["per_step_accepted"], strict=True)
    assert list(per_step) == steps
