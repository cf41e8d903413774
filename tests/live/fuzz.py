"""A bounded fuzz client: valid and invalid requests from the contract's table, over all three ways.

    python tests/live/fuzz.py --url HOST:HTTP_PORT --grpc HOST:GRPC_PORT --requests 10000 --seed 1

A valid request must end in exactly one last response; an invalid one in an error that names its
field and is no fault of the server; and the server must serve afterwards. Prints a JSON summary,
and ends with 1 where anything failed. The same seed sends the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import tritonclient.grpc.aio as triton
from fuzz_cases import PARSER_KINDS, Answer, Case, Kind, Way, find_problem, make_case
from fuzz_values import SPECS
from grpc import RpcError
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.api.tensor_spec import NUMPY_TYPES

TIMEOUT_S = 120.0
MAX_REPORTED = 20


@dataclass
class Summary:
    """What a run found. parser_500: answers of Triton's own parser, which are no failures."""

    seed: int
    num_requests: int = 0
    num_by_kind: Counter[str] = field(default_factory=Counter)
    num_by_way: Counter[str] = field(default_factory=Counter)
    parser_500: int = 0
    num_failures: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    is_alive: bool = False
    duration_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.is_alive and not self.num_failures

    def add(self, index: int, case: Case, answer: Answer) -> None:
        self.num_requests += 1
        self.num_by_kind[case.kind] += 1
        self.num_by_way[case.way] += 1
        self.parser_500 += answer.status == 500 and case.kind in PARSER_KINDS
        problem = find_problem(case, answer)
        if not problem:
            return
        self.num_failures += 1
        if len(self.failures) < MAX_REPORTED:
            self.failures.append(
                {
                    "index": index,
                    "model": case.model,
                    "way": case.way,
                    "kind": case.kind,
                    "named": case.named,
                    "problem": problem,
                    "error": answer.error[:200],
                    "fields": repr(case.fields)[:400],
                }
            )


async def run(
    http_url: str,
    grpc_url: str,
    num_requests: int,
    seed: int,
    concurrency: int,
    models: Sequence[str] = (MODEL_NAME,),
) -> Summary:
    """http_url, grpc_url: HOST:PORT. models: the names that the server has for its model. Raises
    nothing for what the server does."""
    summary = Summary(seed)
    indices = iter(range(num_requests))
    start_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{http_url}", timeout=timeout) as http:

        async def work() -> None:
            async with triton.InferenceServerClient(grpc_url) as grpc:
                for index in indices:
                    case = make_case(random.Random(f"{seed}/{index}"), models)
                    summary.add(index, case, await _ask(case, http, grpc))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        summary.is_alive = await _is_alive(http)
    summary.duration_s = round(time.monotonic() - start_s, 1)
    return summary


async def _ask(case: Case, http: aiohttp.ClientSession, grpc: Any) -> Answer:
    answer = Answer()
    ask = _ask_grpc(case, grpc, answer) if case.way is Way.GRPC else _ask_http(case, http, answer)
    try:
        await asyncio.wait_for(ask, TIMEOUT_S)
    except (TimeoutError, OSError, aiohttp.ClientError, RpcError) as error:
        answer.status, answer.error = 599, f"{type(error).__name__}: {error}"
    return answer


async def _ask_http(case: Case, http: aiohttp.ClientSession, answer: Answer) -> None:
    url = f"/v2/models/{case.model}/{case.way}"
    async with http.post(url, data=io.BytesIO(case.json_body())) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = await response.text(errors="replace") or "empty"
        elif case.way is Way.GENERATE:
            _take(answer, await response.read())
        else:
            await _read_events(case, response, answer)


async def _read_events(case: Case, response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if line.startswith(b"data:"):
            _take(answer, line.removeprefix(b"data:"))
            if case.kind is Kind.LEAVES:
                response.close()
                return


def _take(answer: Answer, raw: bytes) -> None:
    event = json.loads(raw)
    if "error" in event:
        answer.error = str(event["error"])
    else:
        answer.reasons.append(event["finish_reason"])


async def _ask_grpc(case: Case, grpc: Any, answer: Answer) -> None:
    is_done = asyncio.Event()
    requests = _grpc_requests(_grpc_request(case), is_done)
    responses = grpc.stream_infer(requests, stream_timeout=TIMEOUT_S)
    try:
        async for result, error in responses:
            if error is not None:
                answer.error = str(error.message())
                is_done.set()
                continue
            response = result.get_response()
            if response.outputs:
                answer.reasons.append(result.as_numpy("finish_reason").item().decode())
            if case.kind is Kind.LEAVES and answer.reasons:
                return
            if response.parameters["triton_final_response"].bool_param:
                is_done.set()
    except InferenceServerException as error:
        answer.error = str(error.message())
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        answer.error = "the stream was cancelled, and not by this client"
    finally:
        is_done.set()
        responses.cancel()


async def _grpc_requests(
    request: dict[str, Any], is_done: asyncio.Event
) -> AsyncIterator[dict[str, Any]]:
    """Held open until the answer is there; then the server ends the stream, after whatever it may
    wrongly send behind the last response."""
    yield request
    await is_done.wait()


def _grpc_request(case: Case) -> dict[str, Any]:
    return {
        "model_name": case.model,
        "inputs": [_grpc_input(case, name, value) for name, value in case.fields.items()],
        "enable_empty_final_response": True,
        "parameters": case.parameters or None,
    }


def _grpc_input(case: Case, name: str, value: Any) -> Any:
    """A tensor [1, n]."""
    dtype = case.dtypes.get(name, SPECS[name].dtype)
    values = value if isinstance(value, list) else [value]
    raw = [item.encode() if isinstance(item, str) else item for item in values]
    array = np.array([raw], dtype=NUMPY_TYPES[dtype])
    tensor = InferInput(name, list(array.shape), "BYTES" if dtype == "STRING" else dtype)
    tensor.set_data_from_numpy(array)
    return tensor


async def _is_alive(http: aiohttp.ClientSession) -> bool:
    """Ready, and serving."""
    body = b'{"text_input": "Question:", "max_tokens": 2}'
    try:
        async with http.get(f"/v2/models/{MODEL_NAME}/ready") as ready:
            is_ready = ready.status == 200
        async with http.post(f"/v2/models/{MODEL_NAME}/generate", data=body) as response:
            return is_ready and response.status == 200
    except (OSError, aiohttp.ClientError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Sends valid and invalid requests to a server.")
    parser.add_argument("--url", default="127.0.0.1:8000", help="HTTP address, HOST:PORT")
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="gRPC address, HOST:PORT")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--models", nargs="+", default=[MODEL_NAME], help="its name and aliases")
    asked = parser.parse_args()
    summary = asyncio.run(
        run(asked.url, asked.grpc, asked.requests, asked.seed, asked.concurrency, asked.models)
    )
    print(json.dumps(vars(summary), indent=2, ensure_ascii=False))
    return 0 if summary.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
