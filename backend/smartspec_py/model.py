"""The Triton model: read, build, start; decode, enqueue; stop.

Triton loads this file from the backend's folder, in a separate process. `execute` only hands
requests over and returns at once; responses are sent by the responder's thread.

This folder contains all code that the backend needs, except its dependencies. The package need not
be installed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

if find_spec("smartspec_py") is None:
    _spec = spec_from_file_location("smartspec_py", Path(__file__).with_name("__init__.py"))
    assert _spec is not None
    sys.modules["smartspec_py"] = module_from_spec(_spec)

from smartspec_py.codec import decode, encode, encode_error, wanted_outputs
from smartspec_py.config import CONFIG_NAME, read_config
from smartspec_py.engines.phases import LIBRARIES, begin
from smartspec_py.faults import ConfigError, sentence
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.link import BackendEnd, Beat, News, inherited_link, report_of
from smartspec_py.serving.messages import Reply
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.server import Server
from smartspec_py.triton_metrics import TritonMetrics

logger = logging.getLogger(__name__)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonSink:
    """A request's response sender as a `Sink`."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._wanted, self._is_gateway = wanted_outputs(request)
        self.accept()

    def accept(self) -> None:
        """See `GATEWAY`."""
        if self._is_gateway:
            self._sender.send(pb_utils.InferenceResponse([]))

    def send(self, reply: Reply) -> None:
        flags = 0 if reply.finish_reason is None else _FINAL
        self._sender.send(encode(reply, self._wanted), flags=flags)

    def fail(self, code: ErrorCode, message: str) -> None:
        error = encode_error(code, message, is_gateway=self._is_gateway)
        self._sender.send(error, flags=_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class TritonLog(logging.Handler):
    """Python's log records in Triton's log and, during the start, its phases and this package's
    warnings over the link."""

    def __init__(self, link: BackendEnd | None) -> None:
        super().__init__()
        self.link = link

    def emit(self, record: logging.LogRecord) -> None:
        if self.link is not None and (report := report_of(record)) is not None:
            self.link.send(report)
        if record.levelno < logging.INFO:
            return
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(self.format(record))
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(self.format(record))
        else:
            pb_utils.Logger.log_info(self.format(record))


class TritonPythonModel:
    """The class that Triton's Python backend loads."""

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        self._server: Server | None = None
        self._link = inherited_link(self._beat, self._drain)
        log = TritonLog(self._link)
        logging.basicConfig(level=logging.INFO, handlers=[log], force=True)
        begin(LIBRARIES)
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            config = read_config(folder / CONFIG_NAME)
            engine = build_engine(config, folder)
        except Exception as error:
            is_refusal = isinstance(error, ConfigError)
            reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            if self._link is not None:
                self._link.send(News(error=reason, is_refusal=is_refusal))
            if is_refusal:  # without a traceback after the message
                raise pb_utils.TritonModelException(reason) from None
            raise
        server = Server(
            engine,
            config,
            metrics=TritonMetrics(self._name, args["model_version"]).put,
            on_failure=self._stop_serving,
            # A launcher starts the drain. Without one, Triton is asked regularly.
            should_drain=self._is_unloading if self._link is None else lambda: False,
        )
        server.start()
        self._server = server
        log.link = None
        if self._link is not None:
            self._link.beat()  # before the model is ready: from then on, a stop drains it

    def execute(self, requests: list[Any]) -> None:
        assert self._server is not None
        for request in requests:
            sink = TritonSink(request)
            try:
                self._server.submit(decode(request), sink)
            except RequestError as error:
                self._server.refuse(sink, error)
            except BaseException as error:  # panics of libraries in Rust too
                logger.exception("a request was not accepted")
                self._server.refuse(sink, RequestError(ErrorCode.INTERNAL, sentence(error)))

    def finalize(self) -> None:
        if self._link is not None:
            self._link.end()
        if self._server is not None:
            self._server.stop()
        if self._link is not None:
            self._link.stopped()

    def _beat(self) -> Beat | None:
        """None until the model is loaded."""
        server = self._server
        if server is None:
            return None
        state = (server.num_open, server.failure or "", server.is_draining)
        return Beat(os.getpid(), *state, num_steps=server.num_steps, facts=server.facts)

    def _drain(self) -> None:
        """Called by the link's thread, which then sends a beat."""
        if self._server is not None:
            self._server.drain()

    def _is_unloading(self) -> bool:
        """Whether Triton unloads this model. It then waits for open requests and refuses new
        ones."""
        return not pb_utils.is_model_ready(self._name)

    def _stop_serving(self, reason: str) -> None:
        """Make the model not ready: without its loop it must get no more requests."""
        pb_utils.Logger.log_error(f"{self._name} is no longer served: {reason}")
        # In a thread, because unloading ends in `finalize`, which waits for the caller.
        threading.Thread(target=pb_utils.unload_model, args=(self._name,), daemon=True).start()
