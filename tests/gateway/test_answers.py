"""The gateway between a client and a stand-in for Triton: one answer for each request, with the
status of Triton's error."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from http_client import BODY, GENERATE, TOKENIZER, WAIT_S, asked, connected, error_of
from stand_in import EMPTY, Document, StandIn, running_gateway, text

from smartspec_launch.address import Address, free_address
from smartspec_launch.gateway import OpenAi
from smartspec_py.api.contract import GATEWAY

pytestmark = pytest.mark.slow  # half a minute together; they run beside the others


def test_a_response_is_the_json_of_triton(triton: StandIn, gateway: Address) -> None:
    """The model gets the checked fields, and answers in the form that the gateway wants."""
    asked_for = []

    def answer(fields: Document) -> Iterator[Document]:
        asked_for.append(fields)
        yield text("é", id="mine", seed=2**64 - 1, output_ids=[1, 2])

    triton.generate = answer
    with asked(gateway) as response:
        assert json.loads(response.read()) == EMPTY | {
            "id": "mine",
            "text_output": "é",
            "seed": 2**64 - 1,
            "output_ids": [1, 2],
        }
    assert asked_for == [json.loads(BODY) | {GATEWAY: ""}]


@pytest.mark.parametrize("route", [GENERATE, GENERATE + "_stream"])
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ("INVALID_ARG: seed: no", 400, "seed: no"),
        ("UNAVAILABLE: the queue\nis full", 503, "the queue\nis full"),
        ("INTERNAL: a: b", 500, "a: b"),
        ("in ensemble 'own', INVALID_ARG: no", 400, "in ensemble 'own', no"),
        ("Stub process is not healthy", 500, "Stub process is not healthy"),
        ("OTHER: no code of the model", 500, "OTHER: no code of the model"),
    ],
)
def test_a_status_is_chosen_by_the_code(
    triton: StandIn, gateway: Address, error: str, status: int, reason: str, route: str
) -> None:
    triton.generate = lambda fields: iter([{"error": error}])
    with asked(gateway, route) as response:
        assert error_of(response) == (status, reason)


@pytest.mark.parametrize("model", ["..", "."])
def test_a_model_that_is_no_name_is_not_served(gateway: Address, model: str) -> None:
    with connected(gateway.http_port) as connection:
        connection.request("POST", f"/v2/models/{model}/generate", BODY)
        with connection.getresponse() as response:
            assert error_of(response)[0] == 404


def test_outputs_of_an_ensemble_have_any_name(triton: StandIn, gateway: Address) -> None:
    triton.generate = lambda fields: iter([EMPTY | {"own": 1}])
    with asked(gateway, "/v2/models/own/generate") as response:
        assert json.loads(response.read()) == EMPTY | {"own": 1}


def test_requests_wait_for_a_connection_to_triton(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that may open few files has few."""
    monkeypatch.setattr("smartspec_gateway.__main__.GENERATING", 1)
    monkeypatch.setattr("smartspec_gateway.__main__.connections_for", lambda num_files: 2)
    may_answer, num_asked = threading.Event(), 0

    def answer(fields: Document) -> Iterator[Document]:
        nonlocal num_asked
        num_asked += 1
        assert may_answer.wait(WAIT_S)
        yield text("a", finish_reason="length", num_output_tokens=1, num_input_tokens=1)

    triton.generate = answer
    openai = OpenAi(free_address().http_port, TOKENIZER)
    body = json.dumps({"model": "smartspec", "prompt": "a", "n": 5, "max_tokens": 1}).encode()
    with (
        running_gateway(triton.grpc_port, triton.http_port, openai=openai),
        connected(openai.port) as connection,
    ):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while num_asked < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        assert num_asked == 2
        may_answer.set()
        with connection.getresponse() as response:
            found = json.loads(response.read())
    assert num_asked == 5, found


def test_a_refusal_of_triton_itself(triton: StandIn, gateway: Address) -> None:
    triton.refusal = 400, "no such version"
    with asked(gateway, "/v2/models/smartspec/versions/7/generate") as response:
        assert error_of(response) == (400, "no such version")


def test_no_triton_is_503() -> None:
    nowhere = free_address()
    with running_gateway(nowhere.grpc_port, nowhere.http_port) as address:
        with asked(address) as response:
            assert "does not answer" in error_of(response)[1]
        assert response.status == 503


def test_other_routes_are_answered_by_triton(gateway: Address) -> None:
    """HEAD has no body; an id of the client comes back, and others get a new one."""
    with connected(gateway.http_port) as connection:
        for method, body in (("GET", b"/v2/models/smartspec/config"), ("HEAD", b"")):
            for sent in ("mine-1", "not\tthis"):
                path = "/v2/models/smartspec/config"
                connection.request(method, path, headers={"X-Request-Id": sent})
                with connection.getresponse() as response:
                    assert (response.status, response.read()) == (200, body)
                    found = response.headers["x-request-id"]
                assert (found == sent) == (sent == "mine-1")
                assert found
