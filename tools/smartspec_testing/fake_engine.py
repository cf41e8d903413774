"""A target whose tokens a person can work out by hand; `fake_proposer` drafts its text.

The token at position t of a sequence (counted from 0, the prompt included) whose prompt tokens sum
to s is

    token(t) = (s + TOKEN_STEP * t) % vocab_size      with TOKEN_STEP = 7

A request that is not greedy adds its seed to s.
The prompt (3, 4) has s = 7; with a vocabulary of 50 its text is

    t = 2: 7 + 14 = 21,   t = 3: 28,   t = 4: 35,   t = 5: 42,   t = 6: 49,   t = 7: 56 % 50 = 6

With temperature 1 and seed 5 it begins with 26. The text depends on nothing else, so it is the same
with every plan.

With a cost model, passes take time on a clock, which may be virtual. Without one they take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smartspec_py.constants import GUIDE_FIELDS
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import FinishReason, SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Decode,
    Event,
    Failure,
    Prefill,
    SequenceStart,
    Target,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_testing.clock import Clock, RealClock

TOKEN_STEP = 7

GREEDY = SamplingParams()

FAKE_CAPABILITIES = TargetCapabilities(
    max_sequences=64,
    max_context_len=4096,
    max_draft_len=8,
    max_decode_tokens=1,
    max_prefill_tokens=512,
    verifies_sampling=True,
    vocab_size=1000,
    unsupported=GUIDE_FIELDS,
)


def fake_token(
    prompt: Sequence[int], position: int, vocab_size: int, sampling: SamplingParams = GREEDY
) -> int:
    """The token at absolute `position` (at least len(prompt)) of the text after `prompt`."""
    return token_at(text_key(prompt, sampling), position, vocab_size)


def text_key(prompt: Sequence[int], sampling: SamplingParams) -> int:
    """s of the rule above, with the seed."""
    return sum(prompt) + (0 if sampling.is_greedy else sampling.seed)


def token_at(key: int, position: int, vocab_size: int) -> int:
    """The token at absolute `position` of the text with this key."""
    return (key + TOKEN_STEP * position) % vocab_size


@dataclass(slots=True)
class _Sequence:
    """tokens: prompt and generated. num_known: how many it began with, of them num_prompt of the
    prompt. num_read: leading tokens that prompt chunks have read."""

    sampling: SamplingParams
    tokens: list[int]
    num_prompt: int
    num_known: int
    key: int
    num_read: int = 0
    is_finished: bool = False


class FakeTarget(Target):
    """Runs all work in flight at each poll: a `Decode` burst by one token, other work to its end.

    A poll takes one pass over the decoding sequences (`cost.target_s` of 1 + k tokens each) and one
    pass for each prompt chunk. Each event has the seconds of its own pass. `cancel` shortens a
    burst to the token of the next poll.

    fail_at_step: the poll, counted from 1 over the polls that have work, that raises RuntimeError.
    poison_token: a sequence fails, with an event that has `failure`, when a chunk of its prompt or
        its next tokens contain this token.

    Wrong calls raise AssertionError, or KeyError for a sequence that is not held.
    """

    def __init__(
        self,
        capabilities: TargetCapabilities = FAKE_CAPABILITIES,
        *,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        fail_at_step: int | None = None,
        poison_token: int | None = None,
    ) -> None:
        self.capabilities = capabilities
        self._cost = cost
        self._clock = clock or RealClock()
        self._fail_at_step = fail_at_step
        self._poison_token = poison_token
        self._held: dict[SequenceId, _Sequence] = {}
        self._in_flight: dict[SequenceId, Work] = {}
        self._is_closed = False
        self.num_steps = 0
        """Polls so far that had work."""

    @property
    def num_sequences(self) -> int:
        """Sequences held now."""
        return len(self._held)

    def begin(self, start: SequenceStart) -> int:
        """Nothing is ever cached. A sequence that was released may begin again."""
        limits, sampling = self.capabilities, start.sampling
        sequence, tokens, num_prompt = start.sequence, start.tokens, start.num_prompt
        assert sequence not in self._held, "it has begun already"
        assert len(self._held) < limits.max_sequences, "more sequences than fit"
        assert 1 <= num_prompt <= len(tokens) < limits.max_context_len, "wrong number of tokens"
        assert all(0 <= token < limits.vocab_size for token in tokens), "tokens out of range"
        key = text_key(tokens[:num_prompt], sampling)
        self._held[sequence] = _Sequence(sampling, list(tokens), num_prompt, len(tokens), key)
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        """Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the target is closed")
        for item in work:
            assert item.sequence not in self._in_flight, "it already has work in flight"
            self._check(item, self._held[item.sequence])
            self._in_flight[item.sequence] = item

    def _check(self, work: Work, sequence: _Sequence) -> None:
        limits = self.capabilities
        if isinstance(work, Prefill):
            end = work.start + len(work.tokens)
            longest = limits.max_prefill_tokens or limits.max_context_len
            assert 1 <= len(work.tokens) <= longest, "wrong length of a chunk"
            assert work.start == sequence.num_read < sequence.num_known, "not the next chunk"
            assert list(work.tokens) == sequence.tokens[work.start : end], "other tokens"
            assert work.is_last == (end == sequence.num_known), "is it the last chunk?"
            return
        assert sequence.num_read == sequence.num_known, "the prompt was not read"
        assert not sequence.is_finished, "it has finished"
        if isinstance(work, Decode):
            assert 1 <= work.max_tokens <= limits.max_decode_tokens, "wrong length of a burst"
            return
        room = min(limits.max_draft_len, limits.max_context_len - len(sequence.tokens))
        drafts = work.draft.tokens
        assert 1 <= len(drafts) <= room, "wrong number of drafts"
        assert limits.can_verify(sequence.sampling), "its sampling cannot be verified"
        assert all(0 <= token < limits.vocab_size for token in drafts), "tokens out of range"

    def poll(self, timeout_s: float) -> list[Event]:
        """One event for each sequence in flight, in the order of submission."""
        if not self._in_flight:
            return []
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError(f"failed at step {self.num_steps}, as asked")
        running, self._in_flight = self._in_flight, {}
        decode_s = self._decode_s([w for w in running.values() if not isinstance(w, Prefill)])
        total_s = decode_s
        events = []
        for work in running.values():
            pass_s = decode_s
            if isinstance(work, Prefill):
                pass_s = self.time_pass(1, len(work.tokens), work.start)
                total_s += pass_s
            events.append(self._run(work, pass_s))
        self._clock.sleep(total_s)
        return events

    def _decode_s(self, works: list[Verify | Decode]) -> float:
        """Seconds of the one pass that checks the drafts and decodes; before any token is added."""
        if self._cost is None or not works:
            return 0.0
        num_drafts = sum(len(work.draft.tokens) for work in works if isinstance(work, Verify))
        context_len = sum(len(self._held[work.sequence].tokens) for work in works) / len(works)
        return self._cost.target_s(len(works), len(works) + num_drafts, context_len)

    def _run(self, work: Work, pass_s: float) -> Event:
        number, sequence = work.sequence, self._held[work.sequence]
        read = work.tokens if isinstance(work, Prefill) else ()
        drafts = work.draft.tokens if isinstance(work, Verify) else ()
        sequence.num_read += len(read)
        num_accepted = self._num_accepted(sequence, drafts)
        draws = sequence.num_read >= sequence.num_known
        tokens, finish = self._emit(sequence, num_accepted + 1 if draws else 0)
        if self._poison_token in (*read, *tokens):
            sequence.is_finished = True
            failure = Failure(f"the text contains token {self._poison_token}")
            return Event(number, pass_s=pass_s, failure=failure)
        is_last = not isinstance(work, Decode) or work.max_tokens == 1 or finish is not None
        if isinstance(work, Decode) and not is_last:
            self._in_flight[number] = Decode(number, work.max_tokens - 1)
        return Event(number, tokens, len(drafts), num_accepted, is_last, finish, pass_s)

    def _num_accepted(self, sequence: _Sequence, drafts: tuple[int, ...]) -> int:
        """An end token that was drafted counts as accepted, and is not emitted."""
        for index, draft in enumerate(drafts):
            if draft != self._token(sequence, len(sequence.tokens) + index):
                return index
            if draft in sequence.sampling.end_tokens:
                return index + 1
        return len(drafts)

    def _token(self, sequence: _Sequence, position: int) -> int:
        return token_at(sequence.key, position, self.capabilities.vocab_size)

    def _emit(
        self, sequence: _Sequence, num_tokens: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Add up to num_tokens of the text; fewer at an end token or the context limit."""
        first = len(sequence.tokens)
        finish = None
        for position in range(first, first + num_tokens):
            token = self._token(sequence, position)
            if token in sequence.sampling.end_tokens:
                finish = FinishReason.STOP
                break
            sequence.tokens.append(token)
            if len(sequence.tokens) == self.capabilities.max_context_len:
                finish = FinishReason.LENGTH
                break
        sequence.is_finished = finish is not None
        return tuple(sequence.tokens[first:]), finish

    def cancel(self, sequence: SequenceId) -> None:
        assert sequence in self._held, "it is not held"
        if isinstance(self._in_flight.get(sequence), Decode):
            self._in_flight[sequence] = Decode(sequence, 1)

    def release(self, sequence: SequenceId) -> None:
        assert sequence not in self._in_flight, "it has work in flight"
        del self._held[sequence]

    def close(self) -> None:
        self._is_closed = True

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds by the cost model, 0.0 without one; no time passes on the clock. Logits cost
        nothing."""
        if self._cost is None:
            return 0.0
        return self._cost.target_s(batch_size, batch_size * tokens_per_row, context_len)

    def check_integrity(self) -> None:
        """Recompute what must hold between two calls. Raises AssertionError."""
        limits = self.capabilities
        assert self._in_flight.keys() <= self._held.keys(), "work in flight of no sequence"
        assert len(self._held) <= limits.max_sequences, "more sequences than fit"
        for number, sequence in self._held.items():
            assert len(sequence.tokens) <= limits.max_context_len, f"sequence {number} too long"
            positions = range(sequence.num_prompt, len(sequence.tokens))
            expected = [self._token(sequence, position) for position in positions]
            assert sequence.tokens[sequence.num_prompt :] == expected, f"wrong text of {number}"
