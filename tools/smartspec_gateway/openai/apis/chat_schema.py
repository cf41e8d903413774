"""The request body of `/v1/chat/completions`: messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from smartspec_gateway.openai.apis.schema import (
    Body,
    Effort,
    Generation,
    by_tag,
    few,
    only,
    tag,
    type_of,
)
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.calls import Tools, parameter_types
from smartspec_gateway.openai.formats.media import with_markers
from smartspec_py.api.inputs import MAX_TOP_LOG_PROBS

RESPONSE_FORMAT = "response_format"
WITH_TOOLS = f"{RESPONSE_FORMAT} with tools"
"""In errors, where one grammar is made of both."""

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128

THINKING = ("enable_thinking", "thinking")
"""Names that chat templates have for whether the model thinks: Qwen's and GLM's, and those of
DeepSeek and Granite."""

BUDGET = "thinking_budget"
"""Tokens that the model may think in, in the templates of Seed-OSS. With 0 it does not think."""


class TextPart(Body):
    """Other keys have no effect, such as `cache_control`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What the assistant said instead of an answer. It counts as its text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def kind_of_part(part: Any) -> str:
    """What is no refusal gets the error that a text would have."""
    return "refusal" if type_of(part) == "refusal" else "text"


AnyPart = Annotated[
    Annotated[TextPart, tag("text")] | Annotated[RefusalPart, tag("refusal")],
    by_tag(kind_of_part),
]


class Function(Body):
    """A function of a tool. Other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[\w.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """Other keys have no effect, such as `cache_control`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


class OtherTool(Body):
    """A tool that this server cannot run. It is skipped."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(tool: Any) -> str:
    """OpenAI's chats have two types of tools. A type that is neither is an error."""
    return "custom" if type_of(tool) == "custom" else "function"


AnyTool = Annotated[
    Annotated[Tool, tag("function")] | Annotated[OtherTool, tag("custom")], by_tag(_kind)
]


class CalledFunction(Body):
    """Other keys have no effect, such as `parsed_arguments` of the package `openai`."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Parts = Annotated[list[AnyPart], few(MAX_PARTS)]
ToolCalls = Annotated[list[ToolCall], few(MAX_TOOLS)]
as_text = with_markers("text")


class Message(Body):
    """A message. Other keys are passed to the chat template. Those that no template reads, and that
    would change the prompt, are refused."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    refusal: str | None = None
    tool_calls: ToolCalls | None = None
    function_call: Annotated[None, only("left out: use tool_calls")] = None
    audio: Annotated[None, only("left out: use content")] = None
    prefix: Annotated[bool | None, only("false or left out: use continue_final_message", False)] = (
        None
    )

    @model_validator(mode="before")
    @classmethod
    def _result_as_text(cls, message: Any) -> Any:
        if not isinstance(message, dict) or message.get("role") != "tool":
            return message
        return {**message, "content": as_text(message.get("content"))}

    @property
    def text(self) -> str:
        """Parts become lines, because many templates take only strings. So does a refusal."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        return "\n".join(filter(None, (text, self.refusal)))

    def for_template(self) -> dict[str, Any]:
        found = self.model_dump(exclude_none=True, exclude={"refusal"})
        if not self.tool_calls:  # some clients send an empty list
            found.pop("tool_calls", None)
        has_text = self.content is not None or self.refusal is not None
        return found | ({"content": self.text} if has_text else {})


def thinking(setting: Any) -> dict[str, Any]:
    """Variables of chat templates for whether the model thinks."""
    return dict.fromkeys(THINKING, setting) | ({} if setting else {BUDGET: 0})


def text_parts(content: Any) -> Any:
    """The content of a message, of a text or of parts that another API has."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def add_thought(message: dict[str, Any], text: str) -> None:
    """To a message of the assistant, in the field that chat templates read."""
    thoughts = [message.get("reasoning_content"), text]
    message["reasoning_content"] = "\n".join(filter(None, thoughts))


def check_calls(messages: Iterable[Mapping[str, Any]], field: str, kind: str) -> None:
    """Raises ApiError if a message has more calls than it may have. field, kind: what it was made
    of, in the API of the client."""
    most = max((len(message.get("tool_calls", ())) for message in messages), default=0)
    if most > MAX_TOOLS:
        message = f"{field}: got {most} {kind} in one turn, must be at most {MAX_TOOLS}"
        raise ApiError(400, message, field)


