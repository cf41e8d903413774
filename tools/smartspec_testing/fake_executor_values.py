"""What the executor's fake is asked and what it answers; see `smartspec_testing.fake_executor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, ClassVar

from smartspec_testing.fake_executor_plain import plain_class, plain_enum

RequestType: Any = plain_enum("RequestType")
DEFAULT_PRIORITY = 0.5


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass
class SamplingConfig:
    """Greedy where top_k is 1, or where neither top_k nor top_p is set."""

    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        if self.beam_width != 1:
            raise RuntimeError(f"beam_width must be 1 (the fake has no beams): {self.beam_width}")
        if self.temperature is not None and self.temperature <= 0:
            raise RuntimeError(f"temperature must be positive, got {self.temperature}")

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1 or (self.top_k is None and self.top_p is None)


@dataclass
class OutputConfig:
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[Any] | None = None


@dataclass(frozen=True)
class ExternalDraftTokensConfig:
    """Drafts to verify. logits: [len(tokens), vocab_size], by which they were drawn."""

    tokens: list[int]
    logits: Any = None
    acceptance_threshold: float | None = None
    fast_logits: bool | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RuntimeError("external draft tokens must not be empty")
        _require_plain_ints(self.tokens)
        if self.fast_logits:
            raise RuntimeError("fast_logits needs the orchestrator mode, which is not doubled")
        if self.logits is not None:
            self._check_logits(tuple(self.logits.shape))
        threshold = self.acceptance_threshold
        if threshold is not None and not 0.0 < threshold <= 1.0:
            raise RuntimeError(f"acceptance_threshold must be in (0, 1], got {threshold}")

    def _check_logits(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[0] != len(self.tokens):
            raise RuntimeError(f"logits must be [{len(self.tokens)}, vocab_size], got {shape}")


@dataclass
class Request:
    """input_token_ids: everything known of the text. max_tokens: to generate beyond it."""

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"
    input_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    position_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: Any = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    prompt_tuning_config: Any = None
    multimodal_input: Any = None
    multimodal_embedding: Any = None
    mrope_config: Any = None
    lora_config: Any = None
    lookahead_config: Any = None
    kv_cache_retention_config: Any = None
    logits_post_processor_name: str | None = None
    logits_post_processor: Callable[..., None] | None = None
    encoder_input_token_ids: list[int] | None = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = DEFAULT_PRIORITY
    type: InitVar[Any] = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    request_type: Any = field(init=False, default=None)
    context_phase_params: Any = None
    encoder_input_features: Any = None
    encoder_output_length: int | None = None
    cross_attention_mask: Any = None
    num_return_sequences: int = 1
    eagle_config: Any = None
    skip_cross_attn_blocks: Any = None
    guided_decoding_params: Any = None
    language_adapter_uid: int | None = None
    allotted_time_ms: timedelta | None = None
    cache_salt_id: int | None = None

    def __post_init__(self, type: Any) -> None:
        self.request_type = type
        if not self.input_token_ids or self.max_tokens < 1:
            raise RuntimeError("a request needs input tokens and max_tokens of at least 1")
        _require_plain_ints(self.input_token_ids)
        self.input_token_ids = list(self.input_token_ids)  # the bindings copy what they are given
        for word in (*(self.bad_words or ()), *(self.stop_words or ())):
            _require_plain_ints(word)
        if not 0.0 <= self.priority <= 1.0:
            raise RuntimeError(f"priority must be in [0, 1], got {self.priority}")

    @property
    def drafts(self) -> list[int]:
        """Not of the bindings: the drafts, or none."""
        config = self.external_draft_tokens_config
        return [] if config is None else list(config.tokens)


def _require_plain_ints(tokens: Sequence[int]) -> None:
    """The real bindings convert no NumPy integers and no tensors."""
    if any(type(token) is not int for token in tokens):
        raise TypeError("token ids must be plain Python ints")


NEUTRAL = {
    "no_repeat_ngram_size": (None, 0),
    "num_return_sequences": (None, 1),
}
"""Values with which a field leaves the text as it is; for other fields that is None alone."""

_UNDOUBLED = (
    "position_ids",
    "prompt_tuning_config",
    "multimodal_input",
    "multimodal_embedding",
    "mrope_config",
    "lora_config",
    "lookahead_config",
    "logits_post_processor_name",
    "encoder_input_token_ids",
    "context_phase_params",
    "encoder_input_features",
    "cross_attention_mask",
    "num_return_sequences",
    "eagle_config",
    "skip_cross_attn_blocks",
    "guided_decoding_params",
    "language_adapter_uid",
    "allotted_time_ms",
)
_UNDOUBLED_SAMPLING = (*NEUTRAL, "beam_width_array")


def undoubled_field(request: Request) -> str | None:
    """A field that would change the text and that the fake does not act on; None if none is set.

    temperature, top_p and the like are not among them: of a text that is sampled, the rule says
    only that the seed tells it from others.
    """
    for owner, names in ((request, _UNDOUBLED), (request.sampling_config, _UNDOUBLED_SAMPLING)):
        for name in names:
            if getattr(owner, name) not in NEUTRAL.get(name, (None,)):
                return name
    return None


@dataclass
class Result:
    """output_token_ids: [1][number of tokens]; finish_reasons: [1]. log_probs: as the former.

    generation_logits: [1, number of tokens, vocab_size]; with streaming [number, 1, vocab_size].
    """

    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    decoding_iter: int
    sequence_index: int = 0
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    context_logits: Any = None
    generation_logits: Any = None
    spec_dec_fast_logits_info: Any = None
    encoder_output: Any = None
    context_phase_params: Any = None
    request_perf_metrics: Any = None
    additional_outputs: list[Any] = field(default_factory=list)
    is_sequence_final: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_sequence_final = self.is_final


class Response:
    """Either a result or an error; asking for the other raises."""

    request_id: int
    client_id: int | None

    def __init__(self, request_id: int, outcome: Result | str, client_id: int | None) -> None:
        self.request_id = request_id
        self.client_id = client_id
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

    def clear_context_logits(self) -> None:
        self.result.context_logits = None

    def clear_generation_logits(self) -> None:
        self.result.generation_logits = None


ExecutorConfig: Any = plain_class("ExecutorConfig")
