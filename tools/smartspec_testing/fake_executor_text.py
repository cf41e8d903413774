"""Which tokens the executor's fake draws; the rule is that of `fake_engine`.

The executor is not told where the prompt ends and the generated text begins, since every request
resends all: an input whose last tokens follow the rule for the tokens before them is taken as a
text to go on with, any other as a prompt. The one prompt in vocab_size whose own last token follows
the rule is thus continued as if it were generated.

The model's logits are made up: 0, and a peak of 10 to 12 on the token of the rule. Bias,
temperature and penalties change them in the order of penaltyKernels.cu: penalties apply after the
temperature, and all three count the tokens of the input too. The highest logit is drawn; of equal
ones, the rule's token or the next one after it. A bad word, and the end token before min_tokens,
may not come. `min_tokens` bans `end_id` alone, not the stop words.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smartspec_testing.fake_engine import TOKEN_STEP, token_at
from smartspec_testing.fake_executor_jobs import Behaviour, Job
from smartspec_testing.fake_executor_values import FinishReason, Request, Result

PEAK = 10.0


@dataclass(frozen=True)
class Draw:
    """is_accepted: whether the token is the draft, so that the next position counts as well."""

    token: int
    is_accepted: bool


@dataclass(frozen=True)
class TextRule:
    vocab_size: int
    behaviour: Behaviour

    def key_of(self, request: Request) -> int:
        """The key of the text that the request's input begins; see the module's docstring.

        Where the input ends with generated text, its last token tells the key, and the sum of the
        tokens before some point of that text confirms it.
        """
        tokens = request.input_token_ids
        shift = 0 if self.behaviour.sampled_logits else _seed_shift(request)
        if _is_scored(request):
            return self._searched_key(tokens, request, shift)
        for last in self._replaced_by(tokens, request):
            key = self._confirmed_key(last, tokens, request, shift)
            if key is not None:
                return key
        return sum(tokens) + shift

    def _searched_key(self, tokens: Sequence[int], request: Request, shift: int) -> int:
        """The same where scores choose tokens: the shortest prompt that the rest follows."""
        for num_prompt in range(1, len(tokens)):
            key = sum(tokens[:num_prompt]) + shift
            positions = range(num_prompt, len(tokens))
            if all(self._follows(key, position, tokens, request) for position in positions):
                return key
        return sum(tokens) + shift

    def _replaced_by(self, tokens: Sequence[int], request: Request) -> list[int]:
        """What the rule may have said where the last token stands: it, or banned ones below it."""
        candidates = [tokens[-1]]
        below = (tokens[-1] - 1) % self.vocab_size
        while len(candidates) < self.vocab_size and _may_be_banned(below, tokens[:-1], request):
            candidates.append(below)
            below = (below - 1) % self.vocab_size
        return candidates

    def _confirmed_key(
        self, last: int, tokens: Sequence[int], request: Request, shift: int
    ) -> int | None:
        key = last - TOKEN_STEP * (len(tokens) - 1)
        prefix_sum = sum(tokens)
        for position in range(len(tokens) - 1, 0, -1):
            if not self._follows(key, position, tokens, request):
                return None
            prefix_sum -= tokens[position]
            if (prefix_sum + shift - key) % self.vocab_size == 0:
                return key
        return None

    def _follows(self, key: int, position: int, tokens: Sequence[int], request: Request) -> bool:
        token = token_at(key, position, self.vocab_size)
        if _is_scored(request):
            found = [
                self._best(token, tokens[:position], request, ends) for ends in ((), _ends(request))
            ]
            return tokens[position] in found
        if token == tokens[position]:
            return True
        before = tokens[:position] if request.bad_words else ()
        return tokens[position] == self._allowed(token, before, request, _ends(request))

    def _allowed(
        self, token: int, before: Sequence[int], request: Request, banned: Collection[int]
    ) -> int:
        """The token that comes after `before`, where the rule says `token`."""
        if _is_scored(request):
            return self._best(token, before, request, banned)
        for step in range(self.vocab_size):
            candidate = (token + step) % self.vocab_size
            if candidate not in banned and not _is_bad_word(candidate, before, request):
                return candidate
        raise ValueError("bad_words leave no token")

    def _best(
        self, token: int, before: Sequence[int], request: Request, banned: Collection[int]
    ) -> int:
        """`_allowed` by the highest score."""
        sampling, bias = request.sampling_config, request.embedding_bias
        scores = np.zeros(self.vocab_size)
        scores[token] = _peak(len(before))
        if bias is not None:
            scores += bias.numpy()
        scores /= sampling.temperature or 1.0
        for known, count in Counter(before).items():
            factor = sampling.repetition_penalty or 1.0
            scores[known] *= factor if scores[known] < 0 else 1.0 / factor
            scores[known] -= sampling.presence_penalty or 0.0
            scores[known] -= count * (sampling.frequency_penalty or 0.0)
        for candidate in range(self.vocab_size):
            if candidate in banned or _is_bad_word(candidate, before, request):
                scores[candidate] = -math.inf
        return (token + int(np.roll(scores, -token).argmax())) % self.vocab_size

    def draw_step(self, job: Job) -> tuple[list[Draw], FinishReason]:
        """Of one iteration: one token, and with drafts one more for each that is accepted.

        The end token is not among them.
        """
        request, draws = job.request, list[Draw]()
        text = list(job.tokens)
        while True:
            draw = self._draw(job, text, len(draws))
            if draw.token == request.end_id:
                return draws, FinishReason.END_ID
            draws.append(draw)
            text.append(draw.token)
            if _ends_with_one_of(text, request.stop_words):
                return draws, FinishReason.STOP_WORDS
            if job.num_generated + len(draws) == job.max_tokens:
                is_full = bool(job.drafts) and len(draws) == len(job.drafts) + 1
                full = self.behaviour.finish_of_full_acceptance
                return draws, full if is_full else FinishReason.LENGTH
            if not draw.is_accepted:
                return draws, FinishReason.NOT_FINISHED

    def _draw(self, job: Job, text: Sequence[int], index: int) -> Draw:
        request, draft = job.request, next(iter(job.drafts[index:]), None)
        is_early = job.num_generated + index < (request.sampling_config.min_tokens or 0)
        banned = {request.end_id} if is_early and request.end_id is not None else set[int]()
        token = token_at(job.text_key, len(text), self.vocab_size)
        token = self._allowed(token, text, request, banned)
        if request.logits_post_processor and (index == 0 or self.behaviour.processes_all_positions):
            token = self._processed(job, text, token)
        elif self.behaviour.sampled_logits and not request.sampling_config.is_greedy:
            return self._sampled(job, token, draft, index)
        return Draw(token, token == draft)

    def _processed(self, job: Job, text: Sequence[int], token: int) -> int:
        """What is left of the token after the request's own callback."""
        logits = self.logits([token], len(text))
        assert job.request.logits_post_processor is not None
        job.request.logits_post_processor(
            job.request_id, logits, [list(text)], 0, job.request.client_id
        )
        return int(logits[0, -1].argmax())

    def _sampled(self, job: Job, token: int, draft: int | None, index: int) -> Draw:
        """From the distribution of `Behaviour.sampled_logits`."""
        sampling = job.request.sampling_config
        noise = random.Random(f"{sampling.seed} {len(job.tokens) + index}")
        temperature = sampling.temperature or 1.0
        pair = (token, (token + 1) % self.vocab_size)
        assert self.behaviour.sampled_logits is not None
        target = _softmax(self.behaviour.sampled_logits, temperature)
        config = job.request.external_draft_tokens_config
        if draft not in pair or config is None or config.logits is None:
            first = noise.choices(pair, target)[0]
            if first == draft or draft is None or not self.behaviour.redraws_after_mismatch:
                return Draw(first, first == draft)
            return Draw(noise.choices(pair, target)[0], False)
        row = tuple(float(config.logits[index][t]) for t in pair)
        divisor = temperature if self.behaviour.tempers_draft_logits else 1.0
        drafted = _softmax(row, divisor)
        which = pair.index(draft)
        if target[which] > noise.random() * drafted[which]:
            return Draw(draft, True)
        return Draw(pair[1 - which], False)  # all of max(p - q, 0) is on the other

    def logits(self, tokens: Sequence[int], position: int) -> Any:
        """A tensor [1, len(tokens), vocab_size] with its peaks on the tokens from `position` on."""
        import torch

        made = torch.zeros(1, len(tokens), self.vocab_size)
        for index, token in enumerate(tokens):
            made[0, index, token] = _peak(position + index)
        return made

    def log_prob(self, position: int) -> float:
        """Of the token that is drawn at the position, by its logits."""
        return -math.log1p((self.vocab_size - 1) * math.exp(-_peak(position)))


