"""Answers requests with the model: from fields to tensors, and from pieces to a response."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import product
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from smartspec_gateway.guard import until_gone
from smartspec_gateway.limits import Limits
from smartspec_gateway.openai import messages, responses
from smartspec_gateway.openai.answers import Answer, Choice, events
from smartspec_gateway.openai.chat_schema import (
    ChatPrompt,
    ChatRequest,
    Message,
    TokenizeRequest,
    ToolChoice,
)
from smartspec_gateway.openai.errors import ApiError, renamed
from smartspec_gateway.openai.guides import behind_reasoning
from smartspec_gateway.openai.json_parts import json_response
from smartspec_gateway.openai.messages import MessageWriter
from smartspec_gateway.openai.messages_schema import MessagesPrompt, MessagesRequest
from smartspec_gateway.openai.model import Fields, Model, Piece
from smartspec_gateway.openai.pieces import pieces_of
from smartspec_gateway.openai.prompts import Prompts
from smartspec_gateway.openai.reasoning import END, ends_in_reasoning, is_open
from smartspec_gateway.openai.responses import ResponseWriter
from smartspec_gateway.openai.responses_schema import ResponsesRequest
from smartspec_gateway.openai.schema import (
    MAX_CHOICES,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
)
from smartspec_gateway.openai.special_names import CUT, num_characters
from smartspec_gateway.openai.tools import call_grammar
from smartspec_gateway.openai.validation import off_loop
from smartspec_gateway.openai.writer import EventWriter
from smartspec_py.api.inputs import MAX_ANSWER_VALUES
from smartspec_py.serving.intake import MAX_BYTES_PER_TOKEN

UINT64 = 1 << 64


@dataclass(frozen=True)
class Settings:
    """name: of the model. api_keys: None if requests need no key. metrics_url: of Triton.
    adapters: names of LoRA adapters, which requests choose as `model`."""

    name: str
    limits: Limits
    api_keys: tuple[str, ...] | None = None
    metrics_url: str = ""
    adapters: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `model`."""
        return (self.name, *self.adapters)


