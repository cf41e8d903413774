"""A process of `workers`: reads bodies from its standard input, and writes pickled results.

It ends with its parent, at the end of its input. A body that takes longer than WORK_S ends it.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from functools import cache

from smartspec_gateway import grpc_front, v2
from smartspec_gateway.workers import MAX_PROCESS_BYTES, READY, SIZE_BYTES, WORK_S, Work
from smartspec_launch.gateway import from_json


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_PROCESS_BYTES, MAX_PROCESS_BYTES))
    given, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no result
    results.write(READY)
    results.flush()
    while line := given.readline():
        header = json.loads(line)
        body = given.read(header["size"])
        signal.alarm(WORK_S)
        result = _result(header["kind"], body, header["context_len"])
        signal.alarm(0)
        results.write(len(result).to_bytes(SIZE_BYTES) + result)
        results.flush()


def _result(kind: str, body: bytes, context_len: int) -> bytes:
    """Whether it is a result, and the result or the exception, pickled."""
    try:
        return pickle.dumps((True, _work_of(kind)(kind, body, context_len)), 5)
    except Exception as error:
        return pickle.dumps((False, error), 5)


def _work_of(kind: str) -> Work:
    if kind in v2.KINDS:
        return v2.request
    return grpc_front.checked if kind == grpc_front.KIND else _of_openai()


@cache
def _of_openai() -> Work:
    # Imported here, because it loads tokenizers.
    from smartspec_gateway.openai.app import work_of

    _, openai, _ = from_json(sys.argv[1])
    assert openai is not None
    return work_of(openai)


if __name__ == "__main__":
    main()
