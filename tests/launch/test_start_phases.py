"""Phases of a start, from a log as Triton 2.51 writes it."""

import pytest

from smartspec_launch.start_phases import phases_text, start_phases

MIDNIGHT_S = 1_795_392_000
"""Of 2026-11-23, UTC."""

LOG = """\
W1122 23:59:57.000000 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
I1122 23:59:58.500000 7 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: smartspec_0_0"
I1122 23:59:58.750000 7 model.py:57] "initialize: Python has imported the backend"
I1123 00:00:01.000000 7 model.py:57] "INFO:smartspec_py.serving.build:engine libraries imported"
I1123 00:00:01.040000 7 model.py:57] "INFO:smartspec_py.engines.torch.build:context: 512 tokens"
I1123 00:00:02.000000 7 model.py:57] "INFO:smartspec_py.engines.torch.build:loaded engine.model"
I1123 00:00:09.500000 7 model.py:57] "INFO:smartspec_py.serving.server:cache: 32 rows"
"""


def test_a_phase_lasts_from_the_mark_before_to_its_own() -> None:
    """Over midnight. Triton is started at 23:59:58.000; there is no draft, and its ports are not
    open yet."""
    phases = start_phases(LOG, MIDNIGHT_S - 2.0)
    assert phases == {
        "Triton": pytest.approx(0.5),
        "Python": pytest.approx(0.25),
        "imports": pytest.approx(2.25),
        "checks": pytest.approx(0.04),
        "target": pytest.approx(0.96),
        "profile": pytest.approx(7.5),
    }
    assert phases_text(phases) == (
        "Triton 0.5 s, Python 0.2 s, imports 2.2 s, target 1.0 s, profile 7.5 s"
    )


def test_a_log_in_another_form_has_no_phases() -> None:
    assert start_phases("2026-11-22T23:59:58Z TRITONBACKEND_ModelInstanceInitialize: a", 0.0) == {}
