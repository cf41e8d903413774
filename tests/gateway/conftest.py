"""A gateway, and the stand-in for Triton behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import StandIn, running_gateway

from smartspec_launch.address import Address


@pytest.fixture
def triton() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def gateway(triton: StandIn) -> Iterator[Address]:
    with running_gateway(triton.grpc_port, triton.http_port) as address:
        yield address
