"""The request bodies of OpenAI's API.

Every field is used, ignored by name or refused by name, except in an OpenBody. Fields that are
tensors of the model have the meaning and the range of the tensor: the model checks them, and its
errors name the field, the value and the range, too. Lists are bounded and stop at their first
error, so that a wrong body costs no more than a right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from smartspec_gateway.openai.formats.calls import Tools
from smartspec_py.api.contract import INPUTS
from smartspec_py.api.inputs import (
    MAX_BAD_WORDS,
    MAX_BIAS_WORDS,
    MAX_PROMPT_IDS,
    MAX_STOP_TOKENS,
    MAX_STOP_WORDS,
    MAX_TOP_LOG_PROBS,
)

MAX_CHOICES = 128
"""Most texts of one request: n times the number of prompts."""

MAX_INT32 = (1 << 31) - 1
MAX_FLOAT32 = 3.4e38

REFUSED = (
    *("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"),
    *("access_programs", "background_options", "context_management", "image", "max_tool_calls"),
)
"""Fields of OpenAI that are refused like unknown ones, for the documentation."""

TENSORS = {spec.name: spec for spec in INPUTS}


def _few_keys(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIAS_WORDS:
        raise ValueError(f"an object of {MAX_BIAS_WORDS} keys or less")
    return value


def _none_if_false(value: Any) -> Any:
    """Clients that know the field from chats send false. As a number it would be 0."""
    return None if value is False else value


def few(most: int) -> Any:
    """Of a list: at most so many elements, and one error."""
    return Field(max_length=most, fail_fast=True)


def only(words: str, *values: Any) -> Any:
    """A field that must be one of these values. words: what an error says about them."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(words)
        return value

    return BeforeValidator(check)


def tag(kind: str) -> Tag:
    """Marks a member of a union. pydantic puts it into the places of errors, so that it must not
    look like a field."""
    return Tag(f"<{kind}>")


def by_tag(kind_of: Callable[[Any], Any]) -> Discriminator:
    """Chooses the member of a union. kind_of: its tag, from JSON or an object; None if unknown."""

    def found(value: Any) -> str | None:
        kind = kind_of(value)
        return None if kind is None else f"<{kind}>"

    return Discriminator(found)


def type_of(value: Any) -> Any:
    """The field `type` of JSON or of an object."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Int32 = Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)]
Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Words = Annotated[list[str], few(MAX_STOP_WORDS)]
Texts = Annotated[list[str], few(MAX_CHOICES)]
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], few(MAX_PROMPT_IDS)]
StopTokens = Annotated[list[TokenId], few(MAX_STOP_TOKENS)]
TokenLists = Annotated[list[TokenIds], few(MAX_CHOICES)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def tensor(name: str, default: Any = None, **rules: Any) -> Any:
    """A field that becomes the tensor of this name, and has its meaning."""
    return Field(default, description=TENSORS[name].meaning, **rules)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model thinks: the values of OpenAI's and Anthropic's APIs."""


class Body(BaseModel):
    """An object of the API. A field that is null counts as not given."""

    model_config = ConfigDict(extra="forbid")
    names: ClassVar[Mapping[str, str]] = {}
    """Fields of chats that have another name here."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        kind = cls.model_fields.get("type")
        kinds = get_args(kind.annotation) if kind else ()
        needs_type = kind is not None and (kind.is_required() or "type" in given)
        if needs_type and kinds and given.get("type") not in kinds:
            return {"type": given["type"]} if "type" in given else {}  # the only error to report
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None and cls.model_config["extra"] == "forbid":
            found = {"name": unknown, "known": known}
            raise PydanticCustomError("unknown", "unknown field", found)
        return given


MAX_SHOWN = 16
OPEN = ConfigDict(extra="allow")
"""Of a body whose unknown fields have no effect. A class needs it after its last base."""


class OpenBody(Body):
    """A body whose clients add fields with each version. A field of chats that has another name
    here is refused, because it would have an effect."""

    model_config = OPEN

    @model_validator(mode="before")
    @classmethod
    def _has_own_names(cls, body: Any) -> Any:
        given = body if isinstance(body, dict) else {}
        wrong = next((name for name in cls.names if given.get(name) is not None), None)
        if wrong is not None:
            raise PydanticCustomError("unknown", "unknown field", {"name": wrong, "known": []})
        return body

    @property
    def ignored(self) -> list[str]:
        """The first unknown fields, as a header can have them."""
        names = list(self.model_extra or ())[:MAX_SHOWN]
        return [re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in names]


class StreamOptions(Body):
    include_usage: bool = Field(False, description="send the token counts in the last chunk")
    continuous_usage_stats: bool = Field(False, description="send them in every chunk, as vLLM")
    include_obfuscation: bool = Field(False, description="no effect")


GRAMMAR_TYPES = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf_grammar",
}
"""By the name that vLLM has for a kind of grammar, the type that the model has for it."""


class StructuredOutputs(Body):
    """vLLM's object with one grammar."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = Field(None, min_length=1)
    choice: Texts | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    disable_any_whitespace: bool | None = Field(None, description="no effect: JSON is on one line")
    disable_additional_properties: Literal[False] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if len(GRAMMAR_TYPES.keys() & self.model_dump(by_alias=True, exclude_none=True)) != 1:
            raise ValueError(f"an object with exactly one of {', '.join(GRAMMAR_TYPES)}")
        return self


