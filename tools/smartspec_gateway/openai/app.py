"""The routes of the endpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis import routes
from smartspec_gateway.openai.apis.requests import Requests, Settings
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.routes import error_document
from smartspec_gateway.openai.apis.validation import body_schema
from smartspec_gateway.openai.endpoint import Endpoint
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import PromptError, Prompts
from smartspec_gateway.openai.model import Model
from smartspec_gateway.openai.schema_page import schema_page
from smartspec_gateway.triton import Triton
from smartspec_gateway.workers import Work, Workers
from smartspec_launch.gateway import KEY_VARIABLE, OpenAi
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.faults import cut

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'"
}


def work_of(openai: OpenAi) -> Work:
    """What a process of `workers` does for the application."""
    prompts = Prompts(openai.model_dir, openai.chat_template)
    return routes.work_of(Requests(prompts, settings_of(openai, Limits())))


def settings_of(
    openai: OpenAi, limits: Limits, keys: tuple[str, ...] | None = None, metrics_url: str = ""
) -> Settings:
    name, *aliases = openai.names or (MODEL_NAME,)
    return Settings(name, limits, keys, metrics_url, openai.adapters, aliases)


def openai_app(
    triton: Triton, limits: Limits, openai: OpenAi, metrics_url: str, workers: Workers
) -> FastAPI:
    """The application. Ends the process if the template or the keys cannot be read."""
    try:
        prompts = Prompts(openai.model_dir, openai.chat_template)
        keys = api_keys(openai.api_key_file)
    except (PromptError, OSError) as error:
        sys.exit(f"smartspec_gateway: {error}")
    settings = settings_of(openai, limits, keys, metrics_url)
    return create_app(Model(triton, MODEL_NAME), prompts, settings, workers)


def api_keys(path: Path | None) -> tuple[str, ...] | None:
    """The keys of the file, one per line, and of the environment; None if there are none."""
    text = os.environ.get(KEY_VARIABLE, "")
    if path is not None:
        text += "\n" + path.read_text(encoding="utf-8")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if path is not None and not keys:
        sys.exit(f"smartspec_gateway: {path} has no API key: write one per line")
    return keys or None


def openai_error(status: int, message: str, path: str) -> bytes:
    """In the format of the API that has this path."""
    return json.dumps(error_document(ApiError(status, message), path)).encode()


def create_app(
    model: Model, prompts: Prompts, settings: Settings, workers: Workers | None = None
) -> FastAPI:
    """The application. workers: None uses threads."""
    endpoint = Endpoint(model, prompts, settings, workers or Workers(settings.limits))

    app = FastAPI(title="SmartSpec", docs_url=None, redoc_url=None)
    keyed = [Depends(endpoint.check_key)]

    def add(route: Route) -> None:
        async def answer(request: Request) -> Response:
            return await endpoint.answer(request, route)

        schema, name = body_schema(route.body), route.path.rpartition("/")[2]
        app.post(route.path, name=name, dependencies=keyed, openapi_extra=schema)(answer)

    for route in routes.ROUTES:
        add(route)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        names = endpoint.settings.names
        # Codex needs the list `models`, whose entries would replace its instructions.
        data = [endpoint.about_model(name) for name in names]
        of_anthropic = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": data, "models": [], **of_anthropic}

    @app.get("/v1/models/{name:path}", dependencies=keyed)
    async def model_of(name: str) -> dict[str, Any]:
        endpoint.requests.check_model(name)
        return endpoint.about_model(name)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(schema_page(app.openapi()), headers=PAGE_HEADERS)

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        return PlainTextResponse("", 200 if await model.is_ready() else 503)

    @app.get("/metrics", dependencies=keyed, response_class=PlainTextResponse)
    async def metrics() -> Response:
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
    async def refuse(request: Request, error: ApiError) -> Response:
        wait = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return JSONResponse(error_document(error, request.url.path), error.status, headers=wait)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {cut(request.url.path)}: {error.detail}; /docs has the routes"
        found = ApiError(error.status_code, message)
        body = error_document(found, request.url.path)
        return JSONResponse(body, found.status, headers=error.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        found = ApiError(500, "the endpoint failed: see its log")
        return JSONResponse(error_document(found, request.url.path), found.status)

    return app
