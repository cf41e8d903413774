"""engine.json: every engine and control setting, read once and checked here.

A layer a dataclass-like frozen model; an unknown key, a wrong type or a missing model is an error
that names the key. Every default stands here and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from smartspec_py.core.planner import parse_policy

CONFIG_NAME = "engine.json"


class ConfigError(ValueError):
    """engine.json cannot be used; the message names the file, the key and the reason."""


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TorchEngineConfig(_Layer):
    """The PyTorch engine: any Hugging Face causal language model in a local directory.

    draft: None serves without speculation.
    dtype: auto is float32 on a CPU without native bfloat16, bfloat16 elsewhere.
    device: auto is cuda where there is one.
    num_threads: compute threads; 0 is one less than there are cores (at least 1), because a second
        busy process makes the barriers of a full set stall.
    """

    kind: Literal["torch"] = "torch"
    model: str
    draft: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    profile_cache: str | None = None


class FakeEngineConfig(_Layer):
    """The engine of tests: tokens computable by hand, acceptance as told, no model.

    step_s: seconds that a step really takes.
    """

    kind: Literal["fake"]
    tokenizer: str
    accept_prob: Annotated[float, Field(ge=0.0, le=1.0)] = 0.7
    step_s: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    fail_at_step: Annotated[int, Field(ge=0)] | None = None


class LimitsConfig(_Layer):
    """max_sequences: served at once. max_queue: waiting beyond those; more are refused.

    max_context_len: prompt and generated tokens of one request.
    max_draft_len: the most tokens drafted for a sequence in a step.
    prefill_chunk: prompt tokens read in one step, of all prompts together.
    """

    max_sequences: Annotated[int, Field(ge=1, le=1024)] = 32
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    max_context_len: Annotated[int, Field(ge=2, le=1_000_000)] = 512
    max_draft_len: Annotated[int, Field(ge=0, le=64)] = 7
    prefill_chunk: Annotated[int, Field(ge=1, le=65_536)] = 128


class ServerConfig(_Layer):
    """The whole of engine.json."""

    engine: Annotated[TorchEngineConfig | FakeEngineConfig, Field(discriminator="kind")]
    limits: LimitsConfig = LimitsConfig()
    policy: str = "goodput"

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        try:
            parse_policy(value)
        except ValueError as error:
            raise ValueError(f"must be {error}") from error
        return value


def read_config(path: Path) -> ServerConfig:
    """Read engine.json. Raises ConfigError, which names every key that is wrong."""
    try:
        return ServerConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {_describe(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _describe(error: ValidationError) -> str:
    """One clause a wrong key, such as `limits.max_queue: Input should be ... (got 0)`."""
    clauses = []
    for item in error.errors(include_url=False):
        # The discriminated union puts the engine's kind into the location: no key of the file.
        parts = [str(part) for part in item["loc"] if part not in ("torch", "fake")]
        given = "" if item["type"] == "missing" else f" (got {item['input']!r:.80})"
        clauses.append(f"{'.'.join(parts) or 'document'}: {item['msg']}{given}")
    return "; ".join(clauses)
