"""What a route of the endpoint consists of. `routes` lists all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smartspec_gateway.openai.apis.choices import Prepared
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.schema import Body
from smartspec_gateway.openai.apis.writer import Count, Writer
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import TokenBytes


def _openai_error(error: ApiError) -> dict[str, Any]:
    return error.body


@dataclass(frozen=True)
class Route:
    """A route for POST.

    body: what is sent. It has the name of a model as `model`.
    work: from the body to what the writer gets, or to the whole answer if no text is generated. It
    may run in another process. Raises ApiError.
    writer: of the generated text. error: the document of an error, for all paths below `path` too.
    """

    path: str
    body: type[Body]
    work: Callable[[Requests, Any], Prepared | dict[str, Any]]
    writer: Callable[[Prepared, TokenBytes, Count], Writer] | None = None
    error: Callable[[ApiError], dict[str, Any]] = _openai_error
