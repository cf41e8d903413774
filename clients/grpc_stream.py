#!/usr/bin/env python3
"""Stream one answer over gRPC with Triton's own client (pip install 'tritonclient[grpc]').

    clients/grpc_stream.py "Task: chat\\nUser: Hello!\\nAnswer:" --max-tokens 64

Prints the text as it arrives, then one line of counts. Exit status 1 and a message on an error.
"""

import argparse
import queue
import sys
import time
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stream one answer over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--model", default="smartspec")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--policy", help="none, fixed:K or goodput; default: the server's")
    parser.add_argument("--lora", help="name of a LoRA adapter of the server")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without a response")
    return parser.parse_args()


def tensor(name: str, dtype: str, value: object) -> triton.InferInput:
    """A scalar as a tensor. Its shape is [1, 1], because the model has a batch dimension."""
    item = triton.InferInput(name, [1, 1], dtype)
    item.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(dtype)))
    return item


def request_inputs(arguments: argparse.Namespace) -> list[triton.InferInput]:
    inputs = [
        tensor("text_input", "BYTES", arguments.prompt.encode()),
        tensor("max_tokens", "INT32", arguments.max_tokens),
        tensor("temperature", "FP32", arguments.temperature),
        tensor("stream", "BOOL", True),
    ]
    if arguments.seed is not None:
        inputs.append(tensor("seed", "UINT64", arguments.seed))
    if arguments.policy is not None:
        inputs.append(tensor("speculation_policy", "BYTES", arguments.policy.encode()))
    if arguments.lora is not None:
        inputs.append(tensor("lora_name", "BYTES", arguments.lora.encode()))
    return inputs


def stream(arguments: argparse.Namespace) -> Iterator[triton.InferResult]:
    """Yield the responses. Raises InferenceServerException, or queue.Empty after the timeout."""
    responses: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(arguments.url) as client:
        client.is_server_live()  # raises if no server listens; a stream does not report this
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(
            arguments.model, request_inputs(arguments), enable_empty_final_response=True
        )
        while True:
            result, error = responses.get(timeout=arguments.timeout)
            if error is not None:
                raise error
            # The final response has the last text, or it is empty and follows the last text.
            if result.as_numpy("text_output") is not None:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def main() -> None:
    arguments = parse_arguments()
    start, num_tokens, last = time.monotonic(), 0, {}
    for result in stream(arguments):
        last = {o.name: result.as_numpy(o.name).item() for o in result.get_response().outputs}
        print(last["text_output"].decode(), end="", flush=True)
        num_tokens += last["num_output_tokens"]
    elapsed_s = time.monotonic() - start
    print(
        f"\n{num_tokens} tokens in {elapsed_s:.2f} s, {num_tokens / elapsed_s:.1f} tokens/s; "
        f"accepted {last['total_accepted_draft_tokens']} of {last['total_draft_tokens']} drafted; "
        f"finish: {last['finish_reason'].decode()}, seed: {last['seed']}"
    )


if __name__ == "__main__":
    try:
        main()
    except queue.Empty:
        sys.exit("\nerror: no response from the server")
    except InferenceServerException as error:
        sys.exit(f"\nerror: {error.message()}")
