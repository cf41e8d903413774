"""Other names of the model on Triton's routes: Triton gets the name that it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import grpc
import pytest
from stand_in import StandIn, running_gateway, tensor, text
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway.names import Names, name_in
from smartspec_launch.address import DIRECT, Address

NAMES = ("acme/own:Q4_K_M", "own", "a name")


@pytest.fixture
def named(triton: StandIn) -> Iterator[Address]:
    with running_gateway(triton.grpc_port, triton.http_port, names=NAMES) as address:
        yield address


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/v2/models/acme/own:Q4_K_M/ready", "/v2/models/smartspec/ready"),
        ("/v2/models/acme%2Fown%3AQ4_K_M/stats", "/v2/models/smartspec/stats"),
        ("/v2/models/a%20name/versions/1", "/v2/models/smartspec/versions/1"),
        ("/v2/models/own", "/v2/models/smartspec"),
        ("/v2/models/smartspec/ready", "/v2/models/smartspec/ready"),
        ("/v2/models/owner/ready", "/v2/models/owner/ready"),
        ("/v2/models/ensemble/ready", "/v2/models/ensemble/ready"),
    ],
)
def test_paths(asked: str, sent: str) -> None:
    assert Names(NAMES).path(asked) == sent


def test_http(named: Address) -> None:
    with DIRECT.open(f"{named.http_url}/v2/models/acme/own:Q4_K_M/ready", timeout=10) as answer:
        assert answer.read() == b"/v2/models/smartspec/ready"
    url = f"{named.http_url}/v2/models/acme%2Fown:Q4_K_M/generate"
    with DIRECT.open(
        url, json.dumps({"text_input": "a", "max_tokens": 1}).encode(), timeout=10
    ) as answer:
        assert json.loads(answer.read()) == text("a")


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {}], ids=["right fields", "one is missing"])
def test_an_unknown_name_is_told_the_known_ones(
    triton: StandIn, named: Address, fields: dict[str, int]
) -> None:
    """Before the fields, which may be those of another model."""
    triton.refusal = 404, "Request for unknown model: 'gpt-4' is not found"
    body = json.dumps({"text_input": "a", **fields}).encode()
    for route in ("generate", "generate_stream"):
        with pytest.raises(HTTPError) as raised:
            DIRECT.open(f"{named.http_url}/v2/models/gpt-4/{route}", body, timeout=10)
        with raised.value as answer:
            said = json.loads(answer.read())["error"]
        assert raised.value.code == 404
        assert said.startswith("model: got 'gpt-4', must be 'acme/own:Q4_K_M' or 'a name' or 'own'")


def test_grpc(triton: StandIn, named: Address) -> None:
    """What else is in a message passes unchanged."""
    requests: list[Any] = []

    def answer(asked: Any, context: Any) -> Iterator[Any]:
        requests.append(asked)
        yield tensor("a")

    triton.handler = answer
    with grpc.insecure_channel(named.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, is_ready in (("acme/own:Q4_K_M", True), ("smartspec", True), ("x", False)):
            asked = service_pb2.ModelReadyRequest(name=name)
            assert stub.ModelReady(asked).ready is is_ready
        fields = {"id": "7", "raw_input_contents": [b"\xff"]}
        sent = service_pb2.ModelInferRequest(model_name="own", **fields)
        assert list(stub.ModelStreamInfer(iter([sent]))) == [tensor("a")]
    assert requests == [service_pb2.ModelInferRequest(model_name="smartspec", **fields)]


def test_the_name_of_each_message_is_its_first_field() -> None:
    kinds = ("Infer", "Ready", "Metadata", "Config", "Statistics")
    for message in (getattr(service_pb2, f"Model{kind}Request") for kind in kinds):
        raw = message(**{message.DESCRIPTOR.fields_by_number[1].name: "own"}).SerializeToString()
        assert name_in(raw) == "own"
        assert name_in(Names(["own"]).message(raw, "own")) == "smartspec"
    assert name_in(b"\xff") == ""
