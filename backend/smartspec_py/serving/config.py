"""engine.json: every engine and control setting, read once and checked here.

A layer a dataclass-like frozen model; an unknown key, a wrong type or a missing model is an error
that names the key. Every default stands here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from smartspec_py.core.cost import MAX_ROWS
from smartspec_py.core.plan.planner import MAX_FIXED_DRAFT_LEN, BatchTable, parse_policy

if TYPE_CHECKING:
    from smartspec_py.serving.intake import Engine

CONFIG_NAME = "engine.json"

ENGINE_GROUP = "smartspec_py.engines"
"""Entry points of other packages that bring kinds of engine: an `EngineConfig` by its `kind`."""

DRAFT_MODEL = "draft_model"
PROMPT_LOOKUP = "prompt_lookup"
"""Names of proposers, as requests and engine.json write them."""


class ConfigError(ValueError):
    """engine.json cannot be used; the message names the file, the key and the reason."""


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EngineConfig(_Layer):
    """What engine.json says of an engine of one kind, and what makes that engine."""

    kind: str

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        """Called with this, the limits, and the folder that paths are relative to. It raises
        ConfigError, naming the key. Packages that only this kind needs are imported here."""
        raise NotImplementedError


class TorchEngineConfig(EngineConfig):
    """The PyTorch engine: any Hugging Face causal language model in a local directory.

    draft: None serves without speculation.
    dtype: auto is that of the checkpoint; on a CPU float32, but for bfloat16 that it multiplies.
    device: auto is cuda where there is one.
    num_threads: compute threads; 0 is one less than there are cores (at least 1), because a second
        busy process makes the barriers of a full set stall.
    batch_invariant: the target's logits are the same bits however many tokens share a pass, so that
        speculation changes no text in bfloat16 either. On a CPU only. Steps take longer.
    runtime: what computes the models on a CPU: auto is OpenVINO where it is installed and knows the
        model, PyTorch elsewhere. Other devices have PyTorch.
    cuda_graphs: on a GPU, short passes are padded and replayed as CUDA graphs. This project has not
        run it.
    """

    kind: Literal["torch"] = "torch"
    model: str
    draft: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    batch_invariant: bool = False
    runtime: Literal["auto", "torch", "openvino"] = "auto"
    cuda_graphs: bool = True
    profile_cache: str | None = None

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        from smartspec_py.engines.torch.build import build_torch

        return build_torch


class TrtllmEngineConfig(EngineConfig):
    """TensorRT-LLM: engines compiled by engines_build/build_engines.sh. Never run by this project.

    target, draft: engine directories; without a draft, prompts are looked up. tokenizer: a Hugging
        Face directory with the target's tokenizer and generation_config.json.
    decode_burst: tokens that a sequence is given to generate at once while it has no drafts; it
        can draft again when they are done.
    memory_fraction: of the GPU memory that is free at the start, what the weights and caches of
        both engines may take.
    cache_tokens: tokens that each engine's cache has room for; None: as many as memory_fraction
        leaves, equally many in both.
    sampled_verification: logits lets requests of temperature > 0 with `verification: rejection`
        speculate: the draft's logits go to the target. none serves them without speculation.
    charges_cached_tokens: whether the scheduler counts the whole text of a verification against
        max_num_tokens; `smartspec doctor` finds out.
    """

    kind: Literal["trtllm"]
    target: str
    draft: str | None = None
    tokenizer: str
    decode_burst: Annotated[int, Field(ge=1, le=256)] = 16
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    cache_tokens: Annotated[int | None, Field(ge=2, le=1_000_000_000)] = None
    sampled_verification: Literal["none", "logits"] = "none"
    charges_cached_tokens: bool = True
    profile_cache: str | None = None

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        from smartspec_py.engines.trtllm.build import build_trtllm

        return build_trtllm


BUILT_IN: dict[str, type[EngineConfig]] = {"torch": TorchEngineConfig, "trtllm": TrtllmEngineConfig}


def _of_its_kind(value: Any) -> Any:
    """The section `engine` as the kind that it names has it."""
    if not isinstance(value, dict):
        return value
    kind = str(value.get("kind"))
    found = BUILT_IN.get(kind)
    if found is None:
        others = entry_points(group=ENGINE_GROUP)
        if kind not in others.names:
            raise ValueError(f"kind must be one of {', '.join([*BUILT_IN, *sorted(others.names)])}")
        found = others[kind].load()
    return found.model_validate(value)


DEFAULT_CONTEXT_LEN = 512
"""Of benchmarks, and of engines whose models say nothing."""

LEAST_CHUNK = 128
"""Prompt tokens of a step, where they were not measured or no more are worth it."""

CONTEXT_LINE = "context: "
"""Begins the line of the log that says the context length; `smartspec serve` shows it."""


class LimitsConfig(_Layer):
    """max_sequences: served at once. max_queue: waiting beyond those; more are refused.

    max_context_len: prompt and generated tokens of one request; None: as many as the models, or
        compiled engines, reach and memory allows.
    max_draft_len: the most tokens drafted for a sequence in a step.
    prefill_chunk: prompt tokens read in one step, of all prompts together, for each token that the
        step is expected to give a decoding request; None: as many as the profile finds worth
        reading at once.
    max_cache_tokens: tokens of the target's cache that bound what live requests hold together,
        their draft caches included at their share; None: as many as the engine has room for.
    reuse_prefixes: whether a request takes over keys of an earlier one that begins alike.
    profile_s: time for measuring costs at a start that has none stored; each pass is timed once in
        any case.
    start_s: time that a server is given until it serves: to load its models, and profile_s.
    drain_s: time that running requests are given when the server is stopped.
    engine_timeout_s: a request that the target engine holds so long without an event, or a step
        that lasts so long, is taken for a hung engine: all requests fail and the server ends. It
        must be longer than the longest pass of target or draft.
    """

    max_sequences: Annotated[int, Field(ge=1, le=1024)] = 32
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    max_context_len: Annotated[int | None, Field(ge=2, le=1_000_000)] = None
    max_draft_len: Annotated[int, Field(ge=0, le=64)] = 7
    prefill_chunk: Annotated[int | None, Field(ge=1, le=65_536)] = None
    max_cache_tokens: Annotated[int | None, Field(ge=2, le=1_000_000_000)] = None
    reuse_prefixes: bool = True
    profile_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 120.0
    start_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 1800.0
    drain_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 20.0
    engine_timeout_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 120.0

    @property
    def context_len(self) -> int:
        """max_context_len; where it is not set, that of engines without models."""
        return self.max_context_len or DEFAULT_CONTEXT_LEN


class LookupConfig(_Layer):
    """Prompt lookup: n-grams that are searched for in prompt and output, the longest first."""

    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class BatchTableConfig(_Layer):
    """Of the policy `batch_table`, as `smartspec profile --table` writes it.

    rows: numbers of sequences in a step, ascending. draft_lens: one for each of rows.
    """

    rows: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_ROWS)], ...], Field(min_length=1, strict=False)
    ]
    draft_lens: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_FIXED_DRAFT_LEN)], ...], Field(strict=False)
    ]

    @field_validator("rows")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise(value)):
            raise ValueError(f"must ascend within 1..{MAX_ROWS}")
        return value

    @field_validator("draft_lens")
    @classmethod
    def _one_for_each(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        num_rows = len(info.data.get("rows", value))
        if len(value) != num_rows:
            raise ValueError(f"must be {num_rows} numbers, one for each of rows")
        return value

    @property
    def table(self) -> BatchTable:
        return BatchTable(self.rows, self.draft_lens)


class PlannerConfig(_Layer):
    """batch_table: of the policy of that name; None has one made from the cost profile at start."""

    batch_table: BatchTableConfig | None = None


class ServerConfig(_Layer):
    """The whole of engine.json.

    policy, proposer: of requests that name none. auto is the draft model where there is one, else
    prompt lookup.
    explain: whether clients may ask for `explain_steps`, which shows numbers of all requests.
    """

    engine: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(_of_its_kind)]
    limits: LimitsConfig = LimitsConfig()
    lookup: LookupConfig = LookupConfig()
    planner: PlannerConfig = PlannerConfig()
    policy: str = "goodput"
    proposer: Literal["auto", "draft_model", "prompt_lookup"] = "auto"
    explain: bool = False

    @field_validator("planner")
    @classmethod
    def _within_limits(cls, value: PlannerConfig, info: ValidationInfo) -> PlannerConfig:
        limits = info.data.get("limits")
        longest = max(value.batch_table.draft_lens) if value.batch_table else 0
        if limits is not None and longest > limits.max_draft_len:
            most = limits.max_draft_len
            raise ValueError(
                f"batch_table.draft_lens: {longest} is above limits.max_draft_len {most}"
            )
        return value

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
        place = ".".join(map(str, item["loc"])) or "document"
        given = "" if item["type"] == "missing" else f" (got {item['input']!r:.80})"
        clauses.append(f"{place}: {item['msg']}{given}")
    return "; ".join(clauses)