class JsonSchema(Body):
    """strict: no effect, because the text always follows the schema."""

    name: str = Field(pattern=r"^[\w-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("an object with json_schema exactly if its type is json_schema")
        return self

    @property
    def schema_object(self) -> dict[str, Any] | None:
        """The schema of the text; None if the text is free."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


AnyNamed = Annotated[
    Annotated[NamedTool, tag("function")] | Annotated[OtherTool, tag("custom")], by_tag(_kind)
]


class AllowedTools(Body):
    """The functions of `tools` that the text may call. The model is told of the others, too."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamed], few(MAX_TOOLS)]


class ToolChoice(Body):
    """One function, or the allowed ones."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _has_its_field(self) -> ToolChoice:
        if self.model_dump(exclude_none=True).keys() != {"type", self.type}:
            raise ValueError(f"an object with type and {self.type}")
        return self

    @property
    def function_names(self) -> list[str]:
        """Functions that the text may call."""
        if self.allowed_tools is None:
            return [self.function.name] if self.function else []
        allowed = self.allowed_tools.tools
        return [tool.function.name for tool in allowed if isinstance(tool, NamedTool)]

    @property
    def must_call(self) -> bool:
        return self.allowed_tools is None or self.allowed_tools.mode == "required"


Messages = Annotated[list[Message], few(MAX_MESSAGES)]


class ChatPrompt(Body):
    """Fields of which a chat template makes a prompt, beside the messages."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template"
    )
    add_generation_prompt: bool = Field(True, description="end the prompt where the answer begins")
    continue_final_message: bool = Field(
        False,
        description="end the prompt inside of the last message, which the text continues; only "
        "with add_generation_prompt false",
    )
    tools: Annotated[list[AnyTool], few(MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call. Those of the type custom are skipped"
    )

    @property
    def variables(self) -> dict[str, Any]:
        """For the chat template. A setting of thinking has all of its names."""
        given = self.chat_template_kwargs or {}
        settings = [given[name] for name in THINKING if name in given]
        return thinking(settings[0]) | given if settings else given

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [tool for tool in self.tools or [] if isinstance(tool, Tool)]


class TokenizeRequest(ChatPrompt):
    """A text, or messages as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class IgnoredInChats(Body):
    """Fields of chats that have no effect here."""

    modalities: Annotated[list[Literal["text"]], few(2)] | None = Field(
        None, description="only text"
    )
    verbosity: str | None = Field(None, description="see max_tokens")
    add_special_tokens: Literal[False] | None = Field(
        None, description="the chat template writes them"
    )
    include_reasoning: Literal[True] | None = Field(None, description="see `reasoning_content`")
    echo: Annotated[bool | None, only("false: only /v1/completions returns the prompt", False)] = (
        Field(None, description="only false: see `/v1/completions`")
    )


class ChatRequest(ChatPrompt, Generation, IgnoredInChats):
    route = "/v1/chat/completions"

    messages: Messages = Field(min_length=1, description="the conversation so far")
    response_format: ResponseFormat | None = Field(
        None,
        description="text, json_object or json_schema: the text follows the schema, on one line",
    )
    logprobs: bool = Field(False, description="return the log-probability of each token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOG_PROBS,
        description="with logprobs: return this many of the most probable tokens at each position",
    )
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = Field(
        None,
        description="none: give the model no tools. required: the text is a call, or several. A "
        "function: the text is a call of it. allowed_tools: as auto or required, but only some may "
        "be called. Default: auto",
    )
    parallel_tool_calls: bool = Field(True, description="false: return only the first call")
    reasoning_effort: Effort | None = Field(
        None,
        description="none: sets thinking to false. gpt-oss: low, medium or high, or the nearest of "
        "them. Others: no effect, see `chat_template_kwargs`",
    )

    @property
    def variables(self) -> dict[str, Any]:
        given = super().variables
        is_off = self.reasoning_effort == "none" and not any(name in given for name in THINKING)
        return thinking(False) | given if is_off else given

    @property
    def num_top_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else super().usable_tools

    @property
    def has_one_call(self) -> bool:
        return not self.parallel_tool_calls

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        return choice.must_call if isinstance(choice, ToolChoice) else choice == "required"

    @property
    def may_call_twice(self) -> bool:
        is_named = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.type == "function"
        return self.parallel_tool_calls and not is_named

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the text may call."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return self.usable_tools
        return [tool for tool in self.usable_tools if tool.function.name in choice.function_names]

    @property
    def grammars(self) -> dict[str, tuple[str, str]]:
        """A forced call has no response format: some clients send both, and want the call."""
        schema = self.response_format and self.response_format.schema_object
        schema = None if self.must_call else schema
        own = {} if schema is None else {RESPONSE_FORMAT: ("json_schema", json.dumps(schema))}
        return super().grammars | own

    @property
    def grammar_field(self) -> str:
        found = super().grammar_field
        return WITH_TOOLS if found == RESPONSE_FORMAT and self.callable_tools else found

    @property
    def tool_types(self) -> Tools:
        if self.grammars.keys() - {RESPONSE_FORMAT}:
            return {}
        functions = [tool.function for tool in self.callable_tools]
        return {one.name: parameter_types(one.parameters) for one in functions}
