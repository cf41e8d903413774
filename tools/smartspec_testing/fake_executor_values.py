"""Requests, configurations and results of `fake_executor`, by TensorRT-LLM's names. Never compared
with the real ones.

They have only the arguments and attributes that the adapter uses: another name raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class ModelType(IntEnum):
    DECODER_ONLY = 0


class CommunicationMode(IntEnum):
    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for, by the names of trtllm-build. Not of the bindings."""

    max_batch_size: int = 16
    max_num_tokens: int = 8192
    max_seq_len: int = 4096
    max_draft_len: int = 8
    vocab_size: int = 1000


def read_limits(folder: str) -> EngineLimits:
    document = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    build = document["build_config"]
    names = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_draft_len")
    vocab_size = document["pretrained_config"]["vocab_size"]
    return EngineLimits(vocab_size=vocab_size, **{name: build[name] for name in names})


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """Greedy if top_k is 1, or if neither top_k nor top_p is set."""

    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1 or (self.top_k is None and self.top_p is None)

    @property
    def has_penalties(self) -> bool:
        others = self.presence_penalty or self.frequency_penalty
        return bool(others) or self.repetition_penalty not in (None, 1.0)


@dataclass(slots=True)
class OutputConfig:
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False


@dataclass(slots=True)
class ExternalDraftTokensConfig:
    tokens: list[int]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RuntimeError("external draft tokens must not be empty")
        _require_plain_ints(self.tokens)


@dataclass(slots=True)
class Request:
    """input_token_ids: the whole text so far. max_tokens: to generate after it."""

    input_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: Any = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    cache_salt_id: int | None = None

    def __post_init__(self) -> None:
        if not self.input_token_ids or self.max_tokens < 1:
            raise RuntimeError("a request needs input tokens and max_tokens of at least 1")
        for tokens in (self.input_token_ids, *(self.bad_words or ()), *(self.stop_words or ())):
            _require_plain_ints(tokens)
        self.input_token_ids = list(self.input_token_ids)  # the bindings copy their arguments


def _require_plain_ints(tokens: Sequence[int]) -> None:
    """The real bindings convert no NumPy integers and no tensors."""
    if any(type(token) is not int for token in tokens):
        raise TypeError("token ids must be plain Python ints")


@dataclass(slots=True)
class Result:
    """output_token_ids: [1][tokens], without the prompt. generation_logits: see `Executor`."""

    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    generation_logits: Any = None


class Response:
    """Has a result or an error; reading the other one raises."""

    __slots__ = ("_outcome", "request_id")

    def __init__(self, request_id: int, outcome: Result | str) -> None:
        self.request_id = request_id
        self._outcome = outcome

    def has_error(self) -> bool:
        return isinstance(self._outcome, str)

    @property
    def result(self) -> Result:
        if isinstance(self._outcome, str):
            raise RuntimeError("the response has an error and no result")
        return self._outcome

    @property
    def error_msg(self) -> str:
        if isinstance(self._outcome, Result):
            raise RuntimeError("the response has a result and no error")
        return self._outcome


@dataclass(slots=True, kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None


@dataclass(slots=True)
class ExtendedRuntimePerfKnobConfig:
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: int = 0


@dataclass(slots=True, kw_only=True)
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    communication_mode: CommunicationMode
    device_ids: list[int]
    orchestrator_config: OrchestratorConfig


@dataclass(slots=True, kw_only=True)
class ExecutorConfig:
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig | None = None
    gather_generation_logits: bool = False


@dataclass(slots=True)
class KvCacheStats:
    max_num_blocks: int
    tokens_per_block: int


@dataclass(slots=True)
class InflightBatchingStats:
    num_context_requests: int


@dataclass(slots=True)
class IterationStats:
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
