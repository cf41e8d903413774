"""Names of the one model for clients of Triton's protocols. Triton itself knows MODEL_NAME, and
answers with it."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from smartspec_gateway.limits import Refused
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.faults import shown

ROUTES = "/v2/models/"
_RENAMED = service_pb2.ModelReadyRequest(name=MODEL_NAME).SerializeToString()
"""Appended to a message, it replaces the model's name, which is field 1 of all of them: of a field
that comes twice, the last one counts."""


class Names:
    def __init__(self, names: Sequence[str]) -> None:
        """names: beside MODEL_NAME. They may contain any characters, such as OWNER/NAME."""
        self._names = sorted(names, key=len, reverse=True)

    def path(self, path: str) -> str:
        """The path for Triton of a client's path, in which a / of a name may be %2F."""
        plain = unquote(path)
        for prefix in (ROUTES + name for name in self._names):
            if plain == prefix or plain.startswith(f"{prefix}/"):
                return ROUTES + MODEL_NAME + plain[len(prefix) :]
        return path

    def message(self, raw: bytes, name: str) -> bytes:
        """The message for Triton of a client's message with this name of the model."""
        return raw + _RENAMED if name in self._names else raw

    def unknown(self, model: str) -> Refused:
        known = " or ".join(map(repr, (*self._names, MODEL_NAME)))
        return Refused(404, f"model: got {shown(model)}, must be {known}, or a name of --alias")


def name_in(raw: bytes) -> str:
    """The model's name in a short message of any kind; empty if it has none."""
    try:
        return str(service_pb2.ModelReadyRequest.FromString(raw).name)
    except DecodeError:
        return ""  # Triton refuses it
