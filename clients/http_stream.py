#!/usr/bin/env python3
"""Stream one answer over HTTP with Triton's generate_stream. Needs only the standard library.

    clients/http_stream.py "Task: chat\\nUser: Hello!\\nAnswer:" --max-tokens 64

Prints the text as it arrives, then one line of counts. Exit status 1 and a message on an error.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stream one answer over HTTP.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smartspec")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--policy", help="none, fixed:K or goodput; default: the server's")
    parser.add_argument("--lora", help="name of a LoRA adapter of the server")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without a response")
    return parser.parse_args()


def request_body(arguments: argparse.Namespace) -> dict[str, Any]:
    body = {
        "text_input": arguments.prompt,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
        "seed": arguments.seed,
        "speculation_policy": arguments.policy,
        "lora_name": arguments.lora,
    }
    return {name: value for name, value in body.items() if value is not None}


def stream(
    url: str, model: str, body: dict[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the responses, each a JSON object. Raises RuntimeError with the server's message."""
    request = urllib.request.Request(
        f"{url}/v2/models/{model}/generate_stream",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as lines:
            # Server-sent events: lines `data: {...}`, separated by empty lines.
            for line in lines:
                if line.startswith(b"data:"):
                    event = json.loads(line.removeprefix(b"data:"))
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    yield event
    except urllib.error.HTTPError as error:
        # The body is JSON, or an event if the answer had already begun.
        reason = json.loads(error.read().strip().removeprefix(b"data:") or b"{}")
        raise RuntimeError(f"HTTP {error.code}: {reason.get('error', error.reason)}") from error


def main() -> None:
    arguments = parse_arguments()
    start, num_tokens, last = time.monotonic(), 0, {}
    for last in stream(arguments.url, arguments.model, request_body(arguments), arguments.timeout):
        print(last["text_output"], end="", flush=True)
        num_tokens += last["num_output_tokens"]
    if not last.get("finish_reason"):
        raise RuntimeError("the stream ended without a final response")
    elapsed_s = time.monotonic() - start
    print(
        f"\n{num_tokens} tokens in {elapsed_s:.2f} s, {num_tokens / elapsed_s:.1f} tokens/s; "
        f"accepted {last['total_accepted_draft_tokens']} of {last['total_draft_tokens']} drafted; "
        f"finish: {last['finish_reason']}, seed: {last['seed']}"
    )


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"\nerror: {error}")
