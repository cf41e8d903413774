"""Same seed, same text, over real sockets: mixed batches with preemptions and prefix reuse."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scrape import scrape_when
from servers import TINY, serving
from wire import generate

from smartspec_bench import texts
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig

pytestmark = pytest.mark.triton

FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.7, "repetition_penalty": 1.2, "min_p": 0.02},
    {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 24},
    {"temperature": 1.0, "embedding_bias_words": [" the"], "embedding_bias_weights": [-2.0]},
)
PREEMPTED = "smartspec_num_preemptions_total"


def test_no_text_depends_on_how_it_was_served(tmp_path: Path) -> None:
    """The cache holds about three of eight requests. Each case is asked once without drafts, alone,
    and twice under random policies, proposers and priorities."""
    engine = LocalEngineConfig(
        model=str(TINY / "target"), draft=str(TINY / "draft"), dtype="float32", num_threads=1
    )
    limits = LimitsConfig(
        max_sequences=8, max_context_len=512, max_cache_tokens=600, max_draft_len=4, profile_s=0.0
    )
    cases = [
        {"text_input": texts.prompt(name, 0), "max_tokens": 40, "seed": 5, **fields}
        for name in texts.TINY
        for fields in FIELDS
    ]
    with serving(ServerConfig(engine=engine, limits=limits), tmp_path) as server:
        plain = {"speculation_policy": "none", "reuse_prefix": False}
        expected = [generate(server, **case, **plain)["text_output"] for case in cases]

        def again(number: int) -> dict[str, Any]:
            rng = random.Random(number)
            changes = {
                "speculation_policy": rng.choice(("none", "fixed:1", "fixed:4", "goodput")),
                "proposer": rng.choice(("draft_model", "prompt_lookup")),
                "request_priority": rng.choice((0, 0, 0, 1)),
            }
            answer = generate(server, **cases[number % len(cases)], **changes)
            assert answer["text_output"] == expected[number % len(cases)], changes
            return answer

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(again, range(2 * len(cases))))
        scrape = scrape_when(server, lambda found: found.get(PREEMPTED) > 0)
    assert scrape.get(PREEMPTED) > 0
    assert sum(answer["num_cached_tokens"] for answer in answers) > 0
    # How many depends on measured times.
    assert sum(answer["total_accepted_draft_tokens"] for answer in answers) > 30
