"""`bench overhead`: which side comes first, and what is divided by what."""

from __future__ import annotations

import asyncio
import os
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest

from smartspec_bench.overhead import Overhead, Round, cpu_s, measure
from smartspec_bench.progress import Progress


def test_each_side_is_first_in_turn_and_the_first_round_does_not_count() -> None:
    asked: list[str] = []

    def side(name: str, answer: Any) -> Any:
        async def answered(policy: str, prompts: object) -> Any:
            asked.append(name)
            return answer

        return answered

    sides: Any = SimpleNamespace(
        front_tps=side("front", (90.0, 0.001)),
        triton_tps=side("triton", 100.0),
        local_tps=side("local", 200.0),
    )
    (found,) = asyncio.run(measure(sides, ["none"], [2], 3, Progress("", 0)))
    assert asked[::3] == ["local", "front", "triton", "local"]
    assert found == Overhead("none", 2, (Round(90.0, 100.0, 200.0, 0.001),) * 3)
    assert found.ratio is not None
    assert found.front_ratio is not None
    assert found.ratio.value == pytest.approx(0.5)
    assert found.front_ratio.value == pytest.approx(0.9)
    assert astuple(found.means) == pytest.approx(astuple(found.rounds[0]))


def test_processor_time_of_a_process() -> None:
    assert cpu_s(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.5)