class Endpoint:
    """The state that routes share."""

    def __init__(self, model: Model, prompts: Prompts, settings: Settings) -> None:
        self.model, self.prompts, self.settings = model, prompts, settings
        self.begin_s = int(time.time())

    async def check_key(self, request: Request) -> None:
        keys = self.settings.api_keys
        if keys is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [token] if scheme.lower() == "bearer" else []
        given.append(request.headers.get("x-api-key", ""))
        pairs = product(given, keys)
        matches = [hmac.compare_digest(one.encode(), key.encode()) for one, key in pairs]
        if not any(matches):
            message = "Authorization: must be Bearer and a valid API key, or x-api-key a valid one"
            raise ApiError(401, message)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            known = " or ".join(map(repr, self.settings.names))
            raise ApiError(404, f"model: got {name!r:.80}, must be {known}", "model")

    def about_model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self.begin_s}
        about |= {"owned_by": "smartspec", "max_model_len": self.settings.limits.context_len}
        return about | ({"parent": self.settings.name} if name != self.settings.name else {})

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            name = "max_completion_tokens"
            raise ApiError(400, f"{name}: give only one of max_tokens and {name}", name)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
        self._check_chat(asked)
        return await self._answer(request, asked, self._of_chat)

    def _check_chat(self, asked: ChatRequest) -> None:
        names = [tool.function.name for tool in asked.usable_tools]
        wanted = asked.tool_choice.names if isinstance(asked.tool_choice, ToolChoice) else []
        unknown = next((name for name in wanted if name not in names), None)
        if unknown is not None:
            message = f"tool_choice: got {unknown!r:.80}, must be a function of tools"
            raise ApiError(400, message, "tool_choice")
        if asked.must_call and not asked.callable_tools:
            message = "tool_choice: got 'required' without a function of tools"
            raise ApiError(400, message, "tool_choice")

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        return await self._answer(request, asked, self._of_completion)

    async def respond(self, request: Request, asked: ResponsesRequest) -> Response:
        return await self._write(request, asked, self._of_response)

    async def _write(
        self,
        request: Request,
        asked: Any,
        work: Callable[[Any], tuple[list[Fields], EventWriter, str]],
    ) -> Response:
        """Generate an answer that has events, streamed or not. work: from the request to the fields
        of its choice, the writer, and the field with the grammar."""
        self.check_model(asked.model)
        size = len(await request.body())
        with renamed(asked.names):
            choices, writer, guide_field = await off_loop(size, work, asked)
            pieces = pieces_of(self.model, choices, guide_field)
            if not asked.stream:
                document = await until_gone(request.receive, writer.whole(pieces))
                return await json_response(document)
            first = await until_gone(request.receive, anext(pieces))
        return StreamingResponse(writer.events(pieces, first), media_type="text/event-stream")

    async def message(self, request: Request, asked: MessagesRequest) -> Response:
        return await self._write(request, asked, self._of_message)

    async def count_tokens(self, request: Request, asked: MessagesPrompt) -> dict[str, int]:
        self.check_model(asked.model)
        with renamed(asked.names):
            return await off_loop(len(await request.body()), self._num_tokens, asked)

    def _num_tokens(self, asked: MessagesPrompt) -> dict[str, int]:
        chat = messages.chat_of(asked)
        self._check_chat(chat)
        return {"input_tokens": len(self._chat_prompt(chat.messages, chat)[0])}

    async def tokenize(self, request: Request, asked: TokenizeRequest) -> dict[str, Any]:
        self.check_model(asked.model)
        tokens = await off_loop(len(await request.body()), self._tokens, asked)
        most = self.settings.limits.context_len
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": most}
        return found | (
            {"token_strs": self.prompts.strings(tokens)} if asked.return_token_strs else {}
        )

    def _tokens(self, asked: TokenizeRequest) -> list[int]:
        text, messages = asked.prompt, asked.messages
        if messages is not None:
            if text is not None:
                raise ApiError(400, "prompt: not together with messages", "prompt")
            if asked.add_special_tokens:
                name = "add_special_tokens"
                raise ApiError(400, f"{name}: got True, must be false with messages", name)
            return self._chat_prompt(messages, asked)[0]
        if text is None:
            raise ApiError(400, "prompt: must be given, or messages", "prompt")
        if others := asked.model_fields_set & ChatPrompt.model_fields.keys():
            raise ApiError(400, f"{min(others)}: only with messages", min(others))
        self._check_bytes("prompt", text)
        return self.prompts.encode(text, asked.add_special_tokens is not False)

    async def detokenize(self, request: Request, asked: DetokenizeRequest) -> dict[str, str]:
        self.check_model(asked.model)
        size = len(await request.body())
        return {"prompt": await off_loop(size, self.prompts.decode, asked.tokens)}

    async def _answer(
        self, request: Request, asked: Any, work: Callable[[Any], tuple[list[Fields], Answer]]
    ) -> Response:
        """Generate all choices, streamed or not."""
        self.check_model(asked.model)
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options")
        choices, answer = await off_loop(len(await request.body()), work, asked)
        pieces = pieces_of(self.model, choices, asked.guide_field)
        if not asked.stream:
            return await until_gone(request.receive, _whole(answer, pieces))
        # Errors up to the first piece have a status. Later ones are events.
        first = await until_gone(request.receive, anext(pieces))
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return StreamingResponse(
            events(answer, pieces, first, usage), media_type="text/event-stream"
        )

    def _of_chat(self, asked: ChatRequest) -> tuple[list[Fields], Answer]:
        tokens, is_in_reasoning = self._chat_prompt(asked.messages, asked)
        choices = self._choices(asked, "messages", [tokens], is_in_reasoning)
        name = asked.model or self.settings.name
        answer = Answer(asked, name, [len(tokens)], (), self.prompts.token_bytes, is_in_reasoning)
        return choices, answer

    def _of_response(self, asked: ResponsesRequest) -> tuple[list[Fields], EventWriter, str]:
        chat = responses.chat_of(asked)
        choices, choice = self._of_translated(chat)
        num_prompt = len(choices[0]["input_ids"])
        name = asked.model or self.settings.name
        writer = ResponseWriter(asked, name, num_prompt, choice, self.prompts.encode)
        return choices, writer, chat.guide_field

    def _of_message(self, asked: MessagesRequest) -> tuple[list[Fields], EventWriter, str]:
        chat = messages.chat_of(asked)
        choices, choice = self._of_translated(chat)
        if chat.stop_words:
            choices[0]["return_output_ids"] = True  # they tell which one ended the text
        num_prompt = len(choices[0]["input_ids"])
        token_bytes = self.prompts.token_bytes
        name = asked.model or self.settings.name
        writer = MessageWriter(asked, name, num_prompt, choice, token_bytes)
        return choices, writer, chat.guide_field

    def _of_translated(self, chat: ChatRequest) -> tuple[list[Fields], Choice]:
        """The fields of the only choice, and the choice."""
        self._check_chat(chat)
        tokens, is_in_reasoning = self._chat_prompt(chat.messages, chat)
        choices = self._choices(chat, "messages", [tokens], is_in_reasoning)
        return choices, Choice.of(chat, is_in_reasoning)

    def _chat_prompt(
        self, messages: Sequence[Message], asked: ChatPrompt
    ) -> tuple[list[int], bool | None]:
        """The tokens, and whether they end in a reasoning block; None if the answer has none."""
        if asked.continue_final_message and asked.add_generation_prompt:
            name = "add_generation_prompt"
            message = f"{name}: got True, must be false with continue_final_message"
            raise ApiError(400, message, name)
        given = [message.for_template() for message in messages]
        variables = asked.chat_template_kwargs or {}
        tools = [tool.model_dump(exclude_none=True) for tool in asked.usable_tools]
        self._check_characters(given, variables, tools)
        text = self.prompts.of_chat(
            given, variables, asked.add_generation_prompt, tools, asked.continue_final_message
        )
        self._check_bytes("messages", text)
        if (num_parts := text.count(CUT)) >= self.settings.limits.context_len:
            most = self.settings.limits.context_len - 1
            raise _too_long("messages", f"{num_parts} tokens or more", f"{most} tokens")
        may_reason = self.prompts.has_reasoning and not text.rstrip().endswith(END)
        begins = ends_in_reasoning(text) if may_reason else None
        if may_reason and asked.continue_final_message and (prefix := messages[-1].text):
            begins = is_open(prefix) or None
        return self.prompts.encode_chat(text), begins

    def _of_completion(self, asked: CompletionRequest) -> tuple[list[Fields], Answer]:
        texts = [text for text in asked.prompts if isinstance(text, str)]
        for text in texts:
            self._check_bytes("prompt", text)
        encode = self.prompts.encode
        prompts = [encode(one) if isinstance(one, str) else one for one in asked.prompts]
        echoes: list[tuple[str, int | None]] = []
        if asked.echo and all(prompts):
            shown = texts or [self.prompts.decode(tokens, "prompt") for tokens in prompts]
            firsts = [None if asked.logprobs is None else tokens[0] for tokens in prompts]
            echoes = list(zip(shown, firsts, strict=True))
        choices = self._choices(asked, "prompt", prompts)
        sizes = list(map(len, prompts))
        name = asked.model or self.settings.name
        answer = Answer(asked, name, sizes, echoes, self.prompts.token_bytes)
        return choices, answer

    def _choices(
        self,
        asked: Generation,
        field: str,
        prompts: Sequence[list[int]],
        is_in_reasoning: bool | None = None,
    ) -> list[Fields]:
        """The fields of each choice. field: the one with the prompts. is_in_reasoning: see
        `_chat_prompt`."""
        if not prompts or not all(prompts):
            raise ApiError(400, f"{field}: must have at least one token", field)
        if len(prompts) * asked.n > MAX_CHOICES:
            message = f"n: got {asked.n} texts of {len(prompts)} prompts, must be at most "
            raise ApiError(400, f"{message}{MAX_CHOICES} together", "n")
        shared = {**self._shared(asked), **self._guide(asked, is_in_reasoning)}
        choices: list[Fields] = []
        for prompt in prompts:
            own = {
                "text_input": "",
                "input_ids": prompt,
                "max_tokens": self._limit(asked, field, len(prompt)),
                # Log-probabilities of a whole text would be one document of many MB.
                "stream": asked.stream or asked.num_top_log_probs is not None,
            }
            for number in range(asked.n):
                choices.append({**shared, **own})
                if asked.seed is not None:
                    choices[-1]["seed"] = (asked.seed + number) % UINT64
        self._check_answer(asked, choices)
        return choices

    def _check_answer(self, asked: Generation, choices: Sequence[Fields]) -> None:
        """The values of an answer that is not streamed, which is held until it is whole: tokens and
        log-probabilities, with echo of the prompts, too."""
        if asked.stream:
            return
        has_echo = isinstance(asked, CompletionRequest) and asked.echo
        num_tokens = sum(one["max_tokens"] + len(one["input_ids"]) * has_echo for one in choices)
        top, most = asked.num_top_log_probs, MAX_ANSWER_VALUES
        if num_tokens * (1 if top is None else 2 + top) > most:
            each = "" if top is None else f" with {1 + top} log-probabilities each"
            raise ApiError(
                400,
                f"n: got {len(choices)} texts of {num_tokens} tokens together{each}, must be at "
                f"most {most} values: set stream, or lower n, max_tokens or the log-probabilities",
                "n",
            )

    def _shared(self, asked: Generation) -> Fields:
        """The fields that are the same for all choices."""
        shared = asked.tensors()
        if asked.model in self.settings.adapters:
            shared["lora_name"] = asked.model
        has_echo = isinstance(asked, CompletionRequest) and asked.echo
        if words := asked.stop_words:
            shared["stop_words"] = words
        if asked.logit_bias:
            words = [self.prompts.word(token) for token in asked.logit_bias]
            shared["embedding_bias_words"] = words
            shared["embedding_bias_weights"] = list(asked.logit_bias.values())
        if asked.num_top_log_probs is not None:
            shared["return_token_log_probs"] = asked.num_top_log_probs
            if has_echo:
                shared["return_prompt_log_probs"] = True
        if asked.return_spec_metrics == "detailed":
            shared["return_output_ids"] = True
        if asked.token_limit == 0 and not has_echo:
            raise ApiError(400, "max_tokens: got 0, must be at least 1 without echo", "max_tokens")
        return shared

    def _guide(self, asked: Generation, is_in_reasoning: bool | None) -> Fields:
        """The fields of the grammar, if there is one."""
        guides = asked.guides
        if isinstance(asked, ChatRequest) and asked.must_call:
            is_hermes = self.prompts.writes_hermes
            grammar = call_grammar(asked.callable_tools, is_hermes, asked.may_call_twice)
            guides["tools"] = "ebnf_grammar", grammar
        if len(guides) > 1:
            first, second, *_ = guides
            raise ApiError(400, f"{second}: not together with {first}", second)
        for field, (kind, guide) in guides.items():
            if is_in_reasoning is not None:
                kind, guide = behind_reasoning(kind, guide, field, is_in_reasoning)
            return {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
        return {}

    def _limit(self, asked: Generation, field: str, num_prompt: int) -> int:
        """Tokens to generate after a prompt. Raises ApiError if the context is too short."""
        context_len, limit = self.settings.limits.context_len, asked.token_limit
        room = context_len - num_prompt
        if room < 1:
            allowed = f"{context_len - 1} tokens, to leave room for one more"
            raise _too_long(field, f"{num_prompt} tokens", allowed)
        if limit is not None and limit > room:
            field = "max_tokens" if asked.max_tokens is not None else "max_completion_tokens"
            both = f"the prompt has {num_prompt} tokens, and both together may have {context_len}"
            raise _too_long(field, f"{limit}", f"{room}: {both}")
        return room if limit is None else max(1, limit)

    def _check_characters(self, messages: list[Any], variables: Any, tools: list[Any]) -> None:
        """Before anything is searched or rendered."""
        most = MAX_BYTES_PER_TOKEN * self.settings.limits.context_len
        for field, value in (
            ("messages", messages),
            ("chat_template_kwargs", variables),
            ("tools", tools),
        ):
            if (num := num_characters(value)) > most:
                raise _too_long(field, f"{num} characters", f"{most} characters")

    def _check_bytes(self, field: str, text: str) -> None:
        """Before the text is tokenized, which would take long."""
        num_bytes, most = len(text.encode()), MAX_BYTES_PER_TOKEN * self.settings.limits.context_len
        if num_bytes > most:
            raise _too_long(field, f"{num_bytes} bytes", f"{most} bytes")


def _too_long(field: str, got: str, most: str) -> ApiError:
    message = f"{field}: got {got}, must be at most {most}"
    return ApiError(400, message, field, code="context_length_exceeded")


async def _whole(answer: Answer, pieces: AsyncIterator[tuple[int, Piece]]) -> Response:
    async with aclosing(pieces):  # type: ignore[type-var]
        async for number, piece in pieces:
            answer.add(number, piece)
    return await json_response(answer.whole())
