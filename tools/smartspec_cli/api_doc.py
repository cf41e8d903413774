"""docs/reference/tensors.md, made from the table of tensors; `reference` writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from typing import Any

from smartspec_py.api.contract import MODEL_NAME, OUTPUTS
from smartspec_py.api.inputs import FIELDS, INPUT_GROUPS
from smartspec_py.api.refused import RENAMED, UNSUPPORTED
from smartspec_py.api.tensor_spec import Choice, TensorSpec
from smartspec_py.serving.request import GenerateParams

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GenerateParams)}

_HEAD = f"""\
# The interface

Every tensor of the model `{MODEL_NAME}`, written from the table that checks requests:
`python -m smartspec_cli.reference`. Names and types are those of
TensorRT-LLM's Triton models (`ensemble`, `tensorrt_llm_bls`).

| way in | what it is |
|---|---|
| `POST /v2/models/{MODEL_NAME}/generate` | HTTP, one response; leave `stream` out |
| `POST /v2/models/{MODEL_NAME}/generate_stream` | HTTP, server-sent events, one response each |
| `ModelStreamInfer` | gRPC; the model is decoupled, and so `ModelInfer` does not serve it |

In JSON a tensor is a key: a value where the shape is [1, 1], a list where it is [1, n] (one
value may stand without the list). Over gRPC every tensor has the shape that the table
gives. A request is one prompt.
"""

_INPUTS_HEAD = """\
## Inputs

Values outside the range are refused with `INVALID_ARGUMENT`, and the message is made of the
tensor's name, the value and the words of the range: `top_p: got 1.5, must be in (0, 1]`.
What stands behind a semicolon is checked with the model at hand, and may word its limit
with the model's own numbers. Strings are UTF-8, and numbers finite. A list of words of
which every one is empty counts as not given; an empty word among others is refused.

An engine that cannot do a thing refuses every value of it but the default, by name.
"""

_TOGETHER = """\
Checked together: `seed` and `random_seed` must be equal where both are given;
`embedding_bias_weights` must be as many as `embedding_bias_words`.
"""

_OUTPUTS_HEAD = """\
## Outputs

A streamed request has one response for each piece of text; the last is the one whose
`finish_reason` is not empty. The column `sent` says which responses have the tensor. In JSON
Triton writes a tensor of one element as a value and not as a list: `output_log_probs` of a
response with one token, too.
"""

_ERRORS = """\
## Errors

An error concerns its own request only, and is that request's last response.

| what | over HTTP | over gRPC |
|---|---|---|
| a value outside its range, a name that is not known, a required tensor that is missing | 400 \
| `INVALID_ARGUMENT` |
| the queue is full, the deadline passed before the first token, the server is shutting down \
| 400 | `UNAVAILABLE` |
| the server failed | 400 | `INTERNAL` |

Triton 2.51 answers 400 to every error that a model sends. Over gRPC the message comes in
the stream; the status code only where the client sends the header `triton_grpc_error:
true`. An error after the first event of `generate_stream` is an event with the key `error`,
under status 200.

Triton refuses by itself, before the backend sees the request:

| what | over HTTP | over gRPC |
|---|---|---|
| fewer tensors than are required | 400, names what is missing | `INVALID_ARGUMENT`, names what \
is missing |
| another type than the table's | 500, `Unable to parse` | `INVALID_ARGUMENT`, named |
| another number of elements than the shape's | 400 | `INVALID_ARGUMENT`, named |
| a tensor of a name that is not in the table | does not exist | `INVALID_ARGUMENT`, named |
| a body that is no JSON object | 500 | does not exist |
| a list, an object or null under a key that is not known | 400, named | does not exist |

Two things that Triton's parser lets pass: an integer beyond INT32 is cut to its lower 32
bits, and a number beyond FP32 becomes infinite, which is then refused.
"""

_REFUSED_HEAD = """\
## Refused by name

Nothing that a client asks for is dropped silently. A key (or gRPC parameter) that is no
tensor is refused, with the nearest known name. Of the names here that are not supported, the
value false passes: it asks for nothing.
"""


def api_markdown() -> str:
    """The whole page."""
    parts = [_HEAD, _INPUTS_HEAD]
    for title, group in INPUT_GROUPS.items():
        parts.append(f"### {title}\n")
        rows = (_input_row(spec) for spec in group)
        parts.append(_table(("tensor", "type", "shape", "range", "default", "meaning"), rows))
    parts.append(_TOGETHER + "\n" + _OUTPUTS_HEAD)
    rows = (_output_row(spec) for spec in OUTPUTS)
    parts.append(_table(("tensor", "type", "shape", "sent", "meaning"), rows))
    parts.append(_ERRORS + "\n" + _REFUSED_HEAD)
    parts.append(_table(("name", "answer"), _refused_rows()))
    return "\n".join(parts)


def _input_row(spec: TensorSpec) -> tuple[str, ...]:
    most = f"at most {spec.max_elements} elements" if spec.max_elements else ""
    each = f"each {spec.allowed.text}" if most and spec.allowed.text else spec.allowed.text
    checked = ", ".join(part for part in (most, each) if part) or "any"
    range_text = "; ".join(part for part in (checked, spec.model_range) if part)
    return (
        f"`{spec.name}`",
        spec.dtype,
        _shape(spec.dims),
        range_text,
        _default(spec),
        spec.meaning,
    )


def _output_row(spec: TensorSpec) -> tuple[str, ...]:
    # The first dimension counts the texts of a prompt, of which there is one.
    shape = _shape((1, *spec.dims[1:])) if spec.has_batch else "[1]"
    return f"`{spec.name}`", spec.dtype, shape, spec.when or "always", spec.meaning


def _refused_rows() -> Iterable[tuple[str, ...]]:
    for name, why in UNSUPPORTED.items():
        yield f"`{name}`", why
    for name, ours in RENAMED.items():
        yield f"`{name}`", f"unknown; here it is `{ours}`"


def _shape(dims: tuple[int, ...]) -> str:
    """On the wire: with the batch dimension."""
    return f"[1, {', '.join('n' if size == -1 else str(size) for size in dims)}]"


def _default(spec: TensorSpec) -> str:
    if not spec.is_optional:
        return "required"
    if spec.default:
        return spec.default
    if isinstance(spec.allowed, Choice) and spec.name not in FIELDS:
        return _worded(spec.allowed.values[0])
    return _worded(_DEFAULTS[FIELDS[spec.name]] if spec.name in FIELDS else None)


def _worded(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
