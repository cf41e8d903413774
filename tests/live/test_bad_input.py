"""Bad input over the real wire: an error for that request alone, that says what would be right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from wire import grpc_inputs, grpc_stream, post

from smartspec_launch.address import status_of
from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import MODEL_NAME

pytestmark = pytest.mark.triton

CLIENTS = Path(__file__).parents[2] / "docs" / "start" / "write-a-client.md"
GOOD = {"text_input": "Question:", "max_tokens": 4}

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"text_input": ""}, ["text_input", "''", "at least one token"]),
    ({"max_tokens": 0}, ["max_tokens", "0", "at least 1"]),
    ({"max_tokens": 600}, ["max_tokens", "600", "at most 510", "512"]),
    ({"temperature": -0.5}, ["temperature", "-0.5", "at least 0"]),
    ({"temperature": float("nan")}, ["temperature", "nan", "finite"]),
    ({"top_p": 1.5}, ["top_p", "1.5", "[0, 1]"]),
    ({"top_k": -2}, ["top_k", "-2", "at least -1"]),
    ({"stop_token_ids": [1, 5000]}, ["stop_token_ids", "5000", "0..2047"]),
    ({"beam_width": 2}, ["beam_width", "2", "must be 1"]),
    ({"end_id": 5000}, ["end_id", "5000", "-1..2047"]),
    ({"stop_words": ["a", ""]}, ["stop_words", "''"]),
    ({"stop_words": ["x"] * 17}, ["stop_words", "17", "at most 16"]),
    ({"speculation_policy": "fixed:0"}, ["speculation_policy", "fixed:0", "1..64"]),
    ({"speculation_policy": "magic"}, ["speculation_policy", "magic", "goodput"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=str)
def test_all_ways_say_field_value_and_range(
    local_server: TritonServer, fields: dict[str, Any], words: list[str]
) -> None:
    """HTTP by status 400; gRPC by a message in the stream, and by the status if it is asked for."""
    for endpoint in ("generate", "generate_stream"):
        status, body = post(local_server, GOOD | fields, endpoint)
        assert status == 400, body
        assert all(word in body for word in words), body
    for headers in (None, {"triton_grpc_error": "true"}):
        with pytest.raises(InferenceServerException) as raised:
            list(grpc_stream(local_server, grpc_inputs(GOOD | fields), headers))
        assert all(word in raised.value.message() for word in words)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


OTHERS: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_k": 1, "temperature": 0.0}]


@pytest.mark.parametrize("model", [MODEL_NAME, *ALIASES])
@pytest.mark.parametrize("missing", [["text_input"], ["max_tokens"], list(GOOD)], ids="+".join)
def test_what_is_required_and_missing_is_named_everywhere(
    local_server: TritonServer, model: str, missing: list[str]
) -> None:
    """Whatever other tensors the request has, whose number is all that Triton itself checks."""
    for others in OTHERS:
        fields = {name: value for name, value in GOOD.items() if name not in missing} | others
        for endpoint in ("generate", "generate_stream"):
            status, answer = post(local_server, fields, endpoint, model)
            assert (status, num_named(answer, missing)) == (400, len(missing)), answer
        with pytest.raises(InferenceServerException) as raised:
            list(grpc_stream(local_server, grpc_inputs(fields), model=model))
        assert num_named(raised.value.message(), missing) == len(missing), raised.value.message()


def num_named(message: str, names: list[str]) -> int:
    assert ".py" not in message
    return sum(message.count(name) for name in names)


@pytest.mark.parametrize(
    ("route", "code"), [("", 404), ("/config", 404), ("/ready", 400), ("/stats", 400)]
)
def test_an_unknown_model_has_the_documented_status(
    local_server: TritonServer, route: str, code: int
) -> None:
    """Triton's own, which the gateway passes on."""
    for url in (local_server.address.http_url, local_server.address.triton_url):
        assert status_of(f"{url}/v2/models/unknown{route}") == code
    [row] = [line for line in CLIENTS.read_text().splitlines() if "no such model" in line]
    codes, *_ = row.removeprefix("| ").partition(" |")
    assert codes.startswith("404; 400 ")
    assert (f"`{route}`" in codes) == (code == 400)


def test_several_prompts(local_server: TritonServer) -> None:
    status, _ = post(local_server, GOOD | {"text_input": ["one", "two"]}, "generate")
    assert status == 400
    inputs = []
    for name, wire, values in (
        ("text_input", "BYTES", np.array([[b"one"], [b"two"]], dtype=np.object_)),
        ("max_tokens", "INT32", np.array([[4], [4]], dtype=np.int32)),
    ):
        tensor = triton.InferInput(name, [2, 1], wire)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    with pytest.raises(InferenceServerException, match="batch-size must be <= 1"):
        list(grpc_stream(local_server, inputs))


def test_wrong_dtype_and_shape(local_server: TritonServer) -> None:
    """Tensors of another type or shape are refused by Triton, by name."""
    wrong_dtype = triton.InferInput("max_tokens", [1, 1], "FP32")
    wrong_dtype.set_data_from_numpy(np.array([[4.0]], dtype=np.float32))
    wrong_shape = triton.InferInput("max_tokens", [1, 2], "INT32")
    wrong_shape.set_data_from_numpy(np.array([[4, 4]], dtype=np.int32))
    text = grpc_inputs({"text_input": "Question:"})
    for tensor in (wrong_dtype, wrong_shape):
        with pytest.raises(InferenceServerException, match="max_tokens"):
            list(grpc_stream(local_server, [*text, tensor]))


def test_a_grammar_that_does_not_end_is_refused_and_delays_nobody(
    local_server: TritonServer,
) -> None:
    schema = {"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(30)]}
    guided = {"guided_decoding_guide_type": "json_schema"}
    endless = GOOD | guided | {"guided_decoding_guide": json.dumps(schema)}
    choice = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["yes", "no"]'}
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(post, local_server, endless, "generate")
        status, body = post(local_server, GOOD | choice, "generate")
        assert (status, refused.done()) == (200, False), body
        assert json.loads(body)["text_output"].removeprefix("Question:") in ("yes", "no")
        status, body = refused.result()
    assert status == 400
    assert "guided_decoding_guide: must be a grammar that works: compiling took" in body
