"""The request bodies of `/v1/messages`, Anthropic's API: messages of blocks, and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from smartspec_gateway.openai.apis.chat_schema import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from smartspec_gateway.openai.apis.schema import (
    MAX_INT32,
    OPEN,
    Body,
    Effort,
    OpenBody,
    Sampling,
    Words,
    by_tag,
    few,
    only,
    tag,
    type_of,
)
from smartspec_gateway.openai.formats.media import with_markers

NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "output_format": "output_config.format",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format with tools": "output_config.format with tools",
}
"""Fields of chats and of earlier versions that have another name here."""

WHY_NOT_RUN = "left out: the server runs no tools"


class Part(Body):
    """A part of a list. Fields that are not known here, such as `cache_control`, have no effect."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Part):
    type: Literal["text"]
    text: str


BlockText = str | Annotated[list[TextBlock], few(MAX_PARTS)]
ToolResultText = Annotated[BlockText, BeforeValidator(with_markers("text"))]


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: ToolResultText = ""
    is_error: bool = False


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str = ""


class RedactedBlock(Part):
    """Not passed to the model: its text is encrypted."""

    type: Literal["redacted_thinking"]


def _kind(block: Any) -> Any:
    """What is no object gets the error that a text would have."""
    return type_of(block) if isinstance(block, dict | Part) else "text"


AnyBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[RedactedBlock, tag("redacted_thinking")],
    by_tag(_kind),
]


class AnthropicMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], few(MAX_PARTS)]


def _with_type(tool: Any) -> Any:
    """The type of a tool that the client runs may be left out or null."""
    has_none = isinstance(tool, dict) and tool.get("type") is None
    return {**tool, "type": "custom"} if has_none else tool


class AnthropicTool(Part):
    """A tool that the client runs."""

    type: Annotated[
        Literal["custom"], only("'custom' or left out: the server runs no tools", "custom")
    ]
    name: str = Field(pattern=r"^[\w.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_its_name(self) -> AnthropicToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("an object with name exactly if its type is tool")
        return self


class Thinking(Part):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    effort: Effort | None = None
    format: OutputFormat | None = None


class IgnoredInMessages(Body):
    """Fields of messages that have no effect here."""

    metadata: dict[str, Any] | None = Field(None, description="no effect")
    service_tier: str | None = Field(None, description="no effect: there is one tier")
    speed: str | None = Field(None, description="no effect")
    inference_geo: str | None = Field(None, description="no effect")
    user_profile_id: str | None = Field(None, description="no effect")
    diagnostics: dict[str, Any] | None = Field(None, description="no effect")
    cache_control: dict[str, Any] | None = Field(
        None, description="no effect, also on blocks: prefixes are reused without it"
    )
    context_management: dict[str, Any] | None = Field(
        None, description="no effect: the messages are used as they are"
    )


class MessagesPrompt(IgnoredInMessages, OpenBody):
    """Fields that make the prompt: the body of `/v1/messages/count_tokens`."""

    model_config = OPEN
    names: ClassVar[Mapping[str, str]] = NAMES

    model: str | None = Field(None, description="name of the model, or of a LoRA adapter")
    messages: Annotated[list[AnthropicMessage], few(MAX_MESSAGES)] = Field(
        min_length=1,
        description="the conversation so far, as text or as blocks of the types text, tool_use, "
        "tool_result and thinking. The answer continues a last message of the assistant",
    )
    system: BlockText | None = Field(None, description="a system message before the messages")
    tools: Annotated[
        list[Annotated[AnthropicTool, BeforeValidator(_with_type)]] | None, few(MAX_TOOLS)
    ] = Field(None, description="tools that the model may use and the client runs")
    tool_choice: AnthropicToolChoice | None = Field(
        None,
        description="auto, any, none, or a tool by its name. `disable_parallel_tool_use`: return "
        "only the first call. Default: auto",
    )
    thinking: Thinking | None = Field(
        None,
        description="sets the variable enable_thinking of the chat template: false with the type "
        "disabled, true with enabled, adaptive and between_tools. `budget_tokens`: no effect",
    )
    output_config: OutputConfig | None = Field(
        None,
        description="`format`: the text follows its JSON schema. `effort`: as `reasoning_effort` "
        "of chats",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template"
    )
    container: Annotated[None, only(WHY_NOT_RUN)] = Field(
        None, description="refused: the server runs no tools"
    )
    mcp_servers: Annotated[list[Any] | None, only(WHY_NOT_RUN, [])] = Field(
        None, description="only an empty list: the server runs no tools"
    )


class MessagesRequest(MessagesPrompt, Sampling):
    model_config = OPEN
    route = "/v1/messages"

    max_tokens: int = Field(ge=1, le=MAX_INT32, description="most tokens to generate")
    stop_sequences: Words | None = Field(
        None, description="stop generation at any of these; the text ends before it"
    )
    return_spec_metrics: Literal["none", "summary"] | None = Field(
        None, description="add `metrics.speculative_decoding`: statistics of the message"
    )
