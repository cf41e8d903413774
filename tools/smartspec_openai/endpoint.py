"""Answers requests with the model: from fields to tensors, and from pieces to a response."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from smartspec_openai.answers import Answer, Form, events
from smartspec_openai.chat_schema import ChatRequest
from smartspec_openai.errors import ApiError
from smartspec_openai.pieces import pieces_of, unless_gone
from smartspec_openai.prompts import Prompts
from smartspec_openai.schema import (
    MAX_CHOICES,
    PASSED,
    CompletionRequest,
    Generation,
)
from smartspec_openai.triton import Model, Piece

T = TypeVar("T")
Prompt = str | list[int]
UINT64 = 1 << 64

SHORT = 4096
"""Characters, or tokens, that are processed at once. A thread would cost more than the work."""


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

    async def check_key(self, request: Request) -> None:
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

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        self.check_model(asked.model)
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            name = "max_completion_tokens"
            raise ApiError(400, f"{name}: give only one of max_tokens and {name}", name)
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
        messages = [message.for_template() for message in asked.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in asked.usable_tools]
        size = sum(len(message.get("content", "")) for message in messages) + SHORT * bool(tools)
        variables = asked.chat_template_kwargs or {}
        prompt = await _off_loop(
            size, self.prompts.of_chat, messages, variables, asked.add_generation_prompt, tools
        )
        try:
            return await self._answer(request, asked, [prompt])
        except ApiError as error:
            if error.param == "prompt":
                message = error.message.replace("prompt", "messages", 1)
                raise ApiError(error.status, message, "messages") from error
            raise

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        self.check_model(asked.model)
        if not all(asked.prompts) or not asked.prompts:
            raise ApiError(400, "prompt: must have at least one text, none of them empty", "prompt")
        return await self._answer(request, asked, asked.prompts)

    async def _answer(
        self, request: Request, asked: Generation, prompts: Sequence[Prompt]
    ) -> Response:
        """Generate all choices of these prompts, streamed or not."""
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options")
        if len(prompts) * asked.n > MAX_CHOICES:
            message = f"n: got {asked.n} texts of {len(prompts)} prompts, must be at most "
            raise ApiError(400, f"{message}{MAX_CHOICES} together", "n")
        size = sum(map(len, prompts)) + SHORT * bool(asked.logit_bias)
        choices = await _off_loop(size, self._choices, asked, prompts)
        form = await _off_loop(size, self._form, asked, prompts)
        answer = Answer(form, len(choices), self.prompts.token_bytes)
        pieces = self._counted(choices)
        if not asked.stream:
            return await unless_gone(request, _whole(answer, pieces))
        # Errors up to the first piece have a status. Later ones are events.
        first = await unless_gone(request, anext(pieces))
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return StreamingResponse(
            events(answer, pieces, first, usage), media_type="text/event-stream"
        )

    async def _counted(self, choices: Sequence[Any]) -> AsyncIterator[tuple[int, Piece]]:
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

    def _form(self, asked: Generation, prompts: Sequence[Prompt]) -> Form:
        is_chat = isinstance(asked, ChatRequest)
        has_log_probs = asked.num_top_log_probs is not None
        echoes = []
        if isinstance(asked, CompletionRequest) and asked.echo:
            for prompt in prompts:
                tokens = self._tokens(prompt) if has_log_probs else []
                text = prompt if isinstance(prompt, str) else self.prompts.decode(prompt, "prompt")
                echoes.append((text, tokens[0] if tokens else None))
        tools = asked.usable_tools if isinstance(asked, ChatRequest) else ()
        return Form(
            self.settings.name,
            is_chat,
            asked.n,
            echoes,
            tools=[tool.function.name for tool in tools],
            is_one_call=isinstance(asked, ChatRequest) and not asked.parallel_tool_calls,
            with_log_probs=has_log_probs,
            shows_steps=asked.return_spec_metrics == "detailed",
            num_prompt=(
                sum(len(self._tokens(prompt)) for prompt in prompts)
                if asked.streams_usage
                else None
            ),
        )

    def _choices(self, asked: Generation, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The tensors of each choice."""
        shared = {name: (PASSED[name], value) for name, value in asked.tensors().items()}
        if words := asked.stop_words:
            shared["stop_words"] = ("BYTES", [word.encode() for word in words])
        if asked.logit_bias:
            found = [self.prompts.word(token) for token in asked.logit_bias]
            shared["embedding_bias_words"] = ("BYTES", [word.encode() for word in found])
            shared["embedding_bias_weights"] = ("FP32", list(asked.logit_bias.values()))
        if asked.num_top_log_probs is not None:
            shared["return_token_log_probs"] = ("INT32", asked.num_top_log_probs)
            if isinstance(asked, CompletionRequest) and asked.echo:
                shared["return_prompt_log_probs"] = ("BOOL", True)
        if asked.return_spec_metrics == "detailed":
            shared["return_output_ids"] = ("BOOL", True)
        choices = []
        for prompt in prompts:
            limit = asked.token_limit
            if limit is None:
                limit = max(1, self.settings.context_len - len(self._tokens(prompt)))
            own: dict[str, Any] = {
                "text_input": ("BYTES", prompt.encode() if isinstance(prompt, str) else b""),
                "max_tokens": ("INT32", limit),
                "stream": ("BOOL", asked.stream),
            }
            if not isinstance(prompt, str):
                own["input_ids"] = ("INT32", prompt)
            for number in range(asked.n):
                seed = {}
                if asked.seed is not None:
                    seed["seed"] = ("UINT64", (asked.seed + number) % UINT64)
                choices.append({**shared, **own, **seed})
        return choices

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.prompts.encode(prompt) if isinstance(prompt, str) else prompt


async def _off_loop(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """The result of the work, in a thread if it is long."""
    if size < SHORT:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


async def _whole(answer: Answer, pieces: AsyncIterator[tuple[int, Piece]]) -> Response:
    async with aclosing(pieces):  # type: ignore[type-var]
        async for number, piece in pieces:
            answer.add(number, piece)
    return JSONResponse(answer.whole())
