"""A fake of `tensorrt_llm.bindings.executor` 1.2.1, written from its documentation and sources.

It was never compared with the real executor; where the two differ, the fake is wrong. It has only
the classes, arguments and attributes that the adapter uses, so any other name fails in a test.

- Iterations run inside `await_responses` and take the time of a cost model. An iteration runs all
  generating requests (one token each), and waiting requests in order, as long as they fit into
  max_batch_size and max_num_tokens. A waiting request counts its whole text and its drafts.
- A request with drafts is one iteration. It ends with 1 to k + 1 tokens, and with NOT_FINISHED
  unless an end or max_tokens was reached. A request without drafts generates up to max_tokens, but
  max_seq_len less the drafts (or less max_draft_len) is the limit. With `streaming` each token is a
  response, otherwise one response has all.
- The end token is not part of the tokens; a stop word is.
- A cancel takes effect after the next iteration. The last response then has no tokens.
- A request that cannot run gets a response with an error. After `shutdown` all calls raise
  RuntimeError, except that `can_enqueue_requests` is False.
- Only the time of an iteration depends on cached tokens: a text is cached up to the last token
  that a request with the same salt has read.

Text: token t of a text is key + 7 t, modulo the vocabulary, where key is the sum of the prompt
(`fake_engine`), plus the seed of a sampled request. If it completes a bad word, it is the next one
that does not. Bias, temperature and penalties change nothing. The model's logits are 0, with a peak
on the token of the rule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_testing.clock import Clock, RealClock
from smartspec_testing.fake_engine import token_at

PEAK = 10.0
BLOCK = 32
"""Tokens of a block of the cache."""

MAX_CACHE_TOKENS = 65_536

FinishReason = IntEnum(
    "FinishReason", "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED", start=0
)
ModelType = IntEnum("ModelType", "DECODER_ONLY", start=0)
CommunicationMode = IntEnum("CommunicationMode", "LEADER ORCHESTRATOR", start=0)


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
    finish_reasons: list[Any]
    generation_logits: Any = None


@dataclass(slots=True)
class Response:
    """result: None if the request failed; error_msg: empty if it did not."""

    request_id: int
    result: Any = None
    error_msg: str = ""

    def has_error(self) -> bool:
        return bool(self.error_msg)


@dataclass(slots=True, kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None


@dataclass(slots=True, kw_only=True)
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    communication_mode: Any
    device_ids: list[int]
    orchestrator_config: OrchestratorConfig


@dataclass(slots=True, kw_only=True)
class ExecutorConfig:
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    parallel_config: ParallelConfig | None = None
    gather_generation_logits: bool = False


@dataclass(slots=True)
class KvCacheStats:
    max_num_blocks: int
    tokens_per_block: int


@dataclass(slots=True)
class IterationStats:
    kv_cache_stats: KvCacheStats


@dataclass(eq=False)
class _Job:
    """A request inside the executor. num_cached: tokens of its input that need no computation."""

    request_id: int
    request: Request
    drafts: list[int]
    max_tokens: int
    key: int
    tokens: list[int]
    num_cached: int

    @property
    def num_input(self) -> int:
        return len(self.request.input_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_input

    @property
    def num_read(self) -> int:
        """Tokens of its first iteration, cached or not."""
        return self.num_input + len(self.drafts)


class Executor:
    """cost, clock: an iteration takes `cost.target_s` of its rows and of its tokens that are not
    cached. hold_back_prob: probability that an iteration passes over a request that would fit.
    error_prob: that a request ends with an error. texts: the keys of texts, by a hash of their
    tokens; shared with an executor that generates the same texts."""

    def __init__(
        self,
        model: EngineLimits | str,
        model_type: Any = None,
        config: ExecutorConfig | None = None,
        *,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        hold_back_prob: float = 0.0,
        error_prob: float = 0.0,
        seed: int = 1,
        texts: dict[int, int] | None = None,
    ) -> None:
        self.limits = read_limits(model) if isinstance(model, str) else model
        self.config = config or ExecutorConfig(gather_generation_logits=True)
        if self.limits.max_draft_len and not self.config.kv_cache_config.enable_block_reuse:
            raise RuntimeError("external drafts need enable_block_reuse=True")
        self.texts = {} if texts is None else texts
        self._cost, self._clock = cost, clock or RealClock()
        self._hold_back_prob, self._error_prob = hold_back_prob, error_prob
        self._random = random.Random(seed)
        self._cached: set[int] = set()
        self._waiting: list[_Job] = []
        self._generating: list[_Job] = []
        self._cancelled: set[int] = set()
        self._ready: list[Response] = []
        self._num_enqueued = 0
        self._is_shut_down = False

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut_down

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        self._require_running()
        return [self._enqueue(request) for request in requests]

    def _enqueue(self, request: Request) -> int:
        self._num_enqueued += 1
        job = self._job(self._num_enqueued, request)
        if error := self._problem(job):
            self._ready.append(Response(job.request_id, error_msg=error))
        else:
            self._waiting.append(job)
        return job.request_id

    def _job(self, request_id: int, request: Request) -> _Job:
        tokens, sampling = list(request.input_token_ids), request.sampling_config
        *prefixes, text = _hashes(request.cache_salt_id, tokens)
        key = sum(tokens) + (sampling.seed or 0)
        if sampling.is_greedy:
            key = self.texts.get(text, sum(tokens))
        drafts = request.external_draft_tokens_config
        num_drafts = len(drafts.tokens) if drafts else self.limits.max_draft_len
        return _Job(
            request_id,
            request,
            list(drafts.tokens) if drafts else [],
            min(request.max_tokens, self.limits.max_seq_len - len(tokens) - num_drafts),
            key,
            tokens,
            # The last token is always computed.
            num_cached=sum(1 for prefix in prefixes if prefix in self._cached),
        )

    def _problem(self, job: _Job) -> str:
        limits = self.limits
        if len(job.drafts) > limits.max_draft_len:
            return f"{len(job.drafts)} draft tokens exceed max_draft_len {limits.max_draft_len}"
        if job.max_tokens < 1:
            return f"no room to generate within max_seq_len {limits.max_seq_len}"
        if job.num_read > limits.max_num_tokens:
            return f"{job.num_read} tokens exceed max_num_tokens {limits.max_num_tokens}"
        asks_logits = job.request.output_config.return_generation_logits
        if asks_logits and not self.config.gather_generation_logits:
            return "return_generation_logits needs gather_generation_logits=True"
        return ""

    def await_responses(self, timeout: timedelta) -> list[Response]:
        """Run iterations until there are responses or the timeout has passed, but at least one."""
        self._require_running()
        deadline_s = self._clock.now() + timeout.total_seconds()
        while not self._ready and (self._waiting or self._generating):
            self._iterate()
            if self._clock.now() >= deadline_s:
                break
        if not self._ready:
            self._clock.sleep(max(deadline_s - self._clock.now(), 0.0))
        taken, self._ready = self._ready, []
        return taken

    def cancel_request(self, request_id: int) -> None:
        """An unknown or finished request is ignored."""
        self._require_running()
        self._cancelled.add(request_id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """One, of the last iteration."""
        num_tokens = self.config.kv_cache_config.max_tokens or MAX_CACHE_TOKENS
        return [IterationStats(KvCacheStats(num_tokens // BLOCK, BLOCK))]

    def shutdown(self) -> None:
        self._require_running()
        self._is_shut_down = True

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the executor was shut down")

    @property
    def num_held(self) -> int:
        """Not of the bindings, for tests: requests inside the executor."""
        return len(self._waiting) + len(self._generating)

    def _iterate(self) -> None:
        started = self._started()
        self._waiting = [job for job in self._waiting if job not in started]
        jobs = [*self._generating, *started]
        if self._cost is not None and jobs:
            num_tokens = len(self._generating) + sum(j.num_read - j.num_cached for j in started)
            context_len = sum(len(job.tokens) for job in jobs) / len(jobs)
            self._clock.sleep(self._cost.target_s(len(jobs), num_tokens, context_len))
        self._generating = [job for job in jobs if self._step(job)]
        for job in [*self._generating, *self._waiting]:
            if job.request_id in self._cancelled:
                self._end(job)
                result = Result(True, [[]], [FinishReason.CANCELLED])
                self._ready.append(Response(job.request_id, result))
        self._cancelled.clear()

    def _started(self) -> list[_Job]:
        """The waiting requests that run now. The first that does not fit holds up all others."""
        started: list[_Job] = []
        limits, num_tokens = self.limits, len(self._generating)
        for job in self._waiting:
            num_rows = len(self._generating) + len(started)
            if (
                num_rows == limits.max_batch_size
                or num_tokens + job.num_read > limits.max_num_tokens
            ):
                break
            if self._random.random() >= self._hold_back_prob:
                num_tokens += job.num_read
                started.append(job)
        return started

    def _step(self, job: _Job) -> bool:
        """Draw the tokens of one iteration, and respond. Returns whether the job goes on."""
        if not job.num_generated and self._random.random() < self._error_prob:
            self._ready.append(Response(job.request_id, error_msg="failed, because of error_prob"))
            return False
        num_before = len(job.tokens)
        finish = self._draw_step(job)
        is_final = bool(job.drafts) or finish != FinishReason.NOT_FINISHED
        if is_final or job.request.streaming:
            start = num_before if job.request.streaming else job.num_input
            result = Result(is_final, [job.tokens[start:]], [finish])
            if job.request.output_config.return_generation_logits:
                result.generation_logits = self._logits(job, start)
            self._ready.append(Response(job.request_id, result))
        if is_final:
            self._end(job)
        return not is_final

    def _end(self, job: _Job) -> None:
        self._generating = [other for other in self._generating if other is not job]
        self._waiting = [other for other in self._waiting if other is not job]
        texts = list(_hashes(job.request.cache_salt_id, job.tokens))
        self._cached.update(texts[:-1])
        if job.request.sampling_config.is_greedy:
            self.texts.update(dict.fromkeys(texts[job.num_input :], job.key))

    def _draw_step(self, job: _Job) -> FinishReason:
        """Append one token, and with drafts one more for each that is accepted."""
        request, first = job.request, len(job.tokens)
        while True:
            token = self._draw(job)
            if token == request.end_id:
                return FinishReason.END_ID
            job.tokens.append(token)
            if any(job.tokens[-len(word) :] == word for word in request.stop_words or ()):
                return FinishReason.STOP_WORDS
            if job.num_generated == job.max_tokens:
                return FinishReason.LENGTH
            index = len(job.tokens) - first - 1
            if job.drafts[index : index + 1] != [token]:
                return FinishReason.NOT_FINISHED

    def _rule(self, job: _Job, position: int) -> int:
        return token_at(job.key, position, self.limits.vocab_size)

    def _draw(self, job: _Job) -> int:
        """The token of the rule, or the next one after it that completes no bad word."""
        token = self._rule(job, len(job.tokens))
        while any(
            [*job.tokens, token][-len(word) :] == word for word in job.request.bad_words or ()
        ):
            token = (token + 1) % self.limits.vocab_size
        return token

    def _logits(self, job: _Job, start: int) -> Any:
        """A tensor [1, tokens, vocabulary], or [tokens, 1, vocabulary] with streaming."""
        import torch

        made = torch.zeros(1, len(job.tokens) - start, self.limits.vocab_size)
        for position in range(start, len(job.tokens)):
            made[0, position - start, self._rule(job, position)] = PEAK
        return made.transpose(0, 1) if job.request.streaming else made


class DraftExecutor(Executor):
    """The executor of a draft engine. accept_prob: probability that a token is the target's; other
    tokens are replaced by the next one. texts: `Executor.texts` of the target."""

    def __init__(self, *args: Any, accept_prob: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._accept_prob = accept_prob

    def _draw(self, job: _Job) -> int:
        is_right = self._random.random() < self._accept_prob
        return (self._rule(job, len(job.tokens)) + (not is_right)) % self.limits.vocab_size


def fake_bindings(**options: Any) -> Any:
    """The fake as a module, whose executors have these options."""

    class OptionsExecutor(Executor):
        def __init__(self, model: str, model_type: Any, config: ExecutorConfig) -> None:
            super().__init__(model, model_type, config, **options)

    names = {name: value for name, value in globals().items() if not name.startswith("_")}
    return SimpleNamespace(**names | {"Executor": OptionsExecutor})


def _hashes(salt: int | None, tokens: Sequence[int]) -> Iterator[int]:
    """A hash of each prefix of the text, from one token on."""
    found = hash((salt,))
    for token in tokens:
        found = hash((found, token))
        yield found
