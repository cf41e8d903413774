"""All routes that take a body, their work, and the format of errors of each path."""

from __future__ import annotations

import json
from typing import Any

from smartspec_gateway.openai.apis import chats, completions, messages, responses, tokens
from smartspec_gateway.openai.apis.choices import Prepared
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.validation import read
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.workers import Work

ROUTES = (
    chats.ROUTE,
    completions.ROUTE,
    responses.ROUTE,
    responses.COUNT_ROUTE,
    messages.ROUTE,
    messages.COUNT_ROUTE,
    *tokens.ROUTES,
)

NUM_TOKENS = "num_tokens"
"""The kind of work of counting the tokens of a text. The other kinds are paths of routes."""


def work_of(requests: Requests) -> Work:
    """The result is Prepared, or the JSON of an answer without generated text."""

    def work(kind: str, body: bytes, context_len: int) -> Any:
        requests.context_len = context_len
        if kind == NUM_TOKENS:
            return len(requests.prompts.encode(body.decode(), False))
        route = next(route for route in ROUTES if route.path == kind)
        asked: Any = read(body, route.body)
        requests.check_model(asked.model)
        try:
            found = route.work(requests, asked)
        except ApiError as error:
            raise error.renamed(route.body.names) from None
        return found if isinstance(found, Prepared) else _json(found)

    return work


def error_document(error: ApiError, path: str) -> dict[str, Any]:
    """In the format of the API that has this path, or in OpenAI's."""
    routes = (route for route in ROUTES if f"{path}/".startswith(f"{route.path}/"))
    return next(routes, chats.ROUTE).error(error)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
