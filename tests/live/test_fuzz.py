"""A few hundred fuzzed requests against a real Triton; `fuzz.py` makes as many as one likes."""

from __future__ import annotations

import asyncio

import fuzz
import pytest
from scrape import scrape_when

from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import MODEL_NAME

pytestmark = pytest.mark.triton

NUM_REQUESTS = 400


def test_each_gets_its_answer_and_nothing_is_held_after(torch_server: TritonServer) -> None:
    address = torch_server.address
    http = address.http_url.removeprefix("http://")
    models = (MODEL_NAME, *ALIASES)
    summary = asyncio.run(fuzz.run(http, address.grpc_url, NUM_REQUESTS, 1, 8, models))
    assert not summary.failures
    assert summary.is_alive
    assert summary.num_requests == NUM_REQUESTS
    held = (
        "smartspec_num_requests_running",
        "smartspec_num_requests_waiting",
        "smartspec_kv_cache_utilization",
    )
    scrape = scrape_when(torch_server, lambda found: not any(found.get(name) for name in held))
    assert {name: scrape.get(name) for name in held} == dict.fromkeys(held, 0.0)
