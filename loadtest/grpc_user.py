"""A Locust user of Triton's gRPC stream, with Triton's own client.

grpc must be set up for gevent before its first use. Otherwise a waiting call blocks all users of
the process.
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
    """A user with one connection and one stream, which stay open until the user stops."""

    transport = "gRPC"

    def on_start(self) -> None:
        self._client = triton.InferenceServerClient(self.environment.parsed_options.grpc)
        self._open()

    def on_stop(self) -> None:
        """Close the stream. With an open stream, the process does not end and ignores SIGTERM.

        The stream is not cancelled: nothing is in flight here, and Triton 2.51 may keep a request
        that is cancelled at its end.
        """
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
                # Later responses of this request must not be taken as the answer to the next one.
                self._client.stop_stream(cancel_requests=True)
                self._open()
