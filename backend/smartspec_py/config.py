"""engine.json: every engine and control setting, read once and checked here.

Each section is a frozen model. An unknown key, a wrong type or a missing model is an error that
names the key. All defaults are defined here. The text below a key is its meaning, also in
docs/reference/engine-json.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
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

from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.constants import DEFAULT_CONTEXT_LEN
from smartspec_py.core.plan.planner import BatchTable, parse_policy
from smartspec_py.faults import ConfigError, cut, shown

if TYPE_CHECKING:
    from smartspec_py.engines.engine import Engine

CONFIG_NAME = "engine.json"

ENGINE_GROUP = "smartspec_py.engines"
"""Entry point group for engine kinds of other packages: an `EngineConfig` class by its `kind`."""


class _Layer(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


IS_PATH = "path"
"""Annotation of a key of `engine` whose value is a path, relative to the folder of engine.json, or
whose values by name are paths."""

IS_MODEL = "model"
"""Annotation of a path that may also be a name of the Hugging Face hub. The launcher fetches it
(`smartspec_launch.models`); the backend gets paths."""

LocalPath = Annotated[str, IS_PATH]
OptionalPath = Annotated[str | None, IS_PATH]
ModelPath = Annotated[str, IS_PATH, IS_MODEL]
OptionalModel = Annotated[str | None, IS_PATH, IS_MODEL]

MAX_ADAPTERS = 16
MAX_NAME = 256
"""Characters of a name of the model."""

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class EngineConfig(_Layer):
    """The section `engine` of engine.json for one kind of engine, and the engine's builder."""

    kind: str

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        """The function that builds the engine. Imports packages that only this kind needs. Kinds
        of other packages override it. Those of this package are in `serving.build`, because their
        engines import this module.

        Its arguments are this config, the limits, and the folder that paths are relative to. It
        raises ConfigError, which names the key.
        """
        raise NotImplementedError

    def paths(self, mark: str = IS_PATH) -> dict[str, str]:
        """The values of all keys with this annotation, without those that are not set. Those of a
        key with paths by name are called KEY.NAME."""
        found: dict[str, str] = {}
        for key, field in type(self).model_fields.items():
            value = getattr(self, key) if mark in field.metadata else None
            if isinstance(value, dict):
                found |= {f"{key}.{name}": path for name, path in value.items()}
            elif value:
                found[key] = value
        return found

    def with_paths(self, paths: Mapping[str, str]) -> Self:
        """A copy with these paths, which are called as in `paths`."""
        changes: dict[str, Any] = {}
        for called, path in paths.items():
            key, _, name = called.partition(".")
            changes[key] = {**changes.get(key, getattr(self, key)), name: path} if name else path
        return self.model_copy(update=changes)


class LocalEngineConfig(EngineConfig):
    """The local engine: a Hugging Face causal language model, which PyTorch or OpenVINO computes.
    Models, heads and adapters are paths, or names of the Hugging Face hub."""

    kind: Literal["local"] = "local"
    """the kind of engine."""
    model: ModelPath
    """directory or GGUF file of the target model, or its name on the hub: OWNER/NAME, with
    @REVISION, and with :Q4_K_M for a GGUF file of this quantisation."""
    draft: OptionalModel = None
    """the same for the draft model. Without one, drafts come from heads and prompt lookup."""
    heads: OptionalModel = None
    """directory or hub name of Medusa heads, an EAGLE-3 head, or an assistant of Gemma 4, that
    were trained for the target model. Only Medusa heads can be combined with a draft model."""
    mtp: bool = True
    """draft with the layer for it (multi-token prediction) that files of Qwen3.5 have, unless there
    are a draft model or heads. It is used as `heads`, and needs OpenVINO."""
    lora: Annotated[dict[str, str], IS_PATH, IS_MODEL, Field(max_length=MAX_ADAPTERS)] = {}
    """LoRA adapters of the target: directories in PEFT's format or hub names, by the names that
    requests use. Their ranks together are at most 512. Drafts are those of the target without
    them."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type of the computation. auto uses the checkpoint's type. On a CPU, auto uses float32, or
    bfloat16 if the processor multiplies bfloat16. OpenVINO computes in float32 if the processor
    lacks the configured type, with weights of 8 or 4 bits if it has AMX, and for models with
    experts."""
    weights: Literal["auto", "stored", "int8", "int4", "fp8"] = "auto"
    """type of the weights. stored keeps them in the type of their files. int8 rounds each row to 8
    bits, int4 each group of 32 to 128 numbers to 4. Both need OpenVINO, and round activations too:
    with VNNI, and without it int8 of large models. fp8 rounds each row, and the activations of each
    token, to 8-bit floating point on a GPU. auto is int8 if OpenVINO computes a model of 100
    million parameters or more: texts change a little, and a pass takes about half the time. int4,
    and auto on a processor with VNNI, keep matrices that a checkpoint of GPTQ, AWQ or
    compressed-tensors has in 4 bits, in adjacent groups of 64 or 128. With any processor, auto and
    int4 use the 4 bits of experts, in adjacent groups of any size, also of GGUF's Q4_0, Q4_1 and
    Q4_K, and those of MXFP4 as whole numbers of 8 bits. With VNNI, auto is int4 for a draft model
    of 300 million parameters or more whose target has int8: no text depends on it."""
    weights_cache_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 64_000_000_000
    """bytes on the disk, of all models together, for weights that were converted to 8 or 4 bits, so
    that the next start only maps them into memory. They are in the folder `weights` of the user's
    cache directory, and are removed if the model's files change or go. 0 keeps none."""
    kv_cache: Literal["auto", "u8"] = "auto"
    """type of the KV cache. auto keeps keys and values in the dtype, but PyTorch on a CPU in
    float32, and OpenVINO in 16 bits beside weights of 8 or 4 bits: in bfloat16 if the processor
    multiplies it, else in float16. u8 rounds them to 8 bits, each head of a token with one scale,
    for target, draft model and EAGLE-3 head. It takes about half the memory of 16 bits, and changes
    texts a little. It needs OpenVINO."""
    device: str = "auto"
    """cpu, cuda or cuda:N. auto uses CUDA if there is a GPU."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """number of compute threads. 0 uses all cores up to 4, and one less than all if there are
    more. A container's CPU limit counts."""
    runtime: Literal["auto", "torch", "openvino"] = "auto"
    """what computes the models on a CPU. auto uses OpenVINO if it is installed and supports the
    model, else PyTorch. Other devices always use PyTorch."""
    cuda_graphs: bool = True
    """on a GPU, pad passes and replay them as CUDA graphs."""
    profile_cache: OptionalPath = None
    """directory of measured step costs. null measures them at every start."""

    @field_validator("lora")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not ADAPTER_NAME.fullmatch(name) or name == MODEL_NAME:
                raise ValueError(
                    f"the name {shown(name)} must be 1 to 64 letters, digits, dots, - and _, begin "
                    f"with a letter or digit, and not be {MODEL_NAME}"
                )
        return value


