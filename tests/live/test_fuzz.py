"""Random requests, valid and invalid, in all three ways to a real Triton.

A valid one ends in exactly one last response. An invalid one gets an error that names its field and
is no fault of the server. Afterwards the server holds nothing.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fuzz_values import INT32_MAX, NOT_UTF8, OPTIONAL, SERVED, SPECS, invalid_values, valid_fields
from scrape import scrape_when
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException
from wire import grpc_stream, post

from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.api.refused import REFUSED
from smartspec_py.api.tensor_spec import NUMPY_TYPES

pytestmark = pytest.mark.triton

NUM_REQUESTS = 400
REQUIRED = ["text_input", "max_tokens"]
BEYOND_MODEL: dict[str, list[Any]] = {
    "max_tokens": [100_000, INT32_MAX],
    "min_tokens": [17, INT32_MAX],
    "end_id": [10**6, INT32_MAX],
    "speculation_policy": ["magic", "fixed:0", "fixed:x", "fixed:1000"],
}


def test_each_gets_its_answer_and_nothing_is_held_after(torch_server: TritonServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda number: problem(torch_server, number), range(NUM_REQUESTS))
    assert [each for each in found if each] == []
    assert post(torch_server, {"text_input": "a", "max_tokens": 2}, "generate")[0] == 200
    held = (
        "smartspec_num_requests_running",
        "smartspec_num_requests_waiting",
        "smartspec_kv_cache_utilization",
    )
    scrape = scrape_when(torch_server, lambda found: not any(found.get(name) for name in held))
    assert {name: scrape.get(name) for name in held} == dict.fromkeys(held, 0.0)


def problem(server: TritonServer, number: int) -> str:
    """What is wrong with the answer to this request; empty where nothing is."""
    rng = random.Random(f"1/{number}")
    way = rng.choice(["generate", "generate_stream", "grpc"])
    names = rng.sample(OPTIONAL, rng.choice([0, 1, 3, 8, len(OPTIONAL)]))
    fields = valid_fields(rng, [*REQUIRED, *names], SERVED)
    if way == "generate":
        fields.pop("stream", None)
    is_good = rng.random() < 0.45
    named = "" if is_good else spoil(rng, fields, is_http=way != "grpc")
    model = rng.choice([MODEL_NAME, *ALIASES])
    if way == "grpc":
        reasons, error = ask_grpc(server, model, fields)
    else:
        reasons, error = ask_http(server, model, way, fields)
    shown = f"{number} {way} {fields!r:.300}: {reasons[-2:]} {error:.300}"
    if is_good:
        is_whole = not error and reasons[-1:] != [""] and sum(map(bool, reasons)) == 1
        return "" if is_whole else shown
    is_named = named in error or "must be at most" in error  # the gateway refuses large ones whole
    is_refused = error and is_named and not error.startswith("5") and not any(reasons)
    return "" if is_refused else f"must name {named!r}: {shown}"


def spoil(rng: random.Random, fields: dict[str, Any], is_http: bool) -> str:
    """Make the request invalid. Returns what its error must name."""
    kind = rng.choice(["range", "range", "range", "missing", "type", "together", "huge", "name"])
    if kind == "range" or (kind == "name" and not is_http):
        name = rng.choice([name for name in SPECS if invalid_values(SPECS[name])])
        fields[name] = rng.choice(invalid_values(SPECS[name]) + BEYOND_MODEL.get(name, []))
    elif kind == "missing":
        name = rng.choice(REQUIRED)
        del fields[name]
    elif kind == "type":
        name = rng.choice(list(SPECS))
        fields[name] = rng.choice([{"a": 1}, None, [[1]]]) if is_http else WrongType()
    elif kind == "together":
        name = "random_seed"
        fields |= {"seed": 1, "random_seed": 2}
    elif kind == "huge":
        name = rng.choice(["text_input", "proposer", "stop_words"])
        text = rng.choice(["x", "🙂", " "]) * 500_000
        fields[name] = [text] if SPECS[name].is_list else text
    else:
        name = rng.choice(["temprature", "k" * 60, *REFUSED])
        fields[name] = rng.choice([1, True, "text", 0.5, None, [1]])
    return name


class WrongType:
    """Becomes a tensor of a type that no field has."""


def ask_http(
    server: TritonServer, model: str, way: str, fields: dict[str, Any]
) -> tuple[list[str], str]:
    """The finish reasons of all responses, and the error with its status before it."""
    text = json.dumps(fields, ensure_ascii=False, default=lambda raw: raw.decode(*SURROGATES))
    status, body = post(server, text.encode(*SURROGATES), way, model)
    if status != 200:
        return [], f"{status} {body or 'empty'}"
    lines = [line.removeprefix("data:") for line in body.split("\n") if line]
    events = [json.loads(line) for line in lines]
    reasons = [event["finish_reason"] for event in events if "error" not in event]
    return reasons, "".join(str(event["error"]) for event in events if "error" in event)


SURROGATES = ("utf-8", "surrogateescape")
"""Bytes that are no UTF-8 go into the body as they are."""


def ask_grpc(server: TritonServer, model: str, fields: dict[str, Any]) -> tuple[list[str], str]:
    reasons, inputs = [], [tensor(name, value) for name, value in fields.items()]
    try:
        for result in grpc_stream(server, inputs, model=model):
            if result.get_response().outputs:
                reasons.append(result.as_numpy("finish_reason").item().decode())
    except InferenceServerException as error:
        return reasons, str(error.message())
    return reasons, ""


def tensor(name: str, value: Any) -> InferInput:
    dtype = "FP64" if isinstance(value, WrongType) else SPECS[name].dtype
    values = value if isinstance(value, list) else [1.0 if dtype == "FP64" else value]
    raw = [item.encode() if isinstance(item, str) else item for item in values]
    array = np.array([raw], dtype=NUMPY_TYPES.get(dtype, np.float64))
    found = InferInput(name, list(array.shape), "BYTES" if dtype == "STRING" else dtype)
    found.set_data_from_numpy(array)
    return found


@pytest.mark.parametrize("body", [b"", b"[]", b"5", NOT_UTF8, b"{}", b'{"text_input": "a", '])
def test_no_json_is_refused(torch_server: TritonServer, body: bytes) -> None:
    for way in ("generate", "generate_stream"):
        assert post(torch_server, body, way)[0] == 400
