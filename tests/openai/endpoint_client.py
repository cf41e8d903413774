"""Clients of the endpoint and what they send."""

from __future__ import annotations

import asyncio
import atexit
import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from httpx2 import ASGITransport, BaseTransport, Client, Request, Response
from standins import TINY, Echo

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.requests import Settings
from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.formats.prompts import Prompts

PROMPTS = Prompts(TINY)
CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
HELLO = [{"role": "user", "content": "Hello!"}]


LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


class InOneLoop(BaseTransport):
    """Asks an application in the event loop of all of them. `TestClient` would start a thread with
    a loop for each request, which takes longer than most answers."""

    def __init__(self, app: FastAPI) -> None:
        self._transport = ASGITransport(app)

    def handle_request(self, request: Request) -> Response:
        return LOOP.run_until_complete(self._answer(request))

    async def _answer(self, request: Request) -> Response:
        answer = await self._transport.handle_async_request(request)
        body = await answer.aread()
        return Response(answer.status_code, headers=answer.headers, content=body)


def client_of(app: FastAPI) -> Client:
    return Client(transport=InOneLoop(app), base_url="http://testserver")


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """A `tool_choice`."""
    found = list(tools or [{"type": "function", "function": {"name": "weather"}}])
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": found}}


def http(
    model: Any = None,
    prompts: Prompts = PROMPTS,
    context_len: int = 512,
    name: str = "smartspec",
    **settings: Any,
) -> Client:
    """Of an endpoint with this model, or one that always answers the same."""
    given = Settings(name, Limits(context_len), **settings)
    return client_of(create_app(model or Echo(), prompts, given))


def folder(path: Path, template: str | list[Any] | None, bos: str | None = None) -> Path:
    """A model's directory with the shipped tokenizer, which begins texts with `bos` if given."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    if bos is not None:
        token = {"type_id": 0, "id": bos}
        single = [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {bos: {"id": bos, "ids": [0], "tokens": [bos]}}
        kind = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [],
            "special_tokens": special,
        }
        tokenizer["post_processor"] = kind
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": bos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def events(text: str) -> list[Any]:
    """The data of a stream's events; the last of them is `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


WITH_TOOLS = {"messages": HELLO, "tools": [TOOL], "stream": True}
CALLS = ("I look.<tool", '_call>{"name": "weather", "argu', 'ments": {"a": 1}}</tool_call>')


def tool_client(model: Echo) -> Client:
    """The same with a template that tells the model of tools."""
    return http(model, Prompts(TINY, Path(__file__).with_name("tools.jinja")))