def _grammars(prefix: str, given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type and text of each grammar that is given, by the name of its field."""
    found = {}
    for name, kind in GRAMMAR_TYPES.items():
        if (value := given.get(name)) is not None:
            value = {"type": "object"} if name == "json_object" else value
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found[f"{prefix}{name}"] = kind, text
    return found


class Ignored(Body):
    """Fields that clients send and that have no effect here."""

    user: str | None = Field(None, description="name of the end user")
    request_id: str | None = Field(None, description="answers have ids of the server")
    safety_identifier: str | None = Field(None, description="name of the end user")
    metadata: dict[str, Any] | None = Field(None, description="labels of stored answers")
    store: bool | None = Field(None, description="answers are not stored")
    service_tier: str | None = Field(None, description="there is one tier")
    prompt_cache_key: str | None = Field(None, description="prefixes are reused without it")
    prompt_cache_retention: str | None = Field(None, description="see prompt_cache_key")
    skip_special_tokens: Literal[True] | None = Field(None, description="texts never have them")


class Neutral(Body):
    """Fields of chats and completions that are not supported. Clients send them with the value that
    asks for nothing."""

    best_of: Literal[1] | None = Field(None, description="all texts are returned: see n")
    suffix: Literal[""] | None = Field(None, description="no text can be inserted")
    functions: Annotated[list[Any] | None, only("empty: use tools", [])] = Field(
        None, description="must be empty: use tools"
    )
    function_call: Literal["auto", "none"] | None = Field(None, description="see tool_choice")
    use_beam_search: Literal[False] | None = Field(None, description="there are no beams")
    include_stop_str_in_output: Literal[False] | None = Field(
        None, description="the text ends before a stop word"
    )
    length_penalty: Float32 | None = tensor("length_penalty")
    priority: Literal[0] | None = Field(None, description="use request_priority")
    detokenize: Literal[True] | None = Field(None, description="answers are texts")
    spaces_between_special_tokens: Literal[True] | None = Field(
        None, description="texts never have such tokens"
    )
    return_token_ids: Literal[False] | None = Field(None, description="answers are texts")
    return_tokens_as_token_ids: Literal[False] | None = Field(None, description="see logprobs")
    cache_prompt: Literal[True] | None = Field(None, description="use reuse_prefix")


class Sampling(Body):
    """Fields of all requests that generate text."""

    model: str | None = Field(None, description="name of the model, or of a LoRA adapter")
    temperature: float = tensor("temperature", 1.0, ge=0, le=2)
    top_p: float = tensor("top_p", 1.0, ge=0, le=1)
    stop_token_ids: StopTokens | None = tensor("stop_token_ids")
    seed: int | None = Field(
        None, description="same seed, same text; choice i uses seed + i. Default: random"
    )
    presence_penalty: float = tensor("presence_penalty", 0.0, ge=-2, le=2)
    frequency_penalty: float = tensor("frequency_penalty", 0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_keys)] | None = Field(
        None, description="added to the logits of tokens, by token id"
    )
    stream: bool = Field(False, description="send the text as it is generated")

    top_k: Int32 | None = tensor("top_k")
    min_p: Float32 | None = tensor("min_p")
    repetition_penalty: Float32 | None = tensor("repetition_penalty")
    min_tokens: Int32 | None = tensor("min_tokens")
    ignore_eos: bool | None = tensor("ignore_eos")
    speculation_policy: str | None = tensor("speculation_policy")
    proposer: str | None = tensor("proposer")
    verification: str | None = tensor("verification")
    num_draft_tokens: Int32 | None = tensor("num_draft_tokens")
    tpot_slo_ms: Float32 | None = tensor("tpot_slo_ms")
    deadline_ms: Int32 | None = tensor("deadline_ms")
    request_priority: Int32 | None = tensor("request_priority")
    workload: str | None = tensor("workload")
    reuse_prefix: bool | None = tensor("reuse_prefix")

    route: ClassVar[str]


class Generation(Sampling, Ignored, Neutral):
    """Fields of chats and completions."""

    stop: str | Words | None = tensor("stop_words")
    bad_words: Annotated[list[str], few(MAX_BAD_WORDS)] | None = tensor("bad_words")

    max_tokens: Int32 | None = Field(
        None, ge=0, description="most tokens to generate; default: the rest of the context"
    )
    max_completion_tokens: Int32 | None = Field(
        None, ge=1, description="newer name of max_tokens; if both are given, they must be equal"
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="number of texts for each prompt")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    return_spec_metrics: Literal["none", "summary", "detailed"] | None = Field(
        None,
        description="add `metrics.speculative_decoding`: statistics of the first choice. detailed "
        "adds counts of tokens, steps and drafts so far to each chunk",
    )

    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="one of json, json_object, regex, choice and grammar: as guided_json and so on",
    )
    guided_json: dict[str, Any] | str | None = Field(
        None, description="a JSON schema that the text follows, on one line"
    )
    guided_regex: str | None = Field(
        None, min_length=1, description="a regular expression of the whole text"
    )
    guided_choice: Annotated[list[str], few(MAX_CHOICES)] | None = Field(
        None, min_length=1, description="the text is one of these"
    )
    guided_grammar: str | None = Field(
        None, min_length=1, description="a grammar of the text: Lark or GBNF"
    )

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_top_log_probs(self) -> int | None:
        """Most probable tokens to return at each position; None without log-probabilities."""
        return None

    @property
    def has_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def must_call(self) -> bool:
        """Whether the text can be nothing but tool calls."""
        return False

    @property
    def has_one_call(self) -> bool:
        """Whether only the first call is returned."""
        return False

    @property
    def grammars(self) -> dict[str, tuple[str, str]]:
        """Type and text of each grammar, by the name of its field."""
        older = {name: getattr(self, f"guided_{name}", None) for name in GRAMMAR_TYPES}
        newer = self.structured_outputs
        inner = newer.model_dump(by_alias=True) if newer else {}
        return _grammars("guided_", older) | _grammars("structured_outputs.", inner)

    @property
    def grammar_field(self) -> str:
        """The field that has the grammar, if there is one. That of tools has no field."""
        return next(iter(self.grammars), "tools")

    @property
    def tool_types(self) -> Tools:
        """The functions that the model may call, with the types of their parameters."""
        return {}

    @property
    def stop_words(self) -> list[str]:
        """Without empty ones, which clients send that have none."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return list(filter(None, given))

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def tensors(self) -> dict[str, Any]:
        """The inputs that have the name of their field."""
        found = {name: getattr(self, name) for name in PASSED}
        return {name: value for name, value in found.items() if value is not None}


OWN = {"max_tokens", "seed", "stream"}
"""Tensors that have the name of a field, but not always its value."""

PASSED = [name for name in Generation.model_fields if name in TENSORS and name not in OWN]
"""Fields that are tensors of the model, with the same name and meaning."""


class CompletionRequest(Generation):
    route = "/v1/completions"

    prompt: str | Texts | TokenIds | TokenLists = Field(
        description="one prompt or up to 128, as text or as tokens"
    )
    echo: bool = Field(
        False,
        description="put the prompt before the text; with logprobs also its log-probabilities, "
        "which need its whole computation. max_tokens may then be 0",
    )
    add_special_tokens: Literal[True] | None = Field(
        None, description="a text gets those that the tokenizer adds"
    )
    logprobs: Annotated[int | None, BeforeValidator(_none_if_false)] = Field(
        None,
        ge=0,
        le=MAX_TOP_LOG_PROBS,
        description="return the log-probability of each token, and this many of the most probable "
        "tokens at its position",
    )

    @property
    def num_top_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        return self.echo

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