class TrtllmEngineConfig(EngineConfig):
    """TensorRT-LLM engines, compiled by engines_build/build_engines.sh. Never run by this
    project."""

    kind: Literal["trtllm"]
    """the kind of engine."""
    target: LocalPath
    """engine directory of the target model."""
    draft: OptionalPath = None
    """engine directory of the draft model. Without one, drafts come from prompt lookup."""
    tokenizer: ModelPath
    """directory with the target's tokenizer and generation_config.json, or its name on the Hugging
    Face hub."""
    decode_burst: Annotated[int, Field(ge=1, le=256)] = 16
    """tokens that a sequence without drafts generates in one engine request. It can draft again
    after them. More tokens cost less time without drafts, and delay decisions."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """share of the free GPU memory, at the start, for the weights and KV caches of both engines."""
    cache_tokens: Annotated[int | None, Field(ge=2, le=1_000_000_000)] = None
    """capacity of each engine's KV cache in tokens. null divides the memory of memory_fraction so
    that both caches have the same capacity."""
    log_probs: bool = True
    """whether requests may set `return_log_probs`. The target then keeps room for logits on the
    GPU: 8 x max_batch_size x vocabulary, in the type of its logits. Targets with several ranks
    refuse such requests."""
    profile_cache: OptionalPath = None
    """directory of measured step costs. null measures them at every start."""


BUILT_IN: dict[str, type[EngineConfig]] = {"local": LocalEngineConfig, "trtllm": TrtllmEngineConfig}


def _of_its_kind(value: Any) -> Any:
    """The section `engine`, validated with the class of its kind."""
    if not isinstance(value, dict):
        return value
    kind = str(value.get("kind", LocalEngineConfig.model_fields["kind"].default))
    config_class = BUILT_IN.get(kind)
    if config_class is None:
        others = entry_points(group=ENGINE_GROUP)
        if kind not in others.names:
            kinds = ", ".join([*BUILT_IN, *sorted(others.names)])
            raise ValueError(f"kind must be one of {kinds}")
        config_class = others[kind].load()
    return config_class.model_validate(value)


class LimitsConfig(_Layer):
    """What the server may use, and how long things may take."""

    max_sequences: Annotated[int, Field(ge=1, le=1024)] = 32
    """requests served at once; fewer if recurrent states of so many would take too much memory."""
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """requests that may wait beyond those. More are refused."""
    max_context_len: Annotated[int | None, Field(ge=2, le=1_000_000)] = None
    """prompt and generated tokens of one request. null uses what the models (or compiled engines)
    support and memory allows."""
    max_draft_len: Annotated[int, Field(ge=0, le=64)] = 7
    """largest draft length; of a tree of drafts, its longest path."""
    prefill_chunk: Annotated[int | None, Field(ge=1, le=65_536)] = None
    """prompt tokens that one step reads, of all prompts together. null uses the size that the
    profile finds best. The TensorRT-LLM engine reads whole prompts, at least one per step; null is
    the longest prompt."""
    cache_bytes: Annotated[int | None, Field(ge=1, le=1 << 50)] = None
    """memory for the KV caches of target and draft model together. null is half of the memory that
    the weights leave free. Compiled engines have `engine.memory_fraction` instead."""
    max_cache_tokens: Annotated[int | None, Field(ge=2, le=1_000_000_000)] = None
    """bound on the tokens in the target's KV cache of all running requests. The draft model's
    caches count with their share. null uses the engine's capacity."""
    reuse_prefixes: bool = True
    """reuse the cached prefix of an earlier request that begins the same."""
    profile_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 5.0
    """time for measuring step costs at a start without a stored profile. After it, only passes that
    the plan needs most are still measured; the others are inferred."""
    start_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 1800.0
    """time for the whole start: loading models and measuring costs."""
    drain_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 20.0
    """time that running requests get to finish when the server stops."""
    engine_timeout_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 120.0
    """if the engine reports nothing of a request for this long, or a step takes this long, the
    engine is considered hung: all requests fail and the server ends. Must be longer than the
    longest pass of target or draft."""
    hang_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 60.0
    """if a process of the server makes no progress for this long, it is considered hung and the
    server ends. A process that has ended is noticed at once."""

    @property
    def context_len(self) -> int:
        """max_context_len, or DEFAULT_CONTEXT_LEN if it is not set."""
        return self.max_context_len or DEFAULT_CONTEXT_LEN


