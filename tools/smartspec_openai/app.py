"""The routes of the endpoint."""

from __future__ import annotations

import asyncio
import difflib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from smartspec_openai.answers import Answer, events, pieces_of
from smartspec_openai.errors import ApiError
from smartspec_openai.prompts import Prompts
from smartspec_openai.schema import (
    MAX_CHOICES,
    PASSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from smartspec_openai.triton import Model

T = TypeVar("T")
UINT64 = 1 << 64
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'"
}

GONE_STATUS = 499
"""Nobody reads it: the client has disconnected."""


@dataclass(frozen=True)
class Settings:
    """name: of the model. context_len: prompt and generated tokens of one request. api_keys: None
    if requests need no key. metrics_url: of Triton; None if unknown. max_requests: at once."""

    name: str
    context_len: int
    api_keys: tuple[str, ...] | None = None
    metrics_url: str | None = None
    max_requests: int = 1024


class Endpoint:
    """The state that routes share."""

    def __init__(self, model: Model, prompts: Prompts, settings: Settings) -> None:
        self.model, self.prompts, self.settings = model, prompts, settings
        self.num_requests = 0
        self.begin_s = int(time.time())

    def check_key(self, request: Request) -> None:
        keys = self.settings.api_keys
        if keys is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "Authorization: must be Bearer and a valid API key")

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.name):
            raise ApiError(404, f"model: got {name!r}, must be {self.settings.name!r}", "model")

    async def answer(
        self, request: Request, asked: Generation, prompts: Sequence[str], echo: bool = False
    ) -> Response:
        """Generate all choices of these prompts, streamed or not."""
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options")
        if len(prompts) * asked.n > MAX_CHOICES:
            message = f"n: got {asked.n} texts of {len(prompts)} prompts, must be at most "
            raise ApiError(400, f"{message}{MAX_CHOICES} together", "n")
        choices = await asyncio.to_thread(self._choices, asked, prompts)
        echoes = [prompt for prompt in prompts for _ in range(asked.n)] if echo else []
        is_chat = isinstance(asked, ChatRequest)
        answer = Answer(self.settings.name, is_chat, len(choices), asked.n, echoes)
        answer.shows_steps = asked.return_spec_metrics == "detailed"
        pieces = self._counted(choices)
        try:
            if not asked.stream:
                return await unless_gone(request, _whole(answer, pieces))
            # Errors up to the first piece have a status. Later ones are events.
            first = await unless_gone(request, anext(pieces))
        except ApiError as error:
            if is_chat and error.param == "prompt":
                message = error.message.replace("prompt", "messages", 1)
                raise ApiError(error.status, message, "messages") from error
            raise
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return StreamingResponse(
            events(answer, pieces, first, usage), media_type="text/event-stream"
        )

    async def _counted(self, choices: Sequence[Any]) -> AsyncIterator[tuple[int, Any]]:
        """`pieces_of`, with a limit on requests at once."""
        most = self.settings.max_requests
        if self.num_requests >= most:
            raise ApiError(429, f"{most} requests are running: send it again later", None, 1)
        self.num_requests += 1
        try:
            async with aclosing(pieces_of(self.model, choices)) as pieces:  # type: ignore[type-var]
                async for found in pieces:
                    yield found
        finally:
            self.num_requests -= 1

    def _choices(self, asked: Generation, prompts: Sequence[str]) -> list[dict[str, Any]]:
        """The tensors of each choice."""
        shared = {name: (PASSED[name], value) for name, value in asked.tensors().items()}
        if words := asked.stop_words:
            shared["stop_words"] = ("BYTES", [word.encode() for word in words])
        if asked.logit_bias:
            found = [self.prompts.word(token) for token in asked.logit_bias]
            shared["embedding_bias_words"] = ("BYTES", [word.encode() for word in found])
            shared["embedding_bias_weights"] = ("FP32", list(asked.logit_bias.values()))
        choices = []
        for prompt in prompts:
            room = self.settings.context_len - len(self.prompts.encode(prompt))
            own = {
                "text_input": ("BYTES", prompt.encode()),
                "max_tokens": ("INT32", asked.token_limit or max(1, room)),
                "stream": ("BOOL", asked.stream),
            }
            for number in range(asked.n):
                seed = {}
                if asked.seed is not None:
                    seed["seed"] = ("UINT64", (asked.seed + number) % UINT64)
                choices.append({**shared, **own, **seed})
        return choices


