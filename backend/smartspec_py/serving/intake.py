"""Converts a client's parameters to a request for the loop, with the checks that need the model.

`codec` has already checked each field by itself. This module tokenizes text, checks lengths against
the limits, sets defaults, and rejects parameters that the engine does not support.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from smartspec_py.api.inputs import (
    FIELDS,
    MAX_ANSWER_VALUES,
    MAX_WORDS_BYTES,
    GenerateParams,
)
from smartspec_py.constants import GRAMMAR, GUIDE_FIELD
from smartspec_py.core.plan.planner import parse_policy
from smartspec_py.core.types import NO_TOKEN, GuideType, SamplingParams
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.messages import Reply, ResponseState, Sink
from smartspec_py.serving.request import FieldError, InvalidField, Request
from smartspec_py.serving.text import TextStream, special_tokens

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig

MAX_BYTES_PER_TOKEN = 64
"""Upper bound on the mean length of a prompt's tokens. A longer prompt cannot fit."""

TEMPERATURE_EDGES = (0.35, 0.75, 1.0, 1.5)
"""Requests in the same temperature range are expected to have similar acceptance."""

_DEFAULT_PARAMS = GenerateParams(text="", max_tokens=1)


def cache_budget(engine: Engine, limits: LimitsConfig) -> CacheBudget:
    """The cache budget: a full context in all rows of target and draft, or a lower limit."""
    target = engine.target.capabilities
    rows_full = target.max_sequences * _context_len(engine, limits)
    of_draft = max((p.capabilities.bytes_per_token for p in engine.proposers.values()), default=0)
    most = [n for n in (limits.max_cache_tokens, target.max_cache_tokens) if n is not None]
    per_token = target.bytes_per_token
    # Without a token size, a limit in tokens has no effect.
    sizes = [n * per_token for n in most if per_token]
    sizes += [] if target.cache_bytes is None else [target.cache_bytes]
    capacity = min(sizes, default=rows_full * (per_token + of_draft))
    return CacheBudget(capacity, per_token, of_draft, target.block_len)


def _context_len(engine: Engine, limits: LimitsConfig) -> int:
    longest = engine.target.capabilities.max_context_len
    return longest if limits.max_context_len is None else min(limits.max_context_len, longest)


