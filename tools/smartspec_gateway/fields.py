"""The fields of a request, by the table of tensors in `smartspec_py.api`.

Types and sizes of numbers are checked here, and values by the backend. Errors name the field.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from smartspec_gateway.limits import MAX_ID_BYTES, Refused
from smartspec_py.api.contract import GATEWAY, INPUTS
from smartspec_py.api.errors import field_text, why_incomplete
from smartspec_py.api.refused import why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, Range, TensorSpec
from smartspec_py.faults import cut

SPECS = {spec.name: spec for spec in INPUTS}

KINDS: Mapping[str, tuple[frozenset[type], str]] = {
    "STRING": (frozenset({str}), "text"),
    "BOOL": (frozenset({bool}), "true or false"),
    "INT32": (frozenset({int}), "an integer"),
    "UINT64": (frozenset({int}), "an integer"),
    "FP32": (frozenset({int, float}), "a number"),
}
"""The Python types of a JSON value by dtype, and their name."""

MAX_FP32 = float(np.finfo(np.float32).max)


def request_of(body: bytes, *, may_stream: bool) -> dict[str, Any]:
    """The fields of a request as `checked` returns them, and its `id` if it has one.

    may_stream: false for the route that returns one response. Raises Refused.
    """
    try:
        given, request_id = _fields(_document(body))
    except RecursionError:
        raise Refused(400, "body: JSON must not be nested so deep") from None
    fields = checked(given)
    if why := why_incomplete(given):
        raise Refused(400, why)
    if not may_stream and fields.get("stream"):
        raise Refused(400, "stream: got true, must be false for /generate; use /generate_stream")
    return fields | ({"id": request_id} if request_id else {})


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names of tensors, with one value as a bare one and without empty lists.
    Raises Refused."""
    found = {}
    for name, value in fields.items():
        if elements := _elements(SPECS[name], value):
            found[name] = elements if SPECS[name].is_list else elements[0]
    return found


def body_of(fields: Mapping[str, Any], outputs: Collection[str] = ()) -> bytes:
    """The JSON for Triton's generate_stream. outputs: those to send; default: all."""
    document = {**fields, GATEWAY: ",".join(outputs)}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _document(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise Refused(400, "body: is empty, must be a JSON object")
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
    _check_text("id", request_id)
    if "\0" in request_id:  # Triton would cut it there
        raise Refused(400, "id: must have no character NUL")
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
    return fields, request_id


def _elements(spec: TensorSpec, value: Any) -> list[Any]:
    elements = value if isinstance(value, list) else [value]
    if why := spec.why_wrong_size(len(elements)):
        raise _wrong(spec, why)
    types, _ = KINDS[spec.dtype]
    if set(map(type, elements)) - types:
        raise _wrong_element(spec, next(each for each in elements if type(each) not in types))
    if spec.dtype == "STRING":
        for text in elements:
            _check_text(spec.name, text)
    elif spec.dtype == "FP32":
        for number in elements:
            if not _is_finite(number):
                raise _wrong_element(spec, number)
    elif types == {int} and elements:
        _check_fits(spec, min(elements))
        _check_fits(spec, max(elements))
    return elements


def _wrong_element(spec: TensorSpec, element: Any) -> Refused:
    _, kind = KINDS[spec.dtype]
    allowed = f"{kind}, {spec.allowed.text}" if spec.allowed.text else kind
    listed = f"a list with each element {allowed}" if spec.is_list else allowed
    return _wrong(spec, f"got {_shown(element)}, must be {listed}")


def _wrong(spec: TensorSpec, reason: str) -> Refused:
    return Refused(400, field_text(spec.name, reason))


def _check_fits(spec: TensorSpec, value: int) -> None:
    limits: np.iinfo[Any] = np.iinfo(NUMPY_TYPES[spec.dtype])
    if not limits.min <= value <= limits.max:
        low = int(spec.allowed.low) if isinstance(spec.allowed, Range) else limits.min
        raise _wrong(spec, f"got {_shown(value)}, must be in {low}..{limits.max}")


def _is_finite(number: float) -> bool:
    """Whether the tensor's type can hold it."""
    try:
        return abs(float(number)) <= MAX_FP32
    except OverflowError:
        return False


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"must be valid UTF-8 without lone surrogates (character {error.start})"
        raise Refused(400, field_text(name, reason)) from None


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return str(value)  # JSON has no words for some
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
    return cut(text)
