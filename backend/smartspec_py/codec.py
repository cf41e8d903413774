"""Tensors to values and back. Beside model.py, the only file that knows Triton.

`decode` checks each field by itself; what needs the model (tokens, limits) is checked by `Server`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from smartspec_py.core.types import FinishReason
from smartspec_py.serving.contract import INPUTS
from smartspec_py.serving.request import ErrorCode, GenerateParams, InvalidField, RequestError
from smartspec_py.serving.responder import Reply

MAX_STOP_WORDS = 16
MAX_STOP_WORD_BYTES = 1024

_NAMES = ", ".join(spec.name for spec in INPUTS)


def decode(request: Any) -> GenerateParams:
    """A Triton request as values. Raises RequestError naming the field, value and range."""
    _refuse_unknown_parameters(request)
    values = {spec.name: _values(request, spec.name, spec.dims) for spec in INPUTS}
    fields = {name: found[0] for name, found in values.items() if found and name != "stop_words"}
    _check(fields)
    return GenerateParams(
        text=_utf8("text_input", fields.get("text_input", b"")),
        max_tokens=int(fields["max_tokens"]),
        stream=bool(fields.get("stream", False)),
        temperature=float(fields.get("temperature", 0.0)),
        top_k=int(fields.get("top_k", 0)),
        top_p=float(fields.get("top_p", 1.0)),
        seed=_seed(fields),
        stop_words=_stop_words(values["stop_words"] or []),
        end_id=_optional_int(fields, "end_id"),
        exclude_input=bool(fields.get("exclude_input_in_output", True)),
        num_draft_tokens=_optional_int(fields, "num_draft_tokens"),
        policy=_policy(fields),
    )


def encode(reply: Reply) -> Any:
    """A reply as a Triton response; tensors and shapes are those of `contract.OUTPUTS`."""
    progress = reply.progress
    rate = progress.num_accepted / progress.num_drafted if progress.num_drafted else 0.0
    return pb_utils.InferenceResponse(
        [
            _tensor("text_output", reply.text.encode(), np.object_),
            _tensor("finish_reason", _reason(reply.finish_reason), np.object_),
            _tensor("num_input_tokens", reply.num_input_tokens, np.int32),
            _tensor("num_output_tokens", reply.num_output_tokens, np.int32),
            _tensor("acceptance_rate", rate, np.float32),
            _tensor("total_accepted_draft_tokens", progress.num_accepted, np.int32),
            _tensor("total_draft_tokens", progress.num_drafted, np.int32),
            _tensor("num_steps", progress.num_steps, np.int32),
            _tensor("seed", reply.seed, np.uint64),
        ]
    )


def encode_error(error: RequestError) -> Any:
    """An error as a Triton response."""
    codes = {
        ErrorCode.INVALID_ARGUMENT: pb_utils.TritonError.INVALID_ARG,
        ErrorCode.UNAVAILABLE: pb_utils.TritonError.UNAVAILABLE,
        ErrorCode.INTERNAL: pb_utils.TritonError.INTERNAL,
    }
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), codes[error.code]))


def _values(request: Any, name: str, dims: int) -> list[Any] | None:
    """The tensor's elements; None where it was not given."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if dims == 1 and array.size != 1:
        raise InvalidField(name, list(array.shape), "one value: send one prompt a request")
    found: list[Any] = array.ravel().tolist()
    return found


def _refuse_unknown_parameters(request: Any) -> None:
    """Triton hands over as parameters what no tensor is named like; dropping it would be silent."""
    names = sorted(json.loads(request.parameters() or "{}"))
    if names:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"unknown parameter {names[0]!r}; known are {_NAMES}"
        )


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda v: v >= 1, "at least 1"),
    "temperature": (lambda v: math.isfinite(v) and v >= 0, "finite and at least 0"),
    "top_k": (lambda v: v >= 0, "at least 0 (0: off)"),
    "top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "beam_width": (lambda v: v == 1, "1: beam search is not supported"),
    "num_draft_tokens": (lambda v: v >= 0, "at least 0 (0: no speculation)"),
    "end_id": (lambda v: v >= -1, "at least -1 (-1: none)"),
}


def _check(fields: dict[str, Any]) -> None:
    for name, (is_valid, allowed) in _RANGES.items():
        if name in fields and not is_valid(fields[name]):
            raise InvalidField(name, fields[name], allowed)


def _utf8(name: str, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(name, raw, f"valid UTF-8 ({error.reason} at {error.start})") from error
    if not text:
        raise InvalidField(name, text, "at least one character")
    return text


def _seed(fields: dict[str, Any]) -> int | None:
    if "seed" in fields and "random_seed" in fields and fields["seed"] != fields["random_seed"]:
        raise InvalidField("random_seed", fields["random_seed"], "equal to seed, or left out")
    return _optional_int({"seed": fields.get("seed", fields.get("random_seed"))}, "seed")


def _optional_int(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return None if value is None else int(value)


def _stop_words(raw: list[bytes]) -> tuple[str, ...]:
    if len(raw) > MAX_STOP_WORDS:
        raise InvalidField("stop_words", f"{len(raw)} words", f"at most {MAX_STOP_WORDS}")
    for word in raw:
        if len(word) > MAX_STOP_WORD_BYTES:
            raise InvalidField("stop_words", word, f"at most {MAX_STOP_WORD_BYTES} bytes each")
    return tuple(_utf8("stop_words", word) for word in raw)


def _policy(fields: dict[str, Any]) -> str | None:
    if "speculation_policy" not in fields:
        return None
    return _utf8("speculation_policy", fields["speculation_policy"])


def _reason(reason: FinishReason | None) -> bytes:
    return reason.value.encode() if reason else b""


def _tensor(name: str, value: Any, dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=dtype))
