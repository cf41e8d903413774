"""A user of Triton's `generate_stream`: server-sent events over HTTP."""

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
"""Locust times a streamed request until its headers are there, and insists on a row for that."""


class SseUser(LlmUser, FastHttpUser):
    transport = "SSE"

    # Locust's own default of 60 s would end a request that waits in a queue; `LlmUser` has a bound.
    network_timeout = 3600.0

    def stream(self, fields: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        try:
            # What is raised within keeps the row of the headers from being written: a failure is
            # counted once, by `e2e`.
            with self.client.post(
                PATH, json=dict(fields), stream=True, catch_response=True, name=HEADERS_ROW
            ) as response:
                if response.status_code != 200:
                    raise StreamError(_reason(response))
                # Other ways to read it wait for whole blocks, and for the end of short answers.
                for line in iter(lambda: response.stream.readline(b"\n"), b""):
                    if line.startswith(b"data:"):
                        yield outputs_of(line.removeprefix(b"data:"))
        except FAILURE_EXCEPTIONS as error:
            raise StreamError(f"{type(error).__name__}: {error}") from error


def _reason(response: Any) -> str:
    if not response.status_code:
        return f"no answer: {response.error}"
    return f"HTTP {response.status_code}: {(response.text or '').strip():.300}"
