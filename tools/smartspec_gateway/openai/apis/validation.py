"""Reads request bodies, and says in one sentence why a body does not fit its schema."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from smartspec_gateway.openai.apis.schema import REFUSED, Sampling
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.model import FIELDS
from smartspec_gateway.openai.surrogates import without_escaped_surrogates
from smartspec_py.faults import shown

Read = TypeVar("Read", bound=BaseModel)

IS_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
WORDS = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of 64 bits",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_too_short": "text of length {min_length} or more",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "a list of length {min_length} or more",
    "too_long": "a list of length {max_length} or less",
}

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 80


def check_type(request: Request) -> None:
    """Raises ApiError. A browser asks before it sends JSON to another site, so that other types of
    content are refused."""
    given = request.headers.get("content-type", "")
    if not IS_JSON.fullmatch(given):
        raise ApiError(400, f"Content-Type: got {shown(given)}, must be application/json")


def read(body: bytes, model: type[Read]) -> Read:
    """The body as the model has it. Raises ApiError."""
    if not body.strip():
        raise ApiError(400, "the body is empty, must be a JSON object")
    try:
        document = _document(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return validated(model, document)


def _document(body: bytes) -> Any:
    """Its texts have U+FFFD in the place of lone surrogates: a client that cuts a text between both
    halves of a pair sends it in each later request. Raises ValueError."""
    try:
        return from_json(body)
    except ValueError:
        text = body.decode()
        if (changed := without_escaped_surrogates(text)) == text:
            raise
        return from_json(changed)


def validated(model: type[Read], body: Any) -> Read:
    """The body as the model has it. Raises ApiError."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False), model, body) from None


@cache
def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What the API's description says about the body of a route."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def without_references(node: Any) -> Any:
        if isinstance(node, dict):
            found = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            # A discriminator would refer to the definitions by their names.
            kept = (key for key in found if key != "discriminator")
            return {key: without_references(found[key]) for key in kept}
        return [without_references(each) for each in node] if isinstance(node, list) else node

    content = {"application/json": {"schema": without_references(schema)}}
    return {"requestBody": {"required": True, "content": content}}


def _of_validation(
    errors: Sequence[Mapping[str, Any]], model: type[BaseModel], body: Any
) -> ApiError:
    """The error at the deepest place: with several types for one field, that of the type which fits
    best. Other errors at this place add what the field may be, too."""
    first = max(errors, key=_depth)
    name, kind = _name(first, body), first["type"]
    if kind == "unknown":
        name = f"{name}.{first['ctx']['name']}".removeprefix(".")[:80]
        return ApiError(400, f"{name}: {_unknown(**first['ctx'], model=model)}", name)
    if not name:
        return ApiError(400, "the body must be a JSON object")
    if kind == "union_tag_invalid":
        got, tags = (re.sub("[<>]", "", first["ctx"][one]) for one in ("tag", "expected_tags"))
        name, allowed = f"{name}.type", tags.replace(", ", " or ")
        return ApiError(400, f"{name}: got {SHOWN.repr(got)}, must be {allowed}", name)
    if kind == "union_tag_not_found":
        name = f"{name}.type"
    if kind in ("missing", "union_tag_not_found"):
        return ApiError(400, f"{name}: must be given", name)
    found = dict.fromkeys(_allowed(error) for error in errors if _name(error, body) == name)
    given: Any = first.get("input")
    got = SHOWN.repr(given) if kind != "too_long" else f"a list of length {len(given)}"
    message = f"{name}: got {got}, must be {' or '.join(found)}"
    return ApiError(400, message, name)


def _depth(error: Mapping[str, Any]) -> tuple[bool, int, bool, list[int]]:
    """A list that is too long had good elements up to its limit. An object with an unknown field
    fits better than a type that is no object."""
    places, kind = error["loc"], error["type"]
    numbers = [place for place in places if isinstance(place, int)]
    return kind == "too_long", len(places), kind == "unknown", numbers


def _name(error: Mapping[str, Any], body: Any) -> str:
    """The field: the numbers and keys of the body that lead to it. pydantic's places also name
    members of unions, which are no keys. A missing field is last."""
    shown, value = [], body
    for number, place in enumerate(error["loc"], 1):
        is_missing = error["type"] == "missing" and number == len(error["loc"])
        if isinstance(place, int) or is_missing or (isinstance(value, dict) and place in value):
            shown.append(str(place))
            value = None if is_missing else value[place]
    return ".".join(shown)


def _unknown(name: str, known: Sequence[str], model: type[BaseModel]) -> str:
    names: Mapping[str, str] = getattr(model, "names", {})
    if name in names:
        return f"unknown; did you mean {names[name]}?"
    bodies = [body for body in _subclasses(Sampling) if "route" in vars(body)]
    if routes := sorted(body.route for body in bodies if name in body.model_fields):
        return f"only for {' and '.join(routes)}"
    near = [FIELDS[name]] if name in FIELDS else [each for each in known if f"_{name}" in each]
    if not near and name not in REFUSED:
        near = difflib.get_close_matches(name[:80], sorted(known), 3)
    return (
        f"unknown; did you mean {' or '.join(near)}?" if near else "is not supported; leave it out"
    )


def _subclasses(kind: type[Sampling]) -> Iterator[type[Sampling]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _allowed(error: Mapping[str, Any]) -> str:
    if error["type"] in WORDS:
        return WORDS[error["type"]].format(**error.get("ctx", {}))
    return re.sub("^(Input should be|Value error,) ", "", error["msg"])