def make_result(
    job: Job, rule: TextRule, new_tokens: list[int], finish: FinishReason, is_final: bool
) -> Result:
    """Streaming brings the new tokens; otherwise all, behind the input unless excluded."""
    request, output = job.request, job.request.output_config
    tokens = new_tokens
    if not request.streaming or request.return_all_generated_tokens:
        tokens = job.generated
    has_input = not request.streaming and not output.exclude_input_from_output
    reported = (request.input_token_ids if has_input else []) + tokens
    result = Result(is_final, [list(reported)], [finish], job.num_iterations)
    if output.return_log_probs:  # always of all generated tokens, as createResult has it
        result.log_probs = [list(job.log_probs)]
        result.cum_log_probs = [sum(job.log_probs)]
    if output.return_generation_logits and tokens:
        start = len(job.tokens) - len(tokens)
        drawn = [token_at(job.text_key, start + i, rule.vocab_size) for i in range(len(tokens))]
        logits = rule.logits(drawn, start)
        result.generation_logits = logits.transpose(0, 1) if request.streaming else logits
    return result


def _peak(position: int) -> float:
    return PEAK + position % 3


def _softmax(logits: Sequence[float], temperature: float) -> list[float]:
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def _is_bad_word(token: int, before: Sequence[int], request: Request) -> bool:
    """Whether the token would complete one."""
    return any(
        word and word[-1] == token and list(before[len(before) - len(word) + 1 :]) == word[:-1]
        for word in request.bad_words or ()
    )


def _may_be_banned(token: int, before: Sequence[int], request: Request) -> bool:
    return token in _ends(request) or _is_bad_word(token, before, request)


def _ends(request: Request) -> set[int]:
    """Tokens that end the text, and may have been banned in an earlier request."""
    words = {word[0] for word in request.stop_words or () if len(word) == 1}
    return words if request.end_id is None else words | {request.end_id}


def _is_scored(request: Request) -> bool:
    """Whether its text depends on more than the rule and on tokens that may not come."""
    sampling = request.sampling_config
    return (
        request.embedding_bias is not None
        or sampling.repetition_penalty not in (None, 1.0)
        or bool(sampling.presence_penalty or sampling.frequency_penalty)
    )


def _ends_with_one_of(text: Sequence[int], words: Sequence[Sequence[int]] | None) -> bool:
    """The text from the prompt on: a word may have begun in an earlier request."""
    return any(word and list(text[-len(word) :]) == list(word) for word in words or ())


def _seed_shift(request: Request) -> int:
    """What the seed adds to the rule: itself where the request samples, else nothing."""
    return 0 if request.sampling_config.is_greedy else request.sampling_config.seed or 0
