"""From the body of a request to what the model and the writer of the answer need.

This is the work that grows with a body: it may run in another process, see `workers`. Its results
have no text of the request but what the answer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.chat_schema import (
    RESPONSE_FORMAT,
    WITH_TOOLS,
    ChatPrompt,
    ChatRequest,
    Message,
    ToolChoice,
)
from smartspec_gateway.openai.apis.choices import Prepared, Wanted
from smartspec_gateway.openai.apis.schema import MAX_CHOICES, Generation
from smartspec_gateway.openai.errors import TOO_LONG, ApiError, PromptTooLong
from smartspec_gateway.openai.formats.call_grammar import call_grammar, calls_or_json
from smartspec_gateway.openai.formats.harmony import EFFORTS
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.formats.reasoning import HARMONY, Start, start_of
from smartspec_gateway.openai.formats.reasoning_grammar import behind_reasoning
from smartspec_gateway.openai.formats.special_names import CUT, num_characters
from smartspec_gateway.openai.model import Fields, PromptTokens
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.api.inputs import MAX_ANSWER_VALUES, MAX_GUIDE_BYTES
from smartspec_py.faults import shown
from smartspec_py.serving.intake import MAX_BYTES_PER_TOKEN

UINT64 = 1 << 64


@dataclass(frozen=True)
class Settings:
    """name: of the model, in answers. api_keys: None if requests need no key. metrics_url: of
    Triton. adapters: names of LoRA adapters, which requests choose as `model`. aliases: other names
    of the model."""

    name: str
    limits: Limits
    api_keys: tuple[str, ...] | None = None
    metrics_url: str = ""
    adapters: Sequence[str] = ()
    aliases: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `model`; MODEL_NAME is accepted too."""
        return (self.name, *self.aliases, *self.adapters)


