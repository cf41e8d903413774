"""A front, and the stand-in for Triton behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import StandIn, running_front


@pytest.fixture
def triton() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def front(triton: StandIn) -> Iterator[int]:
    with running_front(triton.url) as port:
        yield port
