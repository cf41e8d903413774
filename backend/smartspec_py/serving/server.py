"""The server without a front: checks a request, hands it to the loop, and answers through a sink.

Triton's shell, the tests and the offline commands all enter here. Three threads meet in it: the
caller of `submit` (checks and enqueues), the loop, and the responder.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from smartspec_py.core.cost import CostModel
from smartspec_py.core.planner import parse_policy
from smartspec_py.core.types import NO_TOKEN, SamplingParams
from smartspec_py.engines.base import Proposer, Target
from smartspec_py.serving.config import LimitsConfig
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.loop import Arrival, StepLoop
from smartspec_py.serving.request import (
    ErrorCode,
    GenerateParams,
    InvalidField,
    Request,
    RequestError,
)
from smartspec_py.serving.responder import SHUTTING_DOWN, Conversation, Responder, Sink, Update
from smartspec_py.serving.text import TextStream

logger = logging.getLogger(__name__)

MAX_BYTES_PER_TOKEN = 64
"""No text has tokens that are longer on average; a prompt beyond it cannot fit."""

STOP_S = 10.0
"""Time that the loop is given for its last step when the server stops."""


@dataclass(frozen=True)
class Engine:
    """What a server runs on. end_token: the model's own end of text, or NO_TOKEN."""

    tokenizer: Tokenizer
    end_token: int
    target: Target
    proposer: Proposer | None
    cost: CostModel


class Server:
    """Serves one engine. `submit` may be called from any thread between `start` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        limits: LimitsConfig,
        policy: str,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """on_death: told once, from the loop's thread, when the loop cannot go on."""
        self._engine = engine
        self._limits = limits
        self._policy = policy
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._inbox: Inbox[Arrival] = Inbox(limits.max_queue)
        self._responder = Responder(self._inbox.cancel)
        self.loop = StepLoop(
            engine.target,
            engine.proposer,
            engine.cost,
            self._inbox,
            limits.prefill_chunk,
            self._responder.post,
        )
        self._thread = threading.Thread(target=self._run, name="smartspec-loop", daemon=True)

    def start(self) -> None:
        self._responder.start()
        self._thread.start()

    def stop(self) -> None:
        """Fail what is unfinished, end the threads, close the engines."""
        self._inbox.close(SHUTTING_DOWN)
        self._thread.join(STOP_S)
        self._responder.stop(STOP_S)
        if self._thread.is_alive():
            logger.error("the loop did not end within %.0f s; its engines stay open", STOP_S)
            return
        self._engine.target.close()
        if self._engine.proposer is not None:
            self._engine.proposer.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._inbox.is_closed

    def submit(self, params: GenerateParams, sink: Sink) -> int:
        """Enqueue a request; its answer goes to the sink. Returns its sequence number.

        Raises RequestError: INVALID_ARGUMENT names the field, the value and the range;
        UNAVAILABLE when the queue is full or the server has stopped. The sink is then not used.
        """
        prompt = self._encode(params.text)
        self._check_limits(params, prompt)
        request = self._request(params, prompt)
        conversation = Conversation(
            sequence=request.sequence,
            sink=sink,
            text=self._text_stream(params, prompt),
            seed=request.sampling.seed,
            num_input_tokens=len(prompt),
            is_streaming=params.stream,
            echo="" if params.exclude_input else params.text,
        )
        self._inbox.put(Arrival(request, conversation))
        # The responder hears of it now, to notice a client that leaves while it waits.
        self._responder.post(Update(conversation))
        return request.sequence

    def refuse(self, sink: Sink, error: RequestError) -> None:
        """Answer a request that `submit` raised for, from the responder's thread."""
        self._responder.refuse(sink, error.code, str(error))

    def cancel(self, sequence: int) -> None:
        self._inbox.cancel(sequence)

    @property
    def _max_context_len(self) -> int:
        largest = self._engine.target.capabilities.max_context_len
        return min(self._limits.max_context_len, largest)

    def _encode(self, text: str) -> list[int]:
        # Before it is tokenised: that would hold up everyone else for as long as it takes.
        num_bytes = len(text.encode())
        most = MAX_BYTES_PER_TOKEN * self._max_context_len
        if num_bytes > most:
            raise InvalidField("text_input", f"{num_bytes} bytes", f"at most {most} bytes")
        tokens: list[int] = self._engine.tokenizer.encode(text).ids
        if not tokens:
            raise InvalidField("text_input", text, "text of at least one token")
        if len(tokens) >= self._max_context_len:
            allowed = f"at most {self._max_context_len - 1} tokens, to leave room for one more"
            raise InvalidField("text_input", f"{len(tokens)} tokens", allowed)
        return tokens

    def _check_limits(self, params: GenerateParams, prompt: list[int]) -> None:
        longest = self._max_context_len
        if len(prompt) + params.max_tokens > longest:
            raise InvalidField(
                "max_tokens",
                params.max_tokens,
                f"at most {longest - len(prompt)}: text_input has {len(prompt)} tokens, "
                f"and both together may have {longest}",
            )
        vocab_size = self._engine.target.capabilities.vocab_size
        if params.end_id is not None and not NO_TOKEN <= params.end_id < vocab_size:
            raise InvalidField("end_id", params.end_id, f"in -1..{vocab_size - 1}")
        try:
            parse_policy(params.policy or self._policy)
        except ValueError as error:
            raise InvalidField("speculation_policy", params.policy, str(error)) from error

    def _request(self, params: GenerateParams, prompt: list[int]) -> Request:
        drawn = 1 + secrets.randbelow(2**64 - 1)
        sampling = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=drawn if params.seed is None else params.seed,
            end_token=self._engine.end_token if params.end_id is None else params.end_id,
        )
        return Request(
            sequence=next(self._ids),
            tokens=prompt,
            num_prompt=len(prompt),
            max_tokens=params.max_tokens,
            sampling=sampling,
            policy=params.policy or self._policy,
            max_draft_len=self._max_draft_len(params, sampling),
            stops=self._text_stream(params, prompt) if params.stop_words else None,
        )

    def _max_draft_len(self, params: GenerateParams, sampling: SamplingParams) -> int:
        """The least of all limits; 0 where the engine cannot verify this request's sampling."""
        capabilities, proposer = self._engine.target.capabilities, self._engine.proposer
        if proposer is None or not (sampling.is_greedy or capabilities.verifies_sampling):
            return 0
        limits = [
            self._limits.max_draft_len,
            capabilities.max_draft_len,
            proposer.capabilities.max_draft_len,
        ]
        if params.num_draft_tokens is not None:
            limits.append(params.num_draft_tokens)
        return min(limits)

    def _text_stream(self, params: GenerateParams, prompt: list[int]) -> TextStream:
        return TextStream(self._engine.tokenizer, prompt, params.stop_words)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            logger.exception("the step loop ended")
            self._die(f"the step loop ended: {type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        """Refuse new requests, fail those that are left, tell whoever watches."""
        self._inbox.close(reason)
        self.loop.fail_all(ErrorCode.INTERNAL, reason)
        self._on_death(reason)