class Intake:
    """Creates requests. Runs in the thread that calls `Server.submit`."""

    def __init__(
        self,
        engine: Engine,
        limits: LimitsConfig,
        policy: str,
        proposer: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """policy, proposer: of requests that name none. auto is the engine's first proposer, and
        lets the planner choose another one at each step."""
        self._engine = engine
        self._limits = limits
        self._policy = policy
        self._proposers = [
            name for name in engine.proposers if proposer in ("auto", name) or name == GRAMMAR
        ]
        self._clock = clock
        self._ids = itertools.count(1)
        budget, longest = cache_budget(engine, limits), _context_len(engine, limits)
        in_cache = longest
        if budget.target_bytes:
            in_cache = budget.capacity // budget.target_bytes
            in_cache -= in_cache % budget.block_len
        self.max_context_len = min(longest, in_cache)
        """Most prompt and generated tokens of one request, limited by row length and the cache."""

    def receive(self, params: GenerateParams, sink: Sink) -> tuple[Request, ResponseState]:
        """Check the parameters and create the request, for the loop and for the responder. It has
        no grammar yet.

        Raises RequestError, which names the field, the value and the range.
        """
        arrival_s = self._clock()
        self._check_supported(params)
        prompt = self._prompt(params)
        self._check_limits(params, prompt)
        self._check_guide(params)
        sampling = self._sampling(params)
        proposers, no_speculation = self._usable_proposers(params, sampling)
        request = Request(
            sequence=next(self._ids),
            tokens=prompt,
            num_prompt=len(prompt),
            max_tokens=params.max_tokens,
            sampling=sampling,
            policy=params.policy or self._policy,
            max_draft_len=self._max_draft_len(params, proposers),
            adapter=params.adapter or "",
            tenant=params.tenant,
            proposers=proposers,
            slo_s_per_token=None if params.tpot_slo_ms is None else params.tpot_slo_ms / 1e3,
            acceptance_group=_acceptance_group(params, sampling),
            reuses_prefix=params.reuse_prefix and not params.prompt_log_probs,
            priority=params.priority,
            arrival_s=arrival_s,
            deadline_s=None if params.deadline_ms is None else arrival_s + params.deadline_ms / 1e3,
        )
        text = TextStream(self._engine.tokenizer, prompt, params.stop_words, params.min_tokens)
        common = Reply(
            params,
            seed=sampling.seed,
            num_input_tokens=len(prompt),
            no_speculation=no_speculation,
        )
        state = ResponseState(
            request.sequence, sink, text, common, max_draft_len=request.max_draft_len
        )
        return request, state

    def _check_supported(self, params: GenerateParams) -> None:
        for name in sorted(self._engine.target.capabilities.unsupported):
            value = getattr(params, FIELDS[name])
            if value != getattr(_DEFAULT_PARAMS, FIELDS[name]):
                raise InvalidField(name, value, "left out: this engine does not support it")
        names = self._engine.target.capabilities.adapters
        if params.adapter is not None and params.adapter not in names:
            allowed = " or ".join(names) or "left out: this server has no LoRA adapters"
            raise InvalidField("lora_name", params.adapter, allowed)

    def _prompt(self, params: GenerateParams) -> list[int]:
        """The tokens of the prompt, at least one."""
        if params.prompt_ids:
            field, tokens = "input_ids", list(params.prompt_ids)
            if params.text:
                rule = "must be left out with text_input"
                raise FieldError(field, f"got {len(tokens)} tokens, {rule}")
            if not params.exclude_input:
                raise InvalidField("exclude_input_in_output", False, "true with input_ids")
            self._check_tokens(field, tokens)
        else:
            field, tokens = "text_input", self._encode_prompt(params.text)
        if len(tokens) >= self.max_context_len:
            rule = f"must be at most {self.max_context_len - 1} tokens, to leave room for one more"
            raise FieldError(field, f"got {len(tokens)} tokens, {rule}")
        return tokens

    def _encode_prompt(self, text: str) -> list[int]:
        # Check the size first, because tokenizing a very long text would delay other requests.
        num_bytes = len(text.encode())
        most = MAX_BYTES_PER_TOKEN * self.max_context_len
        if num_bytes > most:
            raise InvalidField("text_input", f"{num_bytes} bytes", f"at most {most} bytes")
        # `encode` holds Python's lock, which blocks the loop for seconds at a million bytes.
        # `encode_batch` releases it.
        tokens: list[int] = self._engine.tokenizer.encode_batch([text])[0].ids
        if not tokens:
            raise InvalidField("text_input", text, "text of at least one token, or use input_ids")
        return tokens

    def _check_tokens(self, field: str, tokens: Iterable[int | None], least: int = 0) -> None:
        """Raises InvalidField for a token that does not exist. None is no token."""
        vocab_size = self._engine.target.capabilities.vocab_size
        for token in tokens:
            if token is not None and not least <= token < vocab_size:
                raise InvalidField(field, token, f"in {least}..{vocab_size - 1}")

    def _check_limits(self, params: GenerateParams, prompt: list[int]) -> None:
        longest = self.max_context_len
        if len(prompt) + params.max_tokens > longest:
            raise InvalidField(
                "max_tokens",
                params.max_tokens,
                f"at most {longest - len(prompt)}: the prompt has {len(prompt)} tokens, "
                f"and both together may have {longest}",
            )
        if params.min_tokens > params.max_tokens:
            allowed = f"at most max_tokens, which is {params.max_tokens}"
            raise InvalidField("min_tokens", params.min_tokens, allowed)
        self._check_products(params, len(prompt))
        self._check_tokens("end_id", [params.end_id], NO_TOKEN)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        try:
            parse_policy(params.policy or self._policy)
        except ValueError as error:
            raise InvalidField("speculation_policy", params.policy, str(error)) from error

    def _check_products(self, params: GenerateParams, num_prompt: int) -> None:
        """What takes long although each number is allowed."""
        words = {"bad_words": params.bad_words, "embedding_bias_words": params.bias_words}
        for field, given in words.items():
            num_bytes = sum(len(word.encode()) for word in given)
            if num_bytes > MAX_WORDS_BYTES:
                raise InvalidField(field, f"{num_bytes} bytes", f"at most {MAX_WORDS_BYTES} in all")
        if (top := params.num_token_log_probs) is None:
            return
        num_tokens = num_prompt * params.prompt_log_probs + params.max_tokens * (not params.stream)
        if num_tokens * (2 + top) > MAX_ANSWER_VALUES:
            allowed = (
                f"less: a response with {num_tokens} tokens would have {num_tokens * (2 + top)} "
                f"values, and may have {MAX_ANSWER_VALUES}; set stream, or lower max_tokens"
            )
            raise InvalidField("return_token_log_probs", top, allowed)

    def _sampling(self, params: GenerateParams) -> SamplingParams:
        drawn = 1 + secrets.randbelow(2**64 - 1)
        return SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k if params.top_p else 1,
            top_p=params.top_p or 1.0,
            min_p=params.min_p,
            seed=drawn if params.seed is None else params.seed,
            end_tokens=self._end_tokens(params),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=self._logit_bias(params),
            bad_words=self._bad_words(params),
            min_tokens=params.min_tokens,
            verification=params.verification,
            log_probs=params.return_log_probs or params.num_token_log_probs is not None,
            num_top_log_probs=params.num_token_log_probs or 0,
            prompt_log_probs=params.prompt_log_probs,
            is_guided=params.guide_type is not None,
        )

    def _check_guide(self, params: GenerateParams) -> None:
        field, kind = GUIDE_FIELD, params.guide_type
        if kind is None:
            if params.guide:
                raise InvalidField(field, params.guide, f"left out without {field}_type")
            return
        if bool(params.guide) == (kind is GuideType.JSON):
            allowed = "left out" if params.guide else "given"
            raise InvalidField(field, params.guide, f"{allowed} if {field}_type is {kind}")
        if not self._engine.end_tokens:
            raise InvalidField(f"{field}_type", kind, "left out: this model has no end token")
        if not self._end_tokens(params):
            name, value = ("ignore_eos", True) if params.ignore_eos else ("end_id", params.end_id)
            raise InvalidField(name, value, f"left out with {field}, which says where texts end")

    def _end_tokens(self, params: GenerateParams) -> tuple[int, ...]:
        """`end_id` replaces all end tokens of the model. `stop_token_ids`, and stop words that name
        a special token, are added to them."""
        special = special_tokens(self._engine.tokenizer).items()
        named = (token for token, name in special if name in params.stop_words)
        ends: tuple[int, ...] = ()
        if not params.ignore_eos and params.end_id != NO_TOKEN:
            ends = self._engine.end_tokens if params.end_id is None else (params.end_id,)
        return tuple(dict.fromkeys((*ends, *params.stop_token_ids, *named)))

    def _logit_bias(self, params: GenerateParams) -> tuple[tuple[int, float], ...]:
        """Bias by token: each token of a word gets its weight. Weights of several words add up."""
        bias: dict[int, float] = {}
        for word, weight in zip(params.bias_words, params.bias_weights, strict=True):
            for token in self._word_tokens("embedding_bias_words", word):
                bias[token] = bias.get(token, 0.0) + weight
        return tuple(sorted(bias.items()))

    def _bad_words(self, params: GenerateParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, with and without a leading space.

        Most tokenizers use other tokens for a word after a space.
        """
        words = {
            self._word_tokens("bad_words", spelled)
            for word in params.bad_words
            for spelled in (word, f" {word}")
        }
        return tuple(sorted(words))

    def _word_tokens(self, field: str, word: str) -> tuple[int, ...]:
        tokens = tuple(self._engine.tokenizer.encode(word, add_special_tokens=False).ids)
        if not tokens:
            raise InvalidField(field, word, "text of at least one token")
        return tokens

    def _usable_proposers(
        self, params: GenerateParams, sampling: SamplingParams
    ) -> tuple[tuple[str, ...], str]:
        """The request's proposer, then others that the planner may choose. If its drafts cannot be
        verified, none, and the reason."""
        names = [name for name in self._engine.proposers if name != GRAMMAR or sampling.is_guided]
        if params.proposer is not None and params.proposer not in names:
            raise InvalidField("proposer", params.proposer, " or ".join(names) or "left out")
        if reason := self._engine.target.capabilities.why_unverified(sampling):
            return (), reason
        wanted = self._proposers if params.proposer is None else (params.proposer,)
        return tuple(name for name in wanted if name in names), ""

    def _max_draft_len(self, params: GenerateParams, proposers: Iterable[str]) -> int:
        """The request's largest draft length, with any of these proposers."""
        longest = [self._engine.proposers[name].capabilities.max_draft_len for name in proposers]
        most = min(self._limits.max_draft_len, self._engine.target.capabilities.max_draft_len)
        asked = most if params.num_draft_tokens is None else params.num_draft_tokens
        return min(asked, most, max(longest, default=0))


def _acceptance_group(params: GenerateParams, sampling: SamplingParams) -> str:
    """The adapter, and the client's workload name, or a name for the verification and the
    temperature range.

    Acceptance is lower at higher temperatures, and with an adapter that changes the text much,
    because drafts are those of the target without it.
    """
    adapter = f"adapter {params.adapter}, " if params.adapter else ""
    if params.workload:
        return f"{adapter}workload {params.workload}"
    guided = ", guided" if sampling.is_guided else ""
    if sampling.is_greedy:
        return f"{adapter}greedy{guided}"
    bucket = next((edge for edge in TEMPERATURE_EDGES if sampling.temperature <= edge), math.inf)
    return f"{adapter}{sampling.verification}, temperature up to {bucket}{guided}"
