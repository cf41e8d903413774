#!/usr/bin/env python3
"""Send many prompts over gRPC with Triton's asyncio client and a limited number in flight.

    clients/grpc_many.py prompts.jsonl --concurrency 8

Each line of the file is a JSON object with `prompt` and optionally `max_tokens`, which replaces
--max-tokens. Prints each answer when it ends, then one line of counts. Exit status 1 if any request
failed.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send many prompts with limited concurrency.")
    parser.add_argument("prompts", type=Path, help="JSON lines")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--model", default="smartspec")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--policy", help="none, fixed:K or goodput; default: the server's")
    parser.add_argument("--lora", help="name of a LoRA adapter of the server")
    parser.add_argument("--concurrency", type=int, default=8, help="most requests in flight")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    return parser.parse_args()


def tensor(name: str, dtype: str, value: np.ndarray) -> triton.InferInput:
    item = triton.InferInput(name, [1, 1], dtype)
    item.set_data_from_numpy(value.reshape(1, 1))
    return item


def request_inputs(item: dict[str, Any], arguments: argparse.Namespace) -> list[triton.InferInput]:
    max_tokens = item.get("max_tokens", arguments.max_tokens)
    inputs = [
        tensor("text_input", "BYTES", np.array(item["prompt"].encode(), dtype=np.object_)),
        tensor("max_tokens", "INT32", np.array(max_tokens, dtype=np.int32)),
        tensor("stream", "BOOL", np.array(True)),
    ]
    if arguments.policy is not None:
        policy = np.array(arguments.policy.encode(), dtype=np.object_)
        inputs.append(tensor("speculation_policy", "BYTES", policy))
    if arguments.lora is not None:
        name = np.array(arguments.lora.encode(), dtype=np.object_)
        inputs.append(tensor("lora_name", "BYTES", name))
    return inputs


async def answer(
    client: triton.InferenceServerClient, item: dict[str, Any], arguments: argparse.Namespace
) -> tuple[str, int]:
    """The text of one answer and its number of tokens. Raises InferenceServerException."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": arguments.model,
            "inputs": request_inputs(item, arguments),
            "enable_empty_final_response": True,
        }

    text, num_tokens = b"", 0
    # Read to the end of the stream, which follows the last response. If a client cancels at that
    # moment, Triton 2.51 may keep the request, and its model cannot be unloaded any more.
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        if (delta := result.as_numpy("text_output")) is not None:
            text += delta.item()
            num_tokens += result.as_numpy("num_output_tokens").item()
    return text.decode(), num_tokens


async def main() -> int:
    """Return the number of failed requests. Raises the error of the file or of the connection."""
    arguments = parse_arguments()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines if line.strip()]
    slots, start = asyncio.Semaphore(arguments.concurrency), time.monotonic()

    async def run(index: int, item: dict[str, Any]) -> int | None:
        async with slots:
            try:
                async with asyncio.timeout(arguments.timeout):
                    text, num_tokens = await answer(client, item, arguments)
            except (InferenceServerException, grpc.aio.AioRpcError, TimeoutError) as error:
                message = error.details() if isinstance(error, grpc.RpcError) else str(error)
                print(f"[{index}] error: {message or 'timed out'}", file=sys.stderr)
                return None
        print(f"[{index}] {text}", flush=True)
        return num_tokens

    async with triton.InferenceServerClient(arguments.url) as client:
        await client.is_server_live()  # raises if no server listens
        counts = await asyncio.gather(*(run(*numbered) for numbered in enumerate(items)))
    num_tokens, elapsed_s = sum(filter(None, counts)), time.monotonic() - start
    print(
        f"{len(items)} requests, {counts.count(None)} failed, {num_tokens} tokens in "
        f"{elapsed_s:.2f} s, {num_tokens / elapsed_s:.1f} tokens/s"
    )
    return counts.count(None)


if __name__ == "__main__":
    try:
        sys.exit(1 if asyncio.run(main()) else 0)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except InferenceServerException as error:
        sys.exit(f"error: {error.message()}")
