"""TensorRT-LLM's adapter over fakes of its executors, behind a real Triton."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from scrape import scrape_when
from servers import TINY, serving
from test_bad_input import GOOD
from wire import generate, generate_stream, post

from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_testing.engines import FakeTrtllmConfig

pytestmark = pytest.mark.triton

POLICIES = ("none", "fixed:3", "batch_table", "goodput_global", "goodput")


def fake_config(**options: Any) -> ServerConfig:
    engine = FakeTrtllmConfig(kind="fake_trtllm", tokenizer=str(TINY / "target"), **options)
    limits = LimitsConfig(max_sequences=8, max_draft_len=4, max_queue=2000)
    return ServerConfig(engine=engine, limits=limits)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("fake")
    with serving(fake_config(), folder, aliases=ALIASES) as found:
        yield found


@pytest.fixture(scope="module")
def failing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One of 50 engine requests fails; a step takes 1 ms, so that there is time to go away."""
    config = fake_config(error_prob=0.02, step_s=0.001)
    with serving(config, tmp_path_factory.mktemp("failing")) as found:
        yield found


def test_text_is_the_same_under_every_policy(server: TritonServer) -> None:
    """From every name, streamed or not."""
    fields = {"text_input": "Question: where is the lamp?", "max_tokens": 60}
    texts = {p: generate(server, **fields, speculation_policy=p)["text_output"] for p in POLICIES}
    texts["stream"] = "".join(r["text_output"] for r in generate_stream(server, **fields))
    for alias in ALIASES:
        status, body = post(server, fields, "generate", model=alias)
        assert status == 200, body
        texts[alias] = json.loads(body)["text_output"]
    assert len(set(texts.values())) == 1, texts


def test_drafts_are_verified(server: TritonServer) -> None:
    answer = generate(server, **GOOD | {"max_tokens": 40}, speculation_policy="fixed:4")
    assert 0 < answer["total_accepted_draft_tokens"] < answer["total_draft_tokens"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"bad_words": ["a"]}, "plain greedy"), ({"return_log_probs": True}, "log-probabilities")],
)
def test_fields_that_are_served_without_drafts_say_so(
    server: TritonServer, fields: dict[str, Any], reason: str
) -> None:
    answer = generate(server, **GOOD | fields, speculation_policy="fixed:4")
    assert answer["num_output_tokens"] == GOOD["max_tokens"]
    assert answer["total_draft_tokens"] == 0
    assert reason in answer["no_speculation"]
    assert len(answer.get("output_log_probs", [])) in (0, GOOD["max_tokens"])


@pytest.mark.parametrize("model", ["smartspec", *ALIASES])
def test_errors_have_their_status(server: TritonServer, model: str) -> None:
    """The model finds this one. An alias says its own name before it."""
    status, body = post(server, GOOD | {"top_p": 2.0}, "generate", model=model)
    assert status == 400
    assert json.loads(body)["error"].endswith("top_p: got 2.0, must be in [0, 1]")


def test_a_client_of_an_alias_may_go_away(server: TritonServer) -> None:
    """Triton tells the model behind the alias, which ends the request."""
    connection = open_stream(server, "ensemble", {"text_input": "Question:", "max_tokens": 500})
    assert b"data:" in connection.getresponse().read(20)
    connection.close()
    check_idle(server)


def test_hundreds_of_requests_with_cancels_and_errors(failing_server: TritonServer) -> None:
    """Everyone who stays gets one last response: an end, or an error that says what failed."""
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda n: one_of_many(failing_server, n), range(400)))
    assert set(ends) == {"length", "error", "went away"}
    assert ends.count("length") > 200
    check_idle(failing_server)
    # Each of these may be the one of 50 that fails; that all do has odds of 3e-9.
    fields = GOOD | {"speculation_policy": "none"}
    answers = [post(failing_server, fields, "generate") for _ in range(5)]
    served = [json.loads(body) for status, body in answers if status == 200]
    assert {answer["finish_reason"] for answer in served} == {"length"}, answers


def one_of_many(server: TritonServer, number: int) -> str:
    """How the request ended."""
    rng = random.Random(number)
    body = {
        "text_input": "Question: " + "lamp " * rng.randint(0, 20),
        "max_tokens": rng.randint(2, 30),
        "speculation_policy": rng.choice(POLICIES),
    }
    connection = open_stream(server, "smartspec", body)
    response = connection.getresponse()
    if rng.random() < 0.15:
        response.read(rng.randint(1, 100))
        connection.close()
        return "went away"
    text = response.read().decode()
    connection.close()
    if response.status != 200:  # it failed before its first response
        assert json.loads(text)["error"], text
        return "error"
    data = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    ends = ["error" for one in data if "error" in one]
    ends += [one["finish_reason"] for one in data if one.get("finish_reason")]
    assert len(ends) == 1, text
    assert (response.status == 200) or ends == ["error"]
    return ends[0]


def open_stream(
    server: TritonServer, model: str, body: dict[str, Any]
) -> http.client.HTTPConnection:
    address = server.address
    connection = http.client.HTTPConnection(address.host, address.http_port, timeout=60)
    connection.request(
        "POST",
        f"/v2/models/{model}/generate_stream",
        json.dumps(body | {"stream": True}),
        {"Content-Type": "application/json"},
    )
    return connection


def check_idle(server: TritonServer) -> None:
    """Nothing runs, and the cache holds nothing, once what went away has been noticed."""
    found = scrape_when(server, lambda s: not s.get("smartspec_num_requests_running"))
    assert found.get("smartspec_num_requests_running") == 0.0
    assert found.get("smartspec_kv_cache_utilization") == 0.0
