"""The count of calls per step: it repeats itself, and grows with the sequences."""

import pytest

from studies.host_calls import PARTS, measure


def test_counts_of_calls() -> None:
    one, two = measure(1, "fixed:4", False), measure(2, "fixed:4", False)
    assert one == pytest.approx(measure(1, "fixed:4", False), rel=0.01)  # but for lazy imports
    assert all(one[part] > 0 for part in PARTS)
    assert sum(one[part] for part in PARTS) == pytest.approx(one["all"])
    assert one["NumPy"] < one["all"] < two["all"] < 2 * one["all"]
