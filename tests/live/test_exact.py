"""Same seed, same text, over real sockets: mixed batches with preemptions and prefix reuse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import exact
import pytest
from scrape import scrape_when
from servers import TINY, serving

from smartspec_py.config import LimitsConfig, ServerConfig, TorchEngineConfig

pytestmark = pytest.mark.triton


def test_no_text_depends_on_how_it_was_served(tmp_path: Path) -> None:
    """The cache holds about three of eight requests. Two prompts of each workload meet
    all of the penalties; each of the 24 cases is asked about three times."""
    engine = TorchEngineConfig(
        model=str(TINY / "target"), draft=str(TINY / "draft"), dtype="float32", num_threads=1
    )
    limits = LimitsConfig(
        max_sequences=8, max_context_len=512, max_cache_tokens=600, max_draft_len=4
    )
    config = ServerConfig(engine=engine, limits=limits)
    with serving(config, tmp_path) as server:
        url = server.address.http_url.removeprefix("http://")
        summary = asyncio.run(
            exact.run(url, num_requests=80, seed=1, concurrency=12, num_prompts=2)
        )
        preempted = "smartspec_num_preemptions_total"
        num_preemptions = scrape_when(server, lambda found: found.get(preempted) > 0).get(preempted)
    assert not summary.differences
    assert summary.num_requests == 80
    assert summary.num_left > 0
    assert summary.num_cached > 0
    assert summary.num_accepted > 100
    assert num_preemptions > 0
