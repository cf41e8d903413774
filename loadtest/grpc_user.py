"""A user of Triton's gRPC stream, by Triton's own client.

grpc must be told of gevent before it is used, or its waiting blocks every user of the process.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Mapping
from typing import Any

import grpc.experimental.gevent as grpc_gevent  # type: ignore[import-untyped]
import tritonclient.grpc as triton
from llm_user import LlmUser
from tritonclient.utils import InferenceServerException

from smartspec_bench.streams import StreamError, grpc_inputs, grpc_outputs
from smartspec_py.api.contract import MODEL_NAME

grpc_gevent.init_gevent()

Arrived = queue.Queue[tuple[Any, InferenceServerException | None]]


class GrpcUser(LlmUser):
    """One connection and one stream, open as long as the user lives."""

    transport = "gRPC"

    def on_start(self) -> None:
        self._client = triton.InferenceServerClient(self.environment.parsed_options.grpc)
        self._open()

    def on_stop(self) -> None:
        """A stream that is left open keeps the process alive, and deaf to SIGTERM. Nothing is in
        flight on it here, and Triton 2.51 may keep a request that is cancelled at its end."""
        self._client.stop_stream()
        self._client.close()

    def _open(self) -> None:
        arrived: Arrived = queue.Queue()
        self._arrived = arrived
        self._client.start_stream(lambda result, error: arrived.put((result, error)))

    def stream(self, fields: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        is_over = False
        try:
            inputs = grpc_inputs(fields)
            self._client.async_stream_infer(MODEL_NAME, inputs, enable_empty_final_response=True)
            while not is_over:
                result, error = self._arrived.get()
                if error is not None:
                    raise error
                is_over = result.get_response().parameters["triton_final_response"].bool_param
                if result.get_response().outputs:
                    yield grpc_outputs(result)
        except InferenceServerException as error:
            raise StreamError(str(error.message())) from error
        finally:
            if not is_over:
                # What is still to come must not be taken for the answer to the next request.
                self._client.stop_stream(cancel_requests=True)
                self._open()
