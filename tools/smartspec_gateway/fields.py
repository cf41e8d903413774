"""From fields to tensors and back, by the table of `smartspec_py.api`.

Types and integer sizes are checked here, and values by the backend. Errors name the field.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from smartspec_gateway.limits import MAX_ID_BYTES, Refused
from smartspec_py.api.contract import INPUTS
from smartspec_py.api.errors import field_text, why_incomplete
from smartspec_py.api.refused import why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, Range, TensorSpec

SPECS = {spec.name: spec for spec in INPUTS}

KINDS: Mapping[str, tuple[frozenset[type], str]] = {
    "STRING": (frozenset({str}), "text"),
    "BOOL": (frozenset({bool}), "true or false"),
    "INT32": (frozenset({int}), "an integer"),
    "UINT64": (frozenset({int}), "an integer"),
    "FP32": (frozenset({int, float}), "a number"),
}
"""The Python types of a JSON value by dtype, and their name."""

MAX_SHOWN = 80


def request_of(body: bytes, model: str, version: str, *, may_stream: bool) -> Any:
    """The message for Triton. Raises Refused.

    may_stream: false for the route that returns one response.
    """
    try:
        fields, request_id = _fields(_document(body))
    except RecursionError:
        raise Refused(400, "body: JSON must not be nested so deep") from None
    request = message_of(fields, model, version, request_id)
    if why := why_incomplete(fields):
        raise Refused(400, why)
    if not may_stream and fields.get("stream") in (True, [True]):
        raise Refused(400, "stream: got true, must be false for /generate; use /generate_stream")
    return request


def message_of(
    fields: Mapping[str, Any], model: str, version: str = "", request_id: str = ""
) -> Any:
    """The message for Triton. fields: values by the names of tensors. Raises Refused."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    for name, value in fields.items():
        if elements := _elements(SPECS[name], value):
            dtype = SPECS[name].dtype.replace("STRING", "BYTES")
            request.inputs.add(name=name, datatype=dtype, shape=[1, len(elements)])
            request.raw_input_contents.append(_raw(SPECS[name], elements))
    return request


def values_of(response: Any) -> dict[str, list[Any]]:
    """The elements of each output of a response."""
    values: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            texts = deserialize_bytes_tensor(raw)
            values[tensor.name] = [text.decode("utf-8", "replace") for text in texts]
        else:
            values[tensor.name] = np.frombuffer(raw, NUMPY_TYPES[tensor.datatype]).tolist()
    return values


def _document(body: bytes) -> dict[str, Any]:
    try:
        # Bytes that are not UTF-8 become lone surrogates, so that the error names their field.
        text = body.decode("utf-8", "surrogateescape")
        document = json.loads(text, object_pairs_hook=_members)
    except json.JSONDecodeError as error:
        raise Refused(400, f"body: must be JSON: {error}") from None
    except ValueError:  # what Python says about it is of no use to a client
        most = sys.get_int_max_str_digits()
        raise Refused(400, f"body: an integer has more than {most} digits") from None
    if not isinstance(document, dict):
        raise Refused(400, f"body: got {type(document).__name__}, must be a JSON object")
    return document


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise Refused(400, f"{_shown(twice)}: given twice in one JSON object")
    return members


def _fields(document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The known fields and the id. Clients may also send fields inside Triton's
    own object `parameters`."""
    request_id = document.pop("id", "")
    if not isinstance(request_id, str) or len(request_id.encode("utf-8", "replace")) > MAX_ID_BYTES:
        raise Refused(400, f"id: must be text of at most {MAX_ID_BYTES} bytes")
    parameters = document.pop("parameters", None) or {}
    if not isinstance(parameters, dict):
        raise Refused(400, f"parameters: got {_shown(parameters)}, must be an object")
    if both := sorted(document.keys() & parameters.keys()):
        raise Refused(400, f"{both[0]}: given both as a field and in parameters")
    fields = {}
    for name, value in (document | parameters).items():
        if name in SPECS:
            fields[name] = value
        elif why := why_refused(name, value, SPECS):
            raise Refused(400, why.encode("utf-8", "replace").decode())
    return fields, request_id.encode("utf-8", "replace").decode()


def _elements(spec: TensorSpec, value: Any) -> list[Any]:
    elements = value if isinstance(value, list) else [value]
    if why := spec.why_wrong_size(len(elements)):
        raise _wrong(spec, why)
    types, kind = KINDS[spec.dtype]
    if wrong := set(map(type, elements)) - types:
        shown = _shown(next(element for element in elements if type(element) in wrong))
        allowed = f"{kind}, {spec.allowed.text}" if spec.allowed.text else kind
        listed = f"a list with each element {allowed}" if spec.is_list else allowed
        raise _wrong(spec, f"got {shown}, must be {listed}")
    if types == {int} and elements:
        _check_fits(spec, min(elements))
        _check_fits(spec, max(elements))
    return elements


def _wrong(spec: TensorSpec, reason: str) -> Refused:
    return Refused(400, field_text(spec.name, reason))


def _check_fits(spec: TensorSpec, value: int) -> None:
    limits: np.iinfo[Any] = np.iinfo(NUMPY_TYPES[spec.dtype])
    if not limits.min <= value <= limits.max:
        low = int(spec.allowed.low) if isinstance(spec.allowed, Range) else limits.min
        raise _wrong(spec, f"got {_shown(value)}, must be in {low}..{limits.max}")


def _raw(spec: TensorSpec, elements: list[Any]) -> bytes:
    if spec.dtype == "STRING":
        try:
            encoded = [element.encode() for element in elements]
        except UnicodeEncodeError as error:
            place = f"character {error.start}"
            raise _wrong(spec, f"must be valid UTF-8 without lone surrogates ({place})") from None
        return b"".join(len(each).to_bytes(4, "little") + each for each in encoded)
    if spec.dtype == "FP32":
        elements = [_float(element) for element in elements]
    with np.errstate(over="ignore"):  # infinite; the backend refuses it
        return np.array(elements).astype(NUMPY_TYPES[spec.dtype]).tobytes()


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
