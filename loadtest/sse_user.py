"""A Locust user of Triton's `generate_stream`: server-sent events over HTTP."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from llm_user import LlmUser
from locust import FastHttpUser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS

from smartspec_bench.streams import StreamError, outputs_of
from smartspec_py.api.contract import MODEL_NAME

PATH = f"/v2/models/{MODEL_NAME}/generate_stream"

HEADERS_ROW = "headers"
"""The row for the time until the headers of a streamed request. Locust requires this row."""


class SseUser(LlmUser, FastHttpUser):
    transport = "SSE"

    # Locust's default of 60 s would end a request that waits in a queue. `LlmUser` has a timeout.
    network_timeout = 3600.0

    def stream(self, fields: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        try:
            # An exception in this block suppresses the row of the headers, so that `e2e` alone
            # counts a failure.
            with self.client.post(
                PATH, json=dict(fields), stream=True, catch_response=True, name=HEADERS_ROW
            ) as response:
                if response.status_code != 200:
                    raise StreamError(_reason(response))
                # Other read methods wait for whole blocks, or for the end of a short answer.
                for line in iter(lambda: response.stream.readline(b"\n"), b""):
                    if line.startswith(b"data:"):
                        yield outputs_of(line.removeprefix(b"data:"))
        except FAILURE_EXCEPTIONS as error:
            raise StreamError(f"{type(error).__name__}: {error}") from error


def _reason(response: Any) -> str:
    if not response.status_code:
        return f"no answer: {response.error}"
    return f"HTTP {response.status_code}: {(response.text or '').strip():.300}"
