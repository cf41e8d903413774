"""A semantic double of TensorRT-LLM's executor (`tensorrt_llm.bindings.executor`, version 1.2.1).

It stands where that module stands, with the same names, so that the adapter can be tested and the
traffic it makes can be simulated without a GPU. It doubles what the documentation and the sources
of the executor say of requests, iterations and responses:

- Requests run by iterations and finish at different times. A context step counts the whole prompt
  and its drafts against `max_num_tokens`, cached or not; a generation step counts 1. Who does not
  fit, and everyone behind, waits; who can never fit gets a response with an error.
- A request with drafts is one context step and ends after it with 1 to k+1 tokens, `is_final`, and
  the finish reason NOT_FINISHED, unless the end token or max_tokens was really reached. More drafts
  than the engine was built for are refused on enqueueing; those past `max_input_len` are dropped.
- A request without drafts generates up to max_tokens, which is cut to what `max_seq_len` leaves
  beside the drafts (without drafts: beside `max_draft_len`). With `streaming` each iteration
  responds with its token, otherwise one response brings all.
- The end token is not among the tokens.
- A cancel takes effect after the next iteration: one more response may come before the final one.
- A failure of one request is a response with `has_error()`. After `shutdown` every call raises,
  but `can_enqueue_requests`, which says False.

Tokens follow the rule of `engines.fake`. The executor is not told where the prompt ends and the
generated text begins, since every request resends all: an input whose last tokens follow the rule
for the tokens before them is taken as a text to go on with, any other as a prompt. The one prompt
in vocab_size whose own last token follows the rule is thus continued as if it were generated.

There are no threads: iterations run inside `await_responses` and take the time of a cost model.

What it cannot know: numbers (near-ties, low precision), GPU memory and evictions, the real
executor's latency, and any behaviour that its documentation leaves out. The real executor has never
been run by this project; where the two differ, the double is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import IntEnum

from smartspec_py.core.cost import CostModel
from smartspec_py.engines.clock import Clock, RealClock
from smartspec_py.engines.fake import TOKEN_STEP, token_at


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass(frozen=True)
class SamplingConfig:
    """Greedy where top_k is 1, or where neither top_k nor top_p is set."""

    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.beam_width != 1:
            raise RuntimeError("the double has no beam search")
        if self.temperature is not None and self.temperature <= 0:
            raise RuntimeError(f"temperature must be positive, got {self.temperature}")


@dataclass(frozen=True)
class OutputConfig:
    exclude_input_from_output: bool = False


@dataclass(frozen=True)
class ExternalDraftTokensConfig:
    """Drafts to verify, without logits: a draft is accepted where it equals the target's draw."""

    tokens: list[int]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RuntimeError("external draft tokens must not be empty")
        _require_plain_ints(self.tokens)


@dataclass(frozen=True)
class Request:
    """input_token_ids: everything known of the text. max_tokens: to generate beyond it."""

    input_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    client_id: int | None = None

    def __post_init__(self) -> None:
        if not self.input_token_ids or self.max_tokens < 1:
            raise RuntimeError("a request needs input tokens and max_tokens of at least 1")
        _require_plain_ints(self.input_token_ids)


def _require_plain_ints(tokens: Sequence[int]) -> None:
    """The real bindings convert no NumPy integers and no tensors."""
    if any(type(token) is not int for token in tokens):
        raise TypeError("token ids must be plain Python ints")


@dataclass(frozen=True)
class Result:
    """output_token_ids: [1][number of tokens]; finish_reasons: [1]."""

    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    decoding_iter: int
    sequence_index: int = 0

    @property
    def is_sequence_final(self) -> bool:
        return self.is_final


class Response:
    """Either a result or an error; asking for the other raises."""

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


@dataclass(frozen=True)
class EngineLimits:
    """What an engine directory is built for: the flags of `trtllm-build` of the same names.

    max_num_tokens: tokens of one iteration, all requests together.
    """

    max_batch_size: int = 16
    max_num_tokens: int = 8192
    max_input_len: int = 4096
    max_seq_len: int = 4096
    max_draft_len: int = 8
    vocab_size: int = 1000