class LookupConfig(_Layer):
    """Prompt lookup: drafts what followed the same n-gram in prompt and output."""

    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    """longest n-gram that is searched for. The longest match wins."""
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 2
    """shortest n-gram that is searched for."""
    history_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """tokens that are kept of what requests of the same tenant and adapter have generated, for
    drafts; the oldest are overwritten. 0 keeps none. Each takes 20 to 24 bytes, for up to 16 pairs
    of tenant and adapter."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class PlannerConfig(_Layer):
    """The table of the policy `batch_table`."""

    model_config = ConfigDict(strict=False)  # JSON's lists become tuples
    batch_table: BatchTable | None = None
    """for the policy of that name, with the lists `rows` (batch sizes, ascending from 1 or more)
    and `draft_lens` (a draft length for each of rows). `smartspec profile --table` writes it. null
    makes one from the profile at the start."""


class ServerConfig(_Layer):
    """The sections of engine.json, and the defaults of requests."""

    engine: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(_of_its_kind)]
    """the models and what computes them."""
    limits: LimitsConfig = LimitsConfig()
    """sizes and times."""
    lookup: LookupConfig = LookupConfig()
    """prompt lookup."""
    planner: PlannerConfig = PlannerConfig()
    """the table of the policy `batch_table`."""
    served_model_name: Annotated[list[str], Field(max_length=MAX_ADAPTERS)] = []
    """names of the model for clients of all APIs; metrics and reports have the first one. Without
    any, it is that of the model's folder or GGUF file, or its name on the hub. `smartspec` is
    accepted too."""
    policy: str = "goodput"
    """policy of requests that name none."""
    proposer: Literal["auto", "draft_model", "heads", "prompt_lookup"] = "auto"
    """proposer of requests that name none. auto chooses at each step among all that the server has.
    """
    explain: bool = False
    """allow clients to ask for `explain_steps`. It shows numbers of all requests. The server then
    also writes each step as JSON."""

    @field_validator("served_model_name")
    @classmethod
    def _usable_names(cls, value: list[str], info: ValidationInfo) -> list[str]:
        adapters = getattr(info.data.get("engine"), "lora", ())
        for name in value:
            if not name.isprintable() or not 1 <= len(name) <= MAX_NAME or name in adapters:
                raise ValueError(
                    f"the name {shown(name)} must be 1 to {MAX_NAME} printable characters, and not "
                    "in engine.lora"
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
        return ServerConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {_describe(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _describe(error: ValidationError) -> str:
    """One clause per wrong key, such as `limits.max_queue: Input should be ... (got 0)`."""
    clauses = []
    for item in error.errors(include_url=False):
        place = ".".join(map(cut, item["loc"])) or "document"
        if item["type"] == "missing":
            clauses.append(f"{place}: this key is required")
        elif item["type"] == "extra_forbidden":
            clauses.append(f"{place}: unknown key{_similar(place)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            clauses.append(f"{place}: {message} (got {shown(item['input'])})")
    return "; ".join(clauses)


def _similar(place: str) -> str:
    """The valid keys, of any section, whose names are most like that of the wrong key."""
    models: list[tuple[str, type[_Layer]]] = [("engine.", kind) for kind in BUILT_IN.values()]
    models += [("limits.", LimitsConfig), ("lookup.", LookupConfig), ("", ServerConfig)]
    places = {name: section + name for section, model in models for name in model.model_fields}
    by_name = {name: known for name, known in places.items() if known != place}
    close = get_close_matches(place.rpartition(".")[2][:64], by_name, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(by_name[name] for name in close)}?" if close else ""