class Requests:
    """The work that several APIs share. An API translates its request to that of a chat or a
    completion."""

    def __init__(self, prompts: Prompts, settings: Settings) -> None:
        """context_len: prompt and generated tokens of one request."""
        self.prompts, self.settings, self.context_len = prompts, settings, 0

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in (*self.settings.names, MODEL_NAME):
            known = " or ".join(map(repr, self.settings.names))
            raise ApiError(404, f"model: got {shown(name)}, must be {known}", "model")

    def of_chat(self, asked: ChatRequest, **more: Any) -> Prepared:
        """Raises ApiError, as what follows does. more: other fields of the result."""
        self.check_chat(asked)
        tokens, start = self.chat_prompt(asked.messages, asked)
        choices = self.choices(asked, "messages", [tokens], start)
        return self.prepared(asked, choices, [len(tokens)], start=start, **more)

    def prepared(
        self, asked: Generation, choices: list[Fields], num_prompt: list[int], **more: Any
    ) -> Prepared:
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options")
        limit, wanted = choices[0]["max_tokens"], asked.token_limit
        wanted = self.context_len - num_prompt[0] if wanted is None else wanted
        more["max_tokens"] = limit if wanted > limit else None
        return Prepared(
            choices,
            Wanted.of(asked, self.prompts.call_format),
            asked.model or self.settings.name,
            num_prompt,
            asked.grammar_field,
            asked.stream,
            **more,
        )

    def check_chat(self, asked: ChatRequest) -> None:
        names = [tool.function.name for tool in asked.usable_tools]
        wanted = (
            asked.tool_choice.function_names if isinstance(asked.tool_choice, ToolChoice) else []
        )
        unknown = next((name for name in wanted if name not in names), None)
        if unknown is not None:
            message = f"tool_choice: got {shown(unknown)}, must be a function of tools"
            raise ApiError(400, message, "tool_choice")
        if asked.must_call and not asked.callable_tools:
            message = "tool_choice: got 'required' without a function of tools"
            raise ApiError(400, message, "tool_choice")

    def num_prompt_tokens(self, asked: ChatRequest) -> int:
        self.check_chat(asked)
        return len(self.chat_prompt(asked.messages, asked)[0])

    def chat_prompt(
        self, messages: Sequence[Message], asked: ChatPrompt
    ) -> tuple[list[int], Start | None]:
        """The tokens, and where the answer begins; None if it has no reasoning blocks."""
        _check_continued(messages, asked)
        given = [message.for_template() for message in messages]
        marks, variables = self.prompts.reasoning_marks, asked.variables
        if marks == HARMONY and isinstance(asked, ChatRequest):
            # Templates of other models refuse some of these values.
            variables = EFFORTS.get(asked.reasoning_effort or "", {}) | variables
        tools = [tool.model_dump(exclude_none=True) for tool in asked.usable_tools]
        self._check_characters(given, variables, tools)
        text = self.prompts.of_chat(
            given, variables, asked.add_generation_prompt, tools, asked.continue_final_message
        )
        self.check_bytes("messages", text)
        if (num_parts := text.count(CUT)) >= self.context_len:
            most = self.context_len - 1
            got = f"{num_parts} tokens or more"
            raise self._too_long("messages", got, f"{most} tokens", num_parts)
        prefix = messages[-1].text if asked.continue_final_message else ""
        start = start_of(marks, text, prefix) if marks else None
        return self.prompts.encode_chat(text), start

    def choices(
        self,
        asked: Generation,
        field: str,
        prompts: Sequence[list[int]],
        start: Start | None = None,
    ) -> list[Fields]:
        """The fields of each choice. field: the one with the prompts. start: see `chat_prompt`."""
        if not prompts or not all(prompts):
            raise ApiError(400, f"{field}: must have at least one token", field)
        if len(prompts) * asked.n > MAX_CHOICES:
            message = f"n: got {asked.n} texts of {len(prompts)} prompts, must be at most "
            raise ApiError(400, f"{message}{MAX_CHOICES} together", "n")
        shared = {**self._shared(asked), **self._grammar(asked, start)}
        choices: list[Fields] = []
        for prompt in prompts:
            own = {
                "text_input": "",
                "input_ids": PromptTokens(prompt),
                "max_tokens": self._limit(asked, field, len(prompt)),
                # Log-probabilities of a whole text would be one document of many MB.
                "stream": asked.stream or asked.num_top_log_probs is not None,
            }
            for number in range(asked.n):
                choices.append({**shared, **own})
                if asked.seed is not None:
                    choices[-1]["seed"] = (asked.seed + number) % UINT64
        self._bound_answer(asked, choices)
        return choices

    def _bound_answer(self, asked: Generation, choices: Sequence[Fields]) -> None:
        """The values of an answer that is not streamed, which is held until it is whole: tokens and
        log-probabilities, with echo of the prompts, too. Without a limit of the client, each text
        gets the tokens that fit."""
        if asked.stream:
            return
        top = asked.num_top_log_probs
        most = MAX_ANSWER_VALUES // (1 if top is None else 2 + top)
        num_echoed = sum(len(one["input_ids"]) for one in choices) if asked.has_echo else 0
        fitting = (most - num_echoed) // len(choices)
        if asked.token_limit is None and fitting > 0:
            for one in choices:
                one["max_tokens"] = min(one["max_tokens"], fitting)
        num_tokens = sum(one["max_tokens"] for one in choices) + num_echoed
        if num_tokens > most:
            given = "prompt" if asked.token_limit is None else "max_tokens"
            field = "n" if asked.n > 1 else given
            texts = f"{len(choices)} texts" if len(choices) > 1 else "a text"
            each = "" if top is None else f" with {1 + top} log-probabilities each"
            raise ApiError(
                400,
                f"{field}: got {texts} of {num_tokens} tokens together{each}, must be at most "
                f"{MAX_ANSWER_VALUES} values: set stream, or lower n, max_tokens or the "
                "log-probabilities",
                field,
            )

    def _shared(self, asked: Generation) -> Fields:
        """The fields that are the same for all choices."""
        shared = asked.tensors()
        if asked.model in self.settings.adapters:
            shared["lora_name"] = asked.model
        if words := asked.stop_words:
            shared["stop_words"] = words
        if asked.logit_bias:
            words = [self.prompts.word(token) for token in asked.logit_bias]
            shared["embedding_bias_words"] = words
            shared["embedding_bias_weights"] = list(asked.logit_bias.values())
        if asked.num_top_log_probs is not None:
            shared["return_token_log_probs"] = asked.num_top_log_probs
            if asked.has_echo:
                shared["return_prompt_log_probs"] = True
        if asked.return_spec_metrics == "detailed":
            shared["return_output_ids"] = True
        older, newer, name = asked.max_tokens, asked.max_completion_tokens, "max_completion_tokens"
        if None not in (older, newer) and older != newer:
            message = f"{name}: got {newer}, must be as max_tokens, which is {older}; give only one"
            raise ApiError(400, message, name)
        if asked.token_limit == 0 and not asked.has_echo:
            raise ApiError(400, "max_tokens: got 0, must be at least 1 without echo", "max_tokens")
        return shared

    def _grammar(self, asked: Generation, start: Start | None) -> Fields:
        """The fields of the grammar, if there is one."""
        grammars = asked.grammars
        if isinstance(asked, ChatRequest) and (calls := self._call_grammars(asked, start)):
            grammars.pop(RESPONSE_FORMAT, None)
            grammars |= calls
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise ApiError(400, f"{second}: not together with {first}", second)
        for field, (kind, text) in grammars.items():
            if (num_bytes := len(text.encode())) > MAX_GUIDE_BYTES:
                message = f"{field}: got {num_bytes} bytes, must be at most {MAX_GUIDE_BYTES} bytes"
                raise ApiError(400, message, field)
            if start and start.place != "after":
                is_token = self.prompts.is_token(start.marks.end)
                kind, text = behind_reasoning(kind, text, field, start, is_token)
            return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
        return {}

    def _call_grammars(self, asked: ChatRequest, start: Start | None) -> dict[str, tuple[str, str]]:
        """The grammar of calls that the text must be, or that it may be instead of what follows its
        response format."""
        tools, response = asked.callable_tools, asked.grammars.get(RESPONSE_FORMAT)
        if not tools or not (asked.must_call or response):
            return {}
        functions = [(tool.function.name, tool.function.parameters) for tool in tools]
        calls = call_grammar(functions, self.prompts.call_format, asked.may_call_twice)
        if response is None:
            return {"tools": ("ebnf_grammar", calls)}
        begin = start.marks.answer if start and start.place != "after" else ""
        return {WITH_TOOLS: ("ebnf_grammar", calls_or_json(calls, response[1], begin))}

    def _limit(self, asked: Generation, field: str, num_prompt: int) -> int:
        """Tokens to generate after a prompt. Raises ApiError if the context is too short. In chats
        the limit is an upper bound, and agents send the most that any model has. OpenAI's
        completions refuse a limit that does not fit, as vLLM's do."""
        context_len, limit = self.context_len, asked.token_limit
        room = context_len - num_prompt
        if room < 1:
            allowed = f"{context_len - 1} tokens, to leave room for one more"
            raise self._too_long(field, f"{num_prompt} tokens", allowed, num_prompt)
        if limit is not None and limit > room and not isinstance(asked, ChatRequest):
            message = (
                f"max_tokens: got {limit}, must be at most {room}: the prompt has {num_prompt} "
                f"tokens, and both together may have {context_len}"
            )
            raise ApiError(400, message, "max_tokens", code=TOO_LONG)
        return room if limit is None else min(max(1, limit), room)

    def _check_characters(self, messages: list[Any], variables: Any, tools: list[Any]) -> None:
        """Before anything is searched or rendered."""
        most = MAX_BYTES_PER_TOKEN * self.context_len
        for field, value in (
            ("messages", messages),
            ("chat_template_kwargs", variables),
            ("tools", tools),
        ):
            if (num := num_characters(value)) > most:
                num_tokens = num // MAX_BYTES_PER_TOKEN
                got = f"{num} characters"
                raise self._too_long(field, got, f"{most} characters", num_tokens)

    def check_bytes(self, field: str, text: str) -> None:
        """Before the text is tokenized, which would take long."""
        num_bytes, most = len(text.encode()), MAX_BYTES_PER_TOKEN * self.context_len
        if num_bytes > most:
            num_tokens = num_bytes // MAX_BYTES_PER_TOKEN
            raise self._too_long(field, f"{num_bytes} bytes", f"{most} bytes", num_tokens)

    def _too_long(self, field: str, got: str, allowed: str, num_tokens: int) -> ApiError:
        """num_tokens: of the prompt, or fewer if it is not tokenized."""
        return PromptTooLong(field, got, allowed, num_tokens, self.context_len - 1)


def _check_continued(messages: Sequence[Message], asked: ChatPrompt) -> None:
    """Raises ApiError if the last message cannot be continued as the request says."""
    if not asked.continue_final_message:
        return
    if asked.add_generation_prompt:
        name = "add_generation_prompt"
        message = f"{name}: got True, must be false with continue_final_message"
        raise ApiError(400, message, name)
    if messages[-1].tool_calls:  # a template writes them behind the text that is continued
        message = (
            "messages: got tool calls in the last message, whose text is to be continued: leave "
            "them out, or send their results"
        )
        raise ApiError(400, message, "messages")
