"""The request bodies of OpenAI's API, and the tensors of the model that they become.

Every field is used, or refused by name. Fields that the model itself checks have no range here: its
errors name the field, the value and the range, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, model_validator

MAX_CHOICES = 16
"""Largest n, and most prompts of one request."""

MAX_TOP_LOG_PROBS = 20

Words = str | list[str]


def _int32(value: int) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"in {-1 << 31}..{(1 << 31) - 1}")
    return value


def _float32(value: float) -> float:
    if abs(value) > MAX_FLOAT32:
        raise ValueError(f"from {-MAX_FLOAT32:g} to {MAX_FLOAT32:g}")
    return value


MAX_FLOAT32 = 3.4e38
Int32 = Annotated[int, AfterValidator(_int32)]
Float32 = Annotated[float, AfterValidator(_float32)]


TokenId = Annotated[StrictInt, AfterValidator(_int32), Field(ge=0)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = Field(False, description="send the token counts in the last chunk")
    continuous_usage_stats: bool = Field(False, description="send them in every chunk, as vLLM")


class Generation(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="name of the model; the one that is served")
    max_tokens: Int32 | None = Field(
        None,
        ge=1,
        description="most tokens to generate; default: the rest of the context",
    )
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="draw from the smallest set of tokens with this probability"
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="number of texts for each prompt")
    stop: Words | None = Field(None, description="stop at any of these; the text ends before it")
    seed: int | None = Field(
        None, description="same seed, same text; choice i uses seed + i. Default: random"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted once from the logit of each generated token"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted for each time a token was generated"
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="added to the logits of tokens, by token id"
    )
    stream: bool = Field(False, description="send the text as it is generated")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    user: str | None = Field(None, description="no effect")

    top_k: Int32 | None = Field(None, description="draw from the k most probable tokens")
    min_p: Float32 | None = Field(None, description="exclude improbable tokens; see request fields")
    repetition_penalty: Float32 | None = Field(None, description="see request fields")
    min_tokens: Int32 | None = Field(None, description="tokens before the text can end")
    ignore_eos: bool | None = Field(None, description="continue past end tokens")
    speculation_policy: str | None = Field(
        None, description="none, fixed:K, batch_table, goodput_global or goodput"
    )
    proposer: str | None = Field(None, description="source of the drafts")
    verification: str | None = Field(None, description="coupled or rejection")
    num_draft_tokens: Int32 | None = Field(None, description="largest draft length; 0: no drafts")
    tpot_slo_ms: Float32 | None = Field(None, description="target time per token, in milliseconds")
    deadline_ms: Int32 | None = Field(None, description="generation stops after this time")
    request_priority: Int32 | None = Field(None, description="higher is served first")
    workload: str | None = Field(None, description="name of a group of similar requests")
    reuse_prefix: bool | None = Field(None, description="reuse the cached prefix of a request")
    return_spec_metrics: Literal["none", "summary", "detailed"] | None = Field(
        None,
        description="add `speculative_decoding`: statistics of the first choice. detailed "
        "adds counts of tokens, steps and drafts so far to each chunk",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Fields that are not supported may be null, as some clients send them."""
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        return {name: of for name, of in body.items() if of is not None or name in known}

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_top_log_probs(self) -> int | None:
        """Most probable tokens to return at each position; None without log-probabilities."""
        return None

    @property
    def stop_words(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def tensors(self) -> dict[str, Any]:
        """Inputs of the model that do not depend on the prompt or the choice, by name."""
        given = {name: getattr(self, name) for name in PASSED}
        return {
            name: value.encode() if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="one prompt or several, as text or as tokens"
    )
    echo: bool = Field(
        False,
        description="put the prompt before the text; with logprobs also its log-probabilities, "
        "which need its whole computation",
    )
    logprobs: int | None = Field(
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
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


PASSED: Mapping[str, str] = {
    "temperature": "FP32",
    "top_p": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "min_tokens": "INT32",
    "ignore_eos": "BOOL",
    "speculation_policy": "BYTES",
    "proposer": "BYTES",
    "verification": "BYTES",
    "num_draft_tokens": "INT32",
    "tpot_slo_ms": "FP32",
    "deadline_ms": "INT32",
    "request_priority": "INT32",
    "workload": "BYTES",
    "reuse_prefix": "BOOL",
    "return_spec_metrics": "BYTES",
}
"""Fields that are tensors of the model with the same name and meaning, and their types."""