async def _whole(answer: Answer, pieces: AsyncIterator[tuple[int, Any]]) -> Response:
    async with aclosing(pieces):  # type: ignore[type-var]
        async for number, piece in pieces:
            answer.add(number, piece)
    return JSONResponse(answer.whole())


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE_STATUS, "the client has disconnected")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(model: Model, prompts: Prompts, settings: Settings) -> FastAPI:
    """The application. It closes the model at its end."""
    endpoint = Endpoint(model, prompts, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(prompts.load)
        yield
        await model.close()

    app = FastAPI(title="SmartSpec", lifespan=lifespan, redoc_url=None)
    keyed = [Depends(endpoint.check_key)]

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        endpoint.check_model(asked.model)
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            name = "max_completion_tokens"
            raise ApiError(400, f"{name}: give only one of max_tokens and {name}", name)
        messages = [message.for_template() for message in asked.messages]
        prompt = await asyncio.to_thread(
            prompts.of_chat, messages, asked.chat_template_kwargs or {}, asked.add_generation_prompt
        )
        return await endpoint.answer(request, asked, [prompt])

    @app.post("/v1/completions", dependencies=keyed)
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        endpoint.check_model(asked.model)
        given = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        if not given:
            raise ApiError(400, "prompt: got [], must have at least one text", "prompt")
        return await endpoint.answer(request, asked, given, asked.echo)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        about = {"id": settings.name, "object": "model", "created": endpoint.begin_s}
        more = {"owned_by": "smartspec", "max_model_len": settings.context_len}
        return {"object": "list", "data": [about | more]}

    @app.post("/tokenize", dependencies=keyed)
    def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        endpoint.check_model(asked.model)
        tokens = prompts.encode(asked.prompt, asked.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": settings.context_len}

    @app.post("/detokenize", dependencies=keyed)
    def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        endpoint.check_model(asked.model)
        return {"prompt": prompts.decode(asked.tokens)}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await model.is_ready() else 503)

    @app.get("/metrics", dependencies=keyed)
    async def metrics() -> Response:
        if settings.metrics_url is None:
            raise ApiError(404, "the address of Triton's metrics is not known")
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(settings.metrics_url) as response,
            ):
                text = await response.text()
        except aiohttp.ClientError as error:
            raise ApiError(503, "Triton's metrics are not available") from error
        return Response(text, media_type="text/plain")

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        wait = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return JSONResponse(error.body, error.status, headers=wait)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> Response:
        found = _of_validation(error.errors()[0])
        return JSONResponse(found.body, found.status)

    @app.exception_handler(HTTPException)
    async def refuse_route(_: Request, error: HTTPException) -> Response:
        found = ApiError(error.status_code, str(error.detail))
        return JSONResponse(found.body, found.status, headers=error.headers)

    @app.exception_handler(UnicodeEncodeError)
    async def refuse_text(_: Request, error: UnicodeEncodeError) -> Response:
        found = ApiError(400, f"texts must not have lone surrogates, got {error.object!r:.80}")
        return JSONResponse(found.body, found.status)

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        found = ApiError(500, "the endpoint failed: see its log")
        return JSONResponse(found.body, found.status)

    return app


def _of_validation(error: Mapping[str, Any]) -> ApiError:
    """One sentence for the first error of a body."""
    places = [str(place) for place in error["loc"] if place != "body"]
    name = ".".join(place for place in places if not place.startswith(("list[", "TextPart")))
    kind, given = error["type"], error.get("input")
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if not places:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    if kind == "missing":
        return ApiError(400, f"{name}: must be given", name)
    if kind == "extra_forbidden":
        known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        near = difflib.get_close_matches(places[-1], sorted(known), 3)
        hint = f" (similar: {', '.join(near)})" if near else ""
        return ApiError(400, f"{name}: is not supported; leave it out{hint}", name)
    shown = repr(given) if len(repr(given)) <= 80 else f"{repr(given)[:77]}..."
    return ApiError(400, f"{name}: got {shown}: {error['msg'][:1].lower()}{error['msg'][1:]}", name)
