"""The metrics port of a real Triton: the form of its text, the sums, and many streams at once.

This file has its own server, so that the counters are those of the requests made here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scrape import MODEL, Scrape, read, scrape_when
from servers import fake_config, serving
from wire import generate, generate_stream, grpc_inputs, grpc_stream, post

from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig
from smartspec_py.serving.metric_families import FAMILIES, Kind

pytestmark = pytest.mark.triton

SPEC = "smartspec_spec_decode_"
NUM_STREAMS = 16
NUM_REQUESTS = 320
STOPS_AT = (10, 20, 30, 40)
"""Characters of a text at which stop words are taken from it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    config = fake_config(step_s=0.001, limits=LimitsConfig(max_sequences=8, max_draft_len=4))
    with serving(config, tmp_path_factory.mktemp("metrics")) as server:
        yield server


@pytest.fixture(scope="module")
def last_responses(server: TritonServer) -> list[dict[str, Any]]:
    """Of requests of every kind, with num_output_tokens of the whole request. One is refused."""
    lasts = []
    fields = {"text_input": "Question: who?", "max_tokens": 40}
    for policy, max_tokens in (("fixed:4", 40), ("fixed:2", 23), ("none", 9), ("fixed:4", 1)):
        one = fields | {"max_tokens": max_tokens, "speculation_policy": policy}
        lasts.append(generate(server, **one))
    text = lasts[0]["text_output"]
    for start in STOPS_AT:
        one = fields | {"stop_words": [text[start : start + 3]], "speculation_policy": "fixed:4"}
        responses = generate_stream(server, **one)
        total = sum(response["num_output_tokens"] for response in responses)
        lasts.append(responses[-1] | {"num_output_tokens": total})
        assert lasts[-1]["finish_reason"] == "stop"
    assert post(server, {"text_input": "Question:", "max_tokens": 0}, "generate")[0] == 400
    return lasts


def test_every_family_is_shown_as_declared(
    server: TritonServer, last_responses: list[dict[str, Any]]
) -> None:
    scrape = scrape_when(server, lambda s: len(s.kinds) == len(FAMILIES))
    assert scrape.kinds == {family.name: family.kind.value for family in FAMILIES}
    for family in FAMILIES:
        suffix = "_count" if family.kind is Kind.HISTOGRAM else ""
        for labels in scrape.values[family.name + suffix]:
            names = {pair.split("=")[0] for pair in labels.split(",")}
            assert names == {"model", "version", *family.labels}
            assert all(pair in labels for pair in MODEL.split(","))
    names = {metric.name for metric in text_string_to_metric_families(read(server))}
    assert names >= {family.name.removesuffix("_total") for family in FAMILIES}


def test_counters_are_what_the_responses_said(
    server: TritonServer, last_responses: list[dict[str, Any]]
) -> None:
    def total(field: str) -> int:
        return sum(int(last[field]) for last in last_responses)

    num_requests = len(last_responses)
    cached = sum(last.get("num_cached_tokens", 0) for last in last_responses)
    # At a stop word, the loop generates until it gets the cancellation, normally for one step.
    least = {
        "smartspec_generation_tokens_total": total("num_output_tokens"),
        f"{SPEC}num_draft_tokens_total": total("total_draft_tokens"),
        f"{SPEC}num_accepted_tokens_total": total("total_accepted_draft_tokens"),
    }
    expected = {
        "smartspec_prompt_tokens_total": total("num_input_tokens") - cached,
        "smartspec_request_cancelled_total": 0,
        "smartspec_request_failed_total": 0,
        "smartspec_num_requests_running": 0,
        "smartspec_num_requests_waiting": 0,
        "smartspec_e2e_request_latency_seconds_count": num_requests,
        "smartspec_time_to_first_token_seconds_count": num_requests,
        "smartspec_request_queue_time_seconds_count": num_requests,
        "smartspec_time_per_output_token_seconds_count": num_requests - 1,  # one had one token
    }
    rejected = ("smartspec_request_rejected_total", '"invalid_argument"')

    scrape = scrape_when(
        server,
        lambda s: s.get(*rejected) == 1 and all(s.get(n) == v for n, v in expected.items()),
    )
    assert {name: scrape.get(name) for name in expected} == expected
    steps = scrape.get(f"{SPEC}num_drafts_total") + scrape.get(f"{SPEC}disabled_steps_total")
    num_more = steps - total("num_steps")
    assert 0 <= num_more <= 10 * len(STOPS_AT)
    for name, num in least.items():
        assert num <= scrape.get(name) <= num + 5 * num_more, name
    assert scrape.get("smartspec_request_success_total", '"length"') == 4
    assert scrape.get("smartspec_request_success_total", '"stop"') == len(STOPS_AT)
    assert scrape.get(*rejected) == 1


def test_positions_and_buckets_add_up(
    server: TritonServer, last_responses: list[dict[str, Any]]
) -> None:
    histograms = [family for family in FAMILIES if family.kind is Kind.HISTOGRAM]
    scrape = scrape_when(server, lambda s: all(s.get(f"{h.name}_count") for h in histograms))
    for stem in ("num_draft_tokens", "num_accepted_tokens"):
        at = [scrape.get(f"{SPEC}{stem}_per_pos_total", f'position="{p}"') for p in range(1, 5)]
        assert sum(at) == scrape.get(f"{SPEC}{stem}_total")
        assert at == sorted(at, reverse=True)
    for family in histograms:
        count_at = {
            float(re.search(r'le="([^"]+)"', labels)[1]): count
            for labels, count in scrape.values[f"{family.name}_bucket"].items()
        }
        counts = [count_at[edge] for edge in sorted(count_at)]
        assert sorted(count_at)[:-1] == list(map(float, family.buckets))
        assert counts == sorted(counts)
        assert counts[-1] == scrape.get(f"{family.name}_count") > 0


def test_many_streams_and_scrapes_at_once(server: TritonServer) -> None:
    """Two threads that use a metric at the same time would end the server."""
    before = scrape_when(server, lambda s: s.get("smartspec_num_requests_running") == 0)
    is_over = threading.Event()
    num_scrapes = 0

    def scrape_on() -> None:
        nonlocal num_scrapes
        while not is_over.is_set():
            Scrape(read(server))
            num_scrapes += 1

    def stream(number: int) -> int:
        fields = {"text_input": f"Question {number}", "max_tokens": 8, "stream": True}
        return sum(
            int(result.as_numpy("num_output_tokens").item())
            for result in grpc_stream(server, grpc_inputs(fields))
            if result.get_output("num_output_tokens") is not None
        )

    with ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        scraping = pool.submit(scrape_on)
        try:
            counts = list(pool.map(stream, range(NUM_REQUESTS)))
        finally:
            is_over.set()
        scraping.result()
    assert counts == [8] * NUM_REQUESTS
    assert num_scrapes > 10
    assert server.ended() is None, server.log_tail()
    assert server.is_model_ready()
    name = "smartspec_generation_tokens_total"
    after = scrape_when(server, lambda s: s.get(name) == before.get(name) + 8 * NUM_REQUESTS)
    assert after.get(name) == before.get(name) + 8 * NUM_REQUESTS
