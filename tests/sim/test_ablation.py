"""The ablation study: what its patches name exists, and one cell of its table."""

from contextlib import ExitStack
from unittest.mock import patch

from studies.ablation import MECHANISMS, ratios
from studies.ablation_loads import conditions


def test_every_mechanism_can_be_left_out() -> None:
    for mechanism in MECHANISMS:
        with ExitStack() as stack:
            for change in mechanism.changes:
                stack.enter_context(patch.object(*change))


def test_a_cell_of_the_table() -> None:
    """Without the host's time learned beforehand, and with settings of one expert alone."""
    by_name = {mechanism.name: mechanism for mechanism in MECHANISMS}
    condition = next(one for one in conditions() if one.name == "host time, first 60 requests, 8")
    found = ratios(by_name["experts: the last one alone"], condition, {})
    assert 0.9 < found["tokens_per_s"][0] < 1.1
    assert found["tokens_per_s"][0] != 1.0


def test_requests_of_every_condition_can_be_drawn() -> None:
    for condition in conditions():
        if not condition.is_open:  # their rates are measured first
            assert condition.requests(1), condition.name
