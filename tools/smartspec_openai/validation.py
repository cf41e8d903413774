"""The sentence for a body that does not fit its schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smartspec_openai.chat_schema import ChatRequest
from smartspec_openai.errors import ApiError
from smartspec_openai.schema import CompletionRequest

HIDDEN_PLACES = re.compile(r"list\[.*|function-.*|TextPart|str")
"""What pydantic adds to the place of an error for the members of a union."""

WORDS = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "too_short": "a list of length {min_length} or more",
    "too_long": "a list of length {max_length} or less",
    "literal_error": "{expected}",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "finite",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What must be, by pydantic's kind of error."""

MAX_SHOWN = 80


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error of a body; with several types for one field, all that it may have."""
    first = errors[0]
    name, kind = _name(first), first["type"]
    if kind == "json_invalid":
        reason = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return ApiError(400, f"the body is not valid JSON: {reason}")
    if not name:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    if kind == "missing":
        return ApiError(400, f"{name}: must be given", name)
    if kind == "extra_forbidden":
        return ApiError(400, f"{name}: {_unknown(name)}", name)
    allowed = dict.fromkeys(_allowed(error) for error in errors if _name(error) == name)
    shown = repr(first.get("input"))
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}..."
    return ApiError(400, f"{name}: got {shown}, must be {' or '.join(allowed)}", name)


def _name(error: Mapping[str, Any]) -> str:
    places = [str(place) for place in error["loc"] if place != "body"]
    return ".".join(place for place in places if not HIDDEN_PLACES.fullmatch(place))


def _unknown(name: str) -> str:
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    near = difflib.get_close_matches(name.rpartition(".")[2], sorted(known), 3)
    return (
        f"unknown; did you mean {' or '.join(near)}?" if near else "is not supported; leave it out"
    )


def _allowed(error: Mapping[str, Any]) -> str:
    words = WORDS.get(error["type"])
    if words is not None:
        return words.format(**error.get("ctx", {}))
    message: str = error["msg"]
    return message.removeprefix("Value error, ").removeprefix("must be ")