@dataclass(eq=False)
class _Job:
    """A request inside the executor. It is waiting until its context step, then generating."""

    request_id: int
    request: Request
    drafts: list[int]
    max_tokens: int
    text_key: int
    generated: list[int] = field(default_factory=list)
    num_iterations: int = 0

    @property
    def context_len(self) -> int:
        """Tokens known before the next step."""
        return len(self.request.input_token_ids) + len(self.generated)

    @property
    def context_charge(self) -> int:
        """Tokens that the context step counts against max_num_tokens."""
        return len(self.request.input_token_ids) + len(self.drafts)


class Executor:
    """Made from an engine's limits where the real one is made from a directory.

    cost, clock: an iteration lasts `cost.target_s` of its rows and of the tokens it is charged for;
    without a cost model it takes no time.
    hold_back_prob: probability, drawn from `seed`, that an iteration passes a waiting request over
    though it would fit; less than 1.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        hold_back_prob: float = 0.0,
        seed: int = 1,
    ) -> None:
        if not 0.0 <= hold_back_prob < 1.0:
            raise ValueError(f"hold_back_prob must be in [0, 1), got {hold_back_prob}")
        self._limits = limits
        self._cost = cost
        self._clock = clock or RealClock()
        self._hold_back_prob = hold_back_prob
        self._random = random.Random(seed)
        self._next_id = 1
        self._waiting: list[_Job] = []
        self._generating: list[_Job] = []
        self._cancelled: set[int] = set()
        self._ready: list[Response] = []
        self._is_shut_down = False

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut_down

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Raises RuntimeError, and takes none of them, where one has too many drafts."""
        self._require_running()
        for request in requests:
            if len(_drafts_of(request)) > self._limits.max_draft_len:
                raise RuntimeError(
                    f"draft tokens exceed max_draft_len {self._limits.max_draft_len}"
                )
        return [self._enqueue(request) for request in requests]

    def _enqueue(self, request: Request) -> int:
        request_id = self._next_id
        self._next_id += 1
        job = self._make_job(request_id, request)
        error = self._refusal(job)
        if error is None:
            self._waiting.append(job)
        else:
            self._ready.append(Response(request_id, error, request.client_id))
        return request_id

    def _make_job(self, request_id: int, request: Request) -> _Job:
        limits, num_input = self._limits, len(request.input_token_ids)
        drafts = _drafts_of(request)
        reserve = len(drafts) or limits.max_draft_len
        return _Job(
            request_id,
            request,
            drafts[: max(limits.max_input_len - num_input, 0)],
            min(request.max_tokens, limits.max_seq_len - num_input - reserve),
            _text_key_of(request, limits.vocab_size),
        )

    def _refusal(self, job: _Job) -> str | None:
        """Why the job can never run; None where it can."""
        limits, num_input = self._limits, len(job.request.input_token_ids)
        if num_input > limits.max_input_len:
            return f"prompt of {num_input} tokens exceeds max_input_len {limits.max_input_len}"
        if job.max_tokens < 1:
            return f"no room to generate within max_seq_len {limits.max_seq_len}"
        if job.context_charge > limits.max_num_tokens:
            return f"{job.context_charge} tokens exceed max_num_tokens {limits.max_num_tokens}"
        return None

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """Iterate until there are responses or `timeout` has passed on the clock; all of them.

        At least one iteration is run where none are ready, however short the timeout. Where nothing
        can ever come, no timeout raises RuntimeError instead of blocking for good.
        """
        self._require_running()
        deadline_s = None if timeout is None else self._clock.now() + timeout.total_seconds()
        while not self._ready and (self._waiting or self._generating):
            self._iterate()
            if deadline_s is not None and self._clock.now() >= deadline_s:
                break
        if not self._ready:
            if deadline_s is None:
                raise RuntimeError("nothing is in flight: would wait for ever")
            self._clock.sleep(max(deadline_s - self._clock.now(), 0.0))
        ready, self._ready = self._ready, []
        return ready

    def get_num_responses_ready(self, id: int | None = None) -> int:
        self._require_running()
        return sum(1 for response in self._ready if id in (None, response.request_id))

    def cancel_request(self, id: int) -> None:
        """An unknown or finished request is ignored."""
        self._require_running()
        if any(job.request_id == id for job in self._waiting + self._generating):
            self._cancelled.add(id)

    def shutdown(self) -> None:
        self._require_running()
        self._is_shut_down = True

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the executor was shut down")

    def _iterate(self) -> None:
        context = self._schedule_context()
        scheduled = self._generating + context
        self._spend(scheduled, context)
        self._generating = [job for job in scheduled if not self._step(job)]
        self._end_cancelled()

    def _schedule_context(self) -> list[_Job]:
        """Take the waiting jobs that fit beside the generating ones, first come, first served."""
        num_rows = num_tokens = len(self._generating)
        scheduled: list[_Job] = []
        still_waiting: list[_Job] = []
        is_full = False
        for job in self._waiting:
            is_full = (
                is_full
                or num_rows == self._limits.max_batch_size
                or num_tokens + job.context_charge > self._limits.max_num_tokens
            )
            if is_full or self._random.random() < self._hold_back_prob:
                still_waiting.append(job)
                continue
            scheduled.append(job)
            num_rows += 1
            num_tokens += job.context_charge
        self._waiting = still_waiting
        return scheduled

    def _spend(self, scheduled: Sequence[_Job], context: Sequence[_Job]) -> None:
        if self._cost is None or not scheduled:
            return
        num_rows = len(scheduled)
        num_generating = num_rows - len(context)
        num_tokens = num_generating + sum(job.context_charge for job in context)
        context_len = sum(job.context_len for job in scheduled) / num_rows
        self._clock.sleep(self._cost.target_s(num_rows, num_tokens, context_len))

    def _step(self, job: _Job) -> bool:
        """Run one iteration of the job and respond; whether the job has ended."""
        new_tokens, finish = self._next_tokens(job)
        job.generated.extend(new_tokens)
        job.num_iterations += 1
        is_final = bool(job.drafts) or finish != FinishReason.NOT_FINISHED
        if is_final or job.request.streaming:
            self._respond(job, new_tokens, finish, is_final)
        return is_final

    def _next_tokens(self, job: _Job) -> tuple[list[int], FinishReason]:
        """One token, and with drafts one more for each that is accepted."""
        tokens: list[int] = []
        drafts = iter(job.drafts)
        while True:
            position = job.context_len + len(tokens)
            token = token_at(job.text_key, position, self._limits.vocab_size)
            if token == job.request.end_id:
                return tokens, FinishReason.END_ID
            tokens.append(token)
            if len(job.generated) + len(tokens) == job.max_tokens:
                return tokens, FinishReason.LENGTH
            if next(drafts, None) != token:
                return tokens, FinishReason.NOT_FINISHED

    def _respond(
        self, job: _Job, new_tokens: list[int], finish: FinishReason, is_final: bool
    ) -> None:
        """Streaming brings the new tokens; otherwise all, behind the input unless excluded."""
        tokens = new_tokens
        if not job.request.streaming:
            is_input_excluded = job.request.output_config.exclude_input_from_output
            tokens = ([] if is_input_excluded else job.request.input_token_ids) + job.generated
        result = Result(is_final, [list(tokens)], [finish], job.num_iterations)
        self._ready.append(Response(job.request_id, result, job.request.client_id))

    def _end_cancelled(self) -> None:
        """Jobs that did not end in the iteration after their cancel end now."""
        for job in self._generating + self._waiting:
            if job.request_id in self._cancelled:
                self._respond(job, [], FinishReason.CANCELLED, is_final=True)
        self._generating = [j for j in self._generating if j.request_id not in self._cancelled]
        self._waiting = [j for j in self._waiting if j.request_id not in self._cancelled]
        self._cancelled.clear()


def _drafts_of(request: Request) -> list[int]:
    config = request.external_draft_tokens_config
    return [] if config is None else list(config.tokens)


def _text_key_of(request: Request, vocab_size: int) -> int:
    """The key of the text that the request's input begins; see the module's docstring.

    Where the input ends with generated text, its last token tells the key, and the sum of the
    tokens before some point of that text confirms it.
    """
    tokens = request.input_token_ids
    shift = _seed_shift(request.sampling_config)
    key = tokens[-1] - TOKEN_STEP * (len(tokens) - 1)
    prefix_sum = sum(tokens)
    for position in range(len(tokens) - 1, 0, -1):
        if token_at(key, position, vocab_size) != tokens[position]:
            break
        prefix_sum -= tokens[position]
        if (prefix_sum + shift - key) % vocab_size == 0:
            return key
    return sum(tokens) + shift


def _seed_shift(sampling: SamplingConfig) -> int:
    """What the seed adds to the rule: itself where the request samples, else nothing."""
    is_greedy = sampling.top_k == 1 or (sampling.top_k is None and sampling.top_p is None)
    return 0 if is_greedy else sampling.seed or 0
