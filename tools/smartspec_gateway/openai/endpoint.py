"""Answers requests with the model: from what is prepared to a response."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from smartspec_gateway.guard import until_gone
from smartspec_gateway.limits import Refused
from smartspec_gateway.openai.apis.choices import Prepared
from smartspec_gateway.openai.apis.requests import Requests, Settings
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.routes import NUM_TOKENS, work_of
from smartspec_gateway.openai.apis.validation import check_type
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.json_parts import json_bytes_response, json_response
from smartspec_gateway.openai.model import Model
from smartspec_gateway.openai.pieces import pieces_of
from smartspec_gateway.workers import Workers

logger = logging.getLogger("smartspec_gateway.openai")

MAX_LOGGED = 256
"""Unknown fields that are logged."""


class Endpoint:
    """The state that routes share."""

    def __init__(
        self, model: Model, prompts: Prompts, settings: Settings, workers: Workers
    ) -> None:
        self.model, self.prompts, self.settings = model, prompts, settings
        self.requests = Requests(prompts, settings)
        self._work, self._workers = work_of(self.requests), workers
        self._logged: set[str] = set()
        self.begin_s = int(time.time())

    async def check_key(self, request: Request) -> None:
        """Raises ApiError. `request.state.tenant` is the field that names the key's tenant; empty
        without keys."""
        request.state.tenant = {}
        keys = self.settings.api_keys
        if keys is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [token] if scheme.lower() == "bearer" else []
        given.append(request.headers.get("x-api-key", ""))
        pairs = product(given, keys)
        matches = [key for one, key in pairs if hmac.compare_digest(one.encode(), key.encode())]
        if not matches:
            message = "Authorization: must be Bearer and a valid API key, or x-api-key a valid one"
            raise ApiError(401, message)
        request.state.tenant = {"tenant": hashlib.sha256(matches[0].encode()).hexdigest()}

    def about_model(self, name: str) -> dict[str, Any]:
        """In the formats of OpenAI and of Anthropic."""
        about = {"id": name, "object": "model", "created": self.begin_s, "owned_by": "smartspec"}
        created = datetime.fromtimestamp(self.begin_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about |= {"type": "model", "display_name": name, "created_at": created}
        context_len = self.settings.limits.context_len  # a prompt has at least one token
        about |= {"max_model_len": context_len, "max_output_tokens": context_len - 1}
        return about | ({"parent": self.settings.name} if name in self.settings.adapters else {})

    async def answer(self, request: Request, route: Route) -> Response:
        """An answer, streamed or not. Raises ApiError until it is accepted. Later errors are
        events."""
        check_type(request)
        body = await _body(request)
        return await until_gone(request.receive, self._answered(request, route, body))

    async def _answered(self, request: Request, route: Route, body: bytes) -> Response:
        try:
            found = await self._workers.run(self._work, route.path, body)
        except Refused as refused:
            raise ApiError(refused.status, refused.message) from None
        if route.writer is None:
            return json_bytes_response(found)
        self._log(route.path, found.ignored)
        writer = route.writer(found, self.prompts.token_bytes, self._num_tokens)
        choices = [choice | request.state.tenant for choice in found.choices]
        pieces = pieces_of(self.model, choices, found.grammar_field, route.body.names)
        if not found.stream:
            return _told(found, await json_response(await writer.whole(pieces)))
        await anext(pieces)
        shown = writer.events(pieces)
        return _told(found, StreamingResponse(shown, media_type="text/event-stream"))

    def _log(self, path: str, ignored: Sequence[str]) -> None:
        """Once per field."""
        for name in ignored:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("%s: the field %s is unknown and has no effect", path, name)

    async def _num_tokens(self, text: str) -> int:
        """Of generated text."""
        num: int = await self._workers.run(self._work, NUM_TOKENS, text.encode())
        return num


def _told(found: Prepared, response: Response) -> Response:
    """The response, with headers for what of the request has no effect."""
    response.headers.update(found.headers)
    return response


async def _body(request: Request) -> bytes:
    """Without a copy, which `Request.body` makes, if it is one message."""
    messages = [await request.receive()]
    while messages[-1].get("more_body"):
        messages.append(await request.receive())
    return b"".join(message.get("body", b"") for message in messages)
