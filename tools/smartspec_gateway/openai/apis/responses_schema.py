"""The request body of `/v1/responses`: items, and the flat form of tools."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from smartspec_gateway.openai.apis.chat_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    OtherTool,
    RefusalPart,
    kind_of_part,
)
from smartspec_gateway.openai.apis.schema import (
    OPEN,
    Body,
    Effort,
    Ignored,
    Int32,
    OpenBody,
    Sampling,
    Words,
    by_tag,
    few,
    only,
    tag,
    tensor,
    type_of,
)
from smartspec_gateway.openai.formats.media import with_markers

NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format with tools": "text.format with tools",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of chats that have another name here."""


Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
"""What a response could have more of: of tools that are skipped here, and of images. It has no
log-probabilities, so these are refused."""

OnlyFalse = Annotated[bool | None, only("false: the server keeps no responses", False)]
NotGiven = Annotated[
    None, only("left out: the server keeps no responses; send earlier items in input")
]


def _with_type(item: Any) -> Any:
    """Messages may have no type."""
    is_message = isinstance(item, dict) and item.get("type") is None
    return {**item, "type": "message"} if is_message else item


class ItemTextPart(Body):
    """Text of the input or of an earlier response. Other keys have no effect, such as
    `annotations`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: str


AnyItemPart = Annotated[
    Annotated[ItemTextPart, tag("text")] | Annotated[RefusalPart, tag("refusal")],
    by_tag(kind_of_part),
]
ItemText = str | Annotated[list[AnyItemPart], few(MAX_PARTS)]
ItemResultText = Annotated[ItemText, BeforeValidator(with_markers("input_text", "output_text"))]


class InputItem(Body):
    """What all items may have. It has no effect, as have fields that are not known here."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    status: str | None = None


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemText
    phase: str | None = None


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemResultText


class ThoughtPart(Body):
    model_config = ConfigDict(extra="ignore")

    text: str = ""


Thoughts = Annotated[list[ThoughtPart], few(MAX_PARTS)]


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: Thoughts | None = None
    content: Thoughts | None = None
    encrypted_content: Any = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or [])


class FunctionTool(Body):
    """A function that the model may call. Other keys have no effect, such as `allowed_callers`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str = Field(pattern=r"^[\w.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _kind(tool: Any) -> str:
    """Agents list tools that run on OpenAI's servers, and their types become more."""
    kind = type_of(tool)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


AnyItemTool = Annotated[
    Annotated[FunctionTool, tag("function")] | Annotated[OtherTool, tag("other")],
    by_tag(_kind),
]


class AdditionalToolsItem(InputItem):
    """Codex sends tools in the input, too."""

    type: Literal["additional_tools"]
    tools: Annotated[list[AnyItemTool], few(MAX_TOOLS)]


class ReferenceItem(InputItem):
    type: Annotated[
        Literal["item_reference"], only("the item itself: the server keeps no responses")
    ]


class OtherItem(InputItem):
    """With a call_id it is a call of a tool that the client runs, or its output. Others are
    skipped: tools that run on OpenAI's servers leave them, and their types become more."""

    model_config = ConfigDict(extra="allow")

    type: str
    call_id: str | None = None


OWN_TYPES = {"message", "function_call", "function_call_output", "reasoning"}
OWN_TYPES |= {"additional_tools", "item_reference"}


def _item_kind(item: Any) -> str:
    kind = type_of(item)
    if not isinstance(kind, str):
        return "message"
    return kind if kind in OWN_TYPES else "other"


AnyItem = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CallOutputItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")]
    | Annotated[AdditionalToolsItem, tag("additional_tools")]
    | Annotated[ReferenceItem, tag("item_reference")]
    | Annotated[OtherItem, tag("other")],
    by_tag(_item_kind),
    BeforeValidator(_with_type),
]


class Format(Body):
    """The other keys are checked as those of a chat's `response_format`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: Format | None = None
    verbosity: str | None = Field(None, description="no effect")


class Reasoning(Body):
    """Other keys have no effect."""

    model_config = ConfigDict(extra="ignore")

    effort: Effort | None = None


class Obfuscation(Body):
    include_obfuscation: bool = False


class ResponsesRequest(Sampling, Ignored, OpenBody):
    model_config = OPEN
    route = "/v1/responses"
    names = NAMES

    input: str | Annotated[list[AnyItem], few(MAX_MESSAGES)] = Field(
        description="the conversation so far: text of the user, or messages, function calls, their "
        "outputs and reasoning"
    )
    stop: str | Words | None = tensor("stop_words")
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Int32 | None = Field(
        None, ge=1, description="most tokens to generate; default: the rest of the context"
    )
    tools: Annotated[list[AnyItemTool], few(MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call. Tools of other types are skipped"
    )
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = Field(
        None, description="as for chats, without the inner object. Default: auto"
    )
    parallel_tool_calls: bool = Field(True, description="false: return only the first call")
    text: TextOptions | None = Field(
        None, description="`format`: as `response_format` of chats, without its inner object"
    )
    reasoning: Reasoning | None = Field(None, description="`effort`: as `reasoning_effort`")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template"
    )
    metadata: dict[str, Any] | None = Field(None, description="returned with the response")
    return_spec_metrics: Literal["none", "summary"] | None = Field(
        None, description="add `metrics.speculative_decoding`: statistics of the response"
    )
    stream_options: Obfuscation | None = Field(None, description="no effect")
    include: Annotated[list[Included], few(MAX_PARTS)] | None = Field(None, description="no effect")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="an input that is too long is refused"
    )
    top_logprobs: Literal[0] | None = Field(None, description="no log-probabilities")
    store: OnlyFalse = Field(None, description="only false: the server keeps no responses")
    client_metadata: dict[str, Any] | None = Field(None, description="no effect")
    background: OnlyFalse = Field(None, description="only false")
    previous_response_id: NotGiven = Field(None, description="refused: see `input`")
    conversation: NotGiven = Field(None, description="refused: see `input`")

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model is told of."""
        items = [] if isinstance(self.input, str) else self.input
        added = [item.tools for item in items if isinstance(item, AdditionalToolsItem)]
        tools = chain(self.tools or [], *added)
        return [tool for tool in tools if isinstance(tool, FunctionTool)]
