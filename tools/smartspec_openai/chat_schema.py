"""The request body of `/v1/chat/completions`: messages and tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from smartspec_openai.schema import MAX_TOP_LOG_PROBS, Generation, Int32

MAX_TOOLS = 128


def _json_object(text: str) -> str:
    try:
        found = json.loads(text or "{}")
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object, as text")
    return text


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """A function of a tool. Other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: Annotated[str, AfterValidator(_json_object)]


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(BaseModel):
    """A message. Other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """Parts of text are joined, because many templates take only strings."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        return found


class TextFormat(BaseModel):
    """The only response format."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, description="the conversation so far")
    max_completion_tokens: Int32 | None = Field(
        None, ge=1, description="newer name of max_tokens; give only one of them"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template"
    )
    add_generation_prompt: bool = Field(True, description="end the prompt where the answer begins")
    response_format: TextFormat | None = Field(None, description="text")
    logprobs: bool = Field(False, description="return the log-probability of each token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOG_PROBS,
        description="with logprobs: return this many of the most probable tokens at each position",
    )
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="functions that the model may call"
    )
    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="none: give the model no tools. Default: auto"
    )
    parallel_tool_calls: bool = Field(True, description="false: return only the first call")

    @property
    def num_top_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
