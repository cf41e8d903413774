"""Converts tensors to values and back. Of the other files, only model.py and triton_metrics.py use
Triton's API.

`decode` checks each field by itself, by the table of `api/inputs.py`. `Intake` does the checks that
need the model (tokens, limits).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from smartspec_py.api.contract import GATEWAY, INPUTS, OUTPUTS
from smartspec_py.api.errors import why_incomplete
from smartspec_py.api.inputs import FIELDS, GenerateParams
from smartspec_py.api.refused import why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, TensorSpec
from smartspec_py.core.types import SpecMetrics
from smartspec_py.serving.messages import Progress, Reply
from smartspec_py.serving.request import ErrorCode, FieldError, InvalidField, RequestError

_INPUT_NAMES = tuple(spec.name for spec in INPUTS)
_OUTPUT_TYPES = tuple((spec.name, NUMPY_TYPES[spec.dtype], spec.has_batch) for spec in OUTPUTS)
_BLOCKS = dict.fromkeys(
    ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"), 0
)


def decode(request: Any) -> GenerateParams:
    """Convert a Triton request to values. Raises RequestError, which names the field, the value and
    the range."""
    for name, value in sorted(_parameters(request).items()):
        if name == GATEWAY and isinstance(value, str):
            continue
        if why := why_refused(name, value, _INPUT_NAMES):
            raise RequestError(ErrorCode.INVALID_ARGUMENT, why)
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    if why := why_incomplete(arrays):  # Triton checks only their number
        raise RequestError(ErrorCode.INVALID_ARGUMENT, why)
    given = {spec.name: _value(spec, arrays[spec.name]) for spec in INPUTS if spec.name in arrays}
    _check_bias(given)
    return GenerateParams(**{FIELDS[name]: given[name] for name in given if name in FIELDS})


def wanted_outputs(request: Any) -> tuple[frozenset[str], bool]:
    """The names of the outputs to send, and whether the gateway sent the request."""
    wanted = frozenset(request.requested_output_names())
    names = _parameters(request).get(GATEWAY)
    if not isinstance(names, str):  # `decode` refuses other types
        return wanted, False
    return wanted & set(names.split(",")) if names else wanted, True


def encode(reply: Reply, wanted: Collection[str]) -> Any:
    """Convert a reply to a Triton response. Tensors that do not apply or are not wanted are left
    out.

    wanted: names of the outputs that the client requested. Triton would drop others, but Triton
    2.51 frees them without Python's lock, which can end this process by signal 11.
    """
    values = _outputs(reply)
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor(name, np.array([[value]] if has_batch else [value], dtype=numpy_type))
            for name, numpy_type, has_batch in _OUTPUT_TYPES
            if name in wanted and (value := values.get(name)) is not None
        ]
    )


def encode_error(code: ErrorCode, message: str, *, is_gateway: bool = False) -> Any:
    """An error as a Triton response. is_gateway: see `api.contract.GATEWAY`."""
    if is_gateway:
        message = f"{code.value}: {message}"
    triton_code = getattr(pb_utils.TritonError, code.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, triton_code))


def _parameters(request: Any) -> dict[str, Any]:
    return dict(json.loads(request.parameters() or "{}"))


def _value(spec: TensorSpec, array: Any) -> Any:
    """The checked value of the tensor: one element, or a tuple for a list."""
    elements = array.ravel().tolist()
    if spec.dtype == "FP32":  # 0.01, and not the nearest value, 0.0099999998
        elements = [float(str(element)) for element in array.ravel()]
    if spec.is_list and not any(element != b"" for element in elements):
        # Clients that always send all tensors send one empty word if they have none.
        return ()
    if why := spec.why_wrong_size(len(elements)):
        raise FieldError(spec.name, why)
    values = tuple(_element(spec, element) for element in elements)
    return values if spec.is_list else values[0]


def _element(spec: TensorSpec, element: Any) -> Any:
    value = _utf8(spec.name, element) if spec.dtype == "STRING" else element
    if not spec.allowed.holds(value):
        raise InvalidField(spec.name, value, spec.allowed.text)
    return spec.convert(value)


def _utf8(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(name, raw, f"valid UTF-8 ({error.reason} at {error.start})") from error


def _check_bias(given: dict[str, Any]) -> None:
    """Leave out the weights of words that count as not given."""
    words = given.get("embedding_bias_words")
    if words == ():
        given["embedding_bias_weights"] = ()
    num_words, num_weights = len(words or ()), len(given.get("embedding_bias_weights", ()))
    if num_words != num_weights:
        allowed = f"as many as embedding_bias_words ({num_words})"
        raise InvalidField("embedding_bias_weights", f"{num_weights} weights", allowed)


def _outputs(reply: Reply) -> dict[str, Any]:
    """Values by tensor; None or missing if the tensor does not apply."""
    if reply.explanation:
        return {"explanation": reply.explanation.encode()}
    params, progress, reason = reply.params, reply.progress, reply.finish_reason
    values: dict[str, Any] = {
        "text_output": reply.text.encode(),
        "finish_reason": b"" if reason is None else reason.value.encode(),
        "acceptance_rate": progress.num_accepted / max(progress.num_drafted, 1),
        "total_accepted_draft_tokens": progress.num_accepted,
        "total_draft_tokens": progress.num_drafted,
        "num_steps": progress.num_steps,
        "seed": reply.seed,
    }
    if params.return_num_input_tokens:
        values["num_input_tokens"] = 0 if reason is None else reply.num_input_tokens
    if params.return_num_output_tokens:
        values["num_output_tokens"] = len(reply.tokens)
    if params.return_output_ids:
        values["output_ids"] = reply.tokens
    if params.return_log_probs:
        values["output_log_probs"] = [entry.log_prob for entry in reply.log_probs]
        values["cum_log_probs"] = reply.cum_log_prob
    if params.num_token_log_probs is not None:
        values["token_log_probs"] = _token_log_probs(reply)
    if params.spec_metrics is SpecMetrics.DETAILED and progress.proposer:
        values["proposer"] = progress.proposer.encode()
    if params.return_perf_metrics:
        values |= _BLOCKS | _times_ns(Progress() if reason is None else progress)
    if reason is not None:
        values["num_cached_tokens"] = progress.num_cached
        values["metrics"] = reply.spec_metrics.encode() or None
        values["no_speculation"] = reply.no_speculation.encode() or None
    return values


def _token_log_probs(reply: Reply) -> bytes:
    """JSON with lists of [token, log-probability, [[token, log-probability], ..]]."""
    document = {"prompt": reply.prompt_log_probs, "output": reply.log_probs}
    given = {name: entries for name, entries in document.items() if entries}
    return json.dumps(given, separators=(",", ":")).encode()


def _times_ns(progress: Progress) -> dict[str, int]:
    times_s = {
        "arrival": progress.arrival_s,
        "first_scheduled": progress.scheduled_s,
        "first_token": progress.first_token_s,
        "last_token": progress.last_token_s,
    }
    return {f"{name}_time_ns": int(1e9 * (time_s or 0)) for name, time_s in times_s.items()}
