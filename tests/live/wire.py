"""The least clients that the live tests need, on public client libraries."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import INPUTS, MODEL_NAME
from smartspec_py.api.tensor_spec import NUMPY_TYPES


def post(
    server: TritonServer,
    body: dict[str, Any] | bytes,
    endpoint: str,
    model: str = MODEL_NAME,
) -> tuple[int, str]:
    """Status and body of one POST to the model."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{server.address.http_url}/v2/models/{model}/{endpoint}"
    request = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def generate(server: TritonServer, **fields: Any) -> dict[str, Any]:
    status, body = post(server, fields, "generate")
    assert status == 200, body
    return json.loads(body)


def generate_stream(server: TritonServer, **fields: Any) -> list[dict[str, Any]]:
    status, body = post(server, {**fields, "stream": True}, "generate_stream")
    assert status == 200, body
    lines = [line for line in body.splitlines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


def grpc_inputs(fields: Mapping[str, Any]) -> list[triton.InferInput]:
    """With the types of the contract: [1, n] for a list, [1, 1] for other values."""
    dtypes = {tensor.name: tensor.dtype for tensor in INPUTS}
    inputs = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        raw = [item.encode() if isinstance(item, str) else item for item in values]
        array = np.array([raw], dtype=NUMPY_TYPES[dtypes[name]])
        wire = "BYTES" if dtypes[name] == "STRING" else dtypes[name]
        item = triton.InferInput(name, list(array.shape), wire)
        item.set_data_from_numpy(array)
        inputs.append(item)
    return inputs


def grpc_stream(
    server: TritonServer,
    inputs: list[Any],
    headers: dict[str, str] | None = None,
    model: str = MODEL_NAME,
) -> Iterator[Any]:
    """Results of one streamed request; raises its error."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.address.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)), headers=headers)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=60)
            if error is not None:
                raise error
            yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
