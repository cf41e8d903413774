"""A target whose tokens a person can work out by hand; `fake_proposer` drafts its text.

The token at position t of a sequence (counted from 0, the prompt included) whose prompt tokens sum
to s is

    token(t) = (s + TOKEN_STEP * t) % vocab_size      with TOKEN_STEP = 7

and the request's seed is added to s where the request samples, that is, where it is not greedy.
The prompt (3, 4) has s = 7; with a vocabulary of 50 its text is

    t = 2: 7 + 14 = 21,   t = 3: 28,   t = 4: 35,   t = 5: 42,   t = 6: 49,   t = 7: 56 % 50 = 6

With temperature 1 and seed 5 it begins with 26. The text depends on nothing else, so it must come
out the same under every plan.

With a cost model, passes take time on a clock, which may be a virtual one; without, they take none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import FinishReason, SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Decode,
    Event,
    Prefill,
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
)


def fake_token(
    prompt: Sequence[int], position: int, vocab_size: int, sampling: SamplingParams = GREEDY
) -> int:
    """The token at absolute `position` (at least len(prompt)) of the text after `prompt`."""
    return token_at(text_key(prompt, sampling), position, vocab_size)


def text_key(prompt: Sequence[int], sampling: SamplingParams) -> int:
    """s of the rule above, the seed included: all that the text depends on."""
    return sum(prompt) + (0 if sampling.is_greedy else sampling.seed)


def token_at(key: int, position: int, vocab_size: int) -> int:
    """The token at absolute `position` of the text with this key."""
    return (key + TOKEN_STEP * position) % vocab_size


@dataclass(slots=True)
class _Sequence:
    """tokens: prompt and generated, all known from the start. num_computed_tokens: leading
    ones of them that chunks have brought. text_key: by its prompt, of num_prompt tokens."""

    sampling: SamplingParams
    tokens: list[int]
    num_prompt: int
    text_key: int
    num_computed_tokens: int = 0
    is_prefilled: bool = False
    is_finished: bool = False


class FakeTarget:
    """Runs all work in flight at each poll: a `Decode` burst by one token, the rest to its end.

    A poll lasts one pass over the decoding sequences (`cost.target_s` of 1 + k tokens each) and one
    pass for each prompt chunk; each event carries the seconds of its own pass.

    `cancel` shortens a burst to the token of the next poll. It ends the work, not the sequence.

    fail_at_step: the poll, counted from 1 over the polls that have work, that raises RuntimeError.
    poison_token: a sequence fails, with an event that has `error`, when a chunk of its prompt or
        its next tokens contain this token.

    Misuse is the caller's bug: KeyError for a sequence that is not held, ValueError for the rest.
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
        self._capabilities = capabilities
        self._cost = cost
        self._clock = clock or RealClock()
        self._fail_at_step = fail_at_step
        self._poison_token = poison_token
        self._held: dict[SequenceId, _Sequence] = {}
        self._in_flight: dict[SequenceId, Work] = {}
        self._released: set[SequenceId] = set()
        self._num_steps = 0
        self._is_closed = False

    @property
    def capabilities(self) -> TargetCapabilities:
        return self._capabilities

    @property
    def num_sequences(self) -> int:
        """Sequences held now."""
        return len(self._held)

    @property
    def num_steps(self) -> int:
        """Polls so far that had work."""
        return self._num_steps

    def begin(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        sampling: SamplingParams,
        reuses_prefix: bool = True,
    ) -> int:
        """Nothing is ever cached. A sequence that was released may begin again."""
        limits = self._capabilities
        if sequence in self._held:
            raise ValueError(f"sequence {sequence} has begun already")
        if len(self._held) >= limits.max_sequences:
            raise ValueError(f"holds {limits.max_sequences} sequences already")
        if not 1 <= num_prompt <= len(tokens) < limits.max_context_len:
            raise ValueError(f"{len(tokens)} tokens, of them {num_prompt} of the prompt")
        self._check_tokens(tokens)
        key = text_key(tokens[:num_prompt], sampling)
        self._held[sequence] = _Sequence(sampling, list(tokens), num_prompt, key)
        self._released.discard(sequence)
        return 0

    def submit(self, work: Sequence[Work]) -> None:
        """Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the target is closed")
        for item in work:
            if item.sequence in self._in_flight:
                raise ValueError(f"sequence {item.sequence} already has work in flight")
            if isinstance(item, Prefill):
                self._check_prefill(item)
            else:
                self._check_generation(item)
            self._in_flight[item.sequence] = item

    def _check_prefill(self, work: Prefill) -> None:
        limits, sequence = self._capabilities, self._held[work.sequence]
        if sequence.is_prefilled or work.start != sequence.num_computed_tokens:
            raise ValueError(f"chunk at {work.start} after {sequence.num_computed_tokens} tokens")
        if not 1 <= len(work.tokens) <= (limits.max_prefill_tokens or limits.max_context_len):
            raise ValueError(f"a chunk of {len(work.tokens)} tokens")
        end = work.start + len(work.tokens)
        if list(work.tokens) != sequence.tokens[work.start : end]:
            raise ValueError(f"a chunk of other tokens than sequence {work.sequence} began with")
        if work.is_last != (end == len(sequence.tokens)):
            raise ValueError(
                f"the chunk to {end} of {len(sequence.tokens)} tokens: is it the last?"
            )

    def _check_generation(self, work: Verify | Decode) -> None:
        limits, sequence = self._capabilities, self._held[work.sequence]
        if not sequence.is_prefilled or sequence.is_finished:
            raise ValueError(f"sequence {work.sequence} is not between prefill and finish")
        if isinstance(work, Decode):
            if not 1 <= work.max_tokens <= limits.max_decode_tokens:
                raise ValueError(f"a burst of {work.max_tokens} tokens")
            return
        if not 1 <= len(work.drafts) <= limits.max_draft_len:
            raise ValueError(f"{len(work.drafts)} drafts to verify")
        if len(sequence.tokens) + len(work.drafts) > limits.max_context_len:
            raise ValueError(f"no room for the drafts of sequence {work.sequence}")
        if not limits.can_verify(sequence.sampling):
            raise ValueError(f"cannot verify the sampling of sequence {work.sequence}")
        self._check_tokens(work.drafts)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not all(0 <= token < self._capabilities.vocab_size for token in tokens):
            raise ValueError("a token outside of the vocabulary")

    def poll(self, timeout_s: float) -> list[Event]:
        """One event for each sequence in flight, in the order of submission."""
        if not self._in_flight:
            return []
        self._num_steps += 1
        if self._num_steps == self._fail_at_step:
            raise RuntimeError(f"failed at step {self._num_steps}, as asked")
        running, self._in_flight = self._in_flight, {}
        decode_s = self._decode_s([work for work in running.values() if _is_generation(work)])
        total_s = decode_s
        events = []
        for work in running.values():
            pass_s = decode_s
            if isinstance(work, Prefill):
                pass_s = self.time_pass(1, len(work.tokens), work.start)
                total_s += pass_s
            event = self._run(work, pass_s)
            events.append(self._poisoned(event) if self._poison_token in event.tokens else event)
        self._clock.sleep(total_s)
        return events

    def _decode_s(self, works: list[Work]) -> float:
        """Seconds of the one pass that checks the drafts and decodes; before any token is added."""
        if self._cost is None or not works:
            return 0.0
        num_drafts = sum(len(work.drafts) for work in works if isinstance(work, Verify))
        context_len = sum(len(self._held[work.sequence].tokens) for work in works) / len(works)
        return self._cost.target_s(len(works), len(works) + num_drafts, context_len)

    def _run(self, work: Work, pass_s: float) -> Event:
        match work:
            case Prefill():
                return self._run_prefill(work, pass_s)
            case Verify():
                return self._run_verify(work, pass_s)
            case Decode():
                return self._run_decode(work, pass_s)

    def _run_prefill(self, work: Prefill, pass_s: float) -> Event:
        sequence = self._held[work.sequence]
        if self._poison_token in work.tokens:
            return self._poisoned(Event(work.sequence, pass_s=pass_s))
        sequence.num_computed_tokens += len(work.tokens)
        if not work.is_last:
            return Event(work.sequence, pass_s=pass_s)
        sequence.is_prefilled = True
        tokens, finish = self._emit(sequence, 1)
        return Event(work.sequence, tokens, finish=finish, pass_s=pass_s)

    def _poisoned(self, event: Event) -> Event:
        self._held[event.sequence].is_finished = True
        self._in_flight.pop(event.sequence, None)
        error = f"the text contains token {self._poison_token}"
        return Event(event.sequence, pass_s=event.pass_s, error=error)

    def _run_verify(self, work: Verify, pass_s: float) -> Event:
        """An end token that was drafted counts as accepted, and is not emitted."""
        sequence = self._held[work.sequence]
        num_accepted = 0
        for position, draft in enumerate(work.drafts, start=len(sequence.tokens)):
            if draft != token_at(sequence.text_key, position, self._capabilities.vocab_size):
                break
            num_accepted += 1
            if draft in sequence.sampling.end_tokens:
                break
        tokens, finish = self._emit(sequence, num_accepted + 1)
        return Event(
            work.sequence, tokens, len(work.drafts), num_accepted, finish=finish, pass_s=pass_s
        )

    def _run_decode(self, work: Decode, pass_s: float) -> Event:
        tokens, finish = self._emit(self._held[work.sequence], 1)
        is_last = work.max_tokens == 1 or finish is not None
        if not is_last:
            self._in_flight[work.sequence] = Decode(work.sequence, work.max_tokens - 1)
        return Event(work.sequence, tokens, is_last=is_last, finish=finish, pass_s=pass_s)

    def _emit(
        self, sequence: _Sequence, num_tokens: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Add up to num_tokens of the text; fewer at an end token or the context limit."""
        limits = self._capabilities
        first = len(sequence.tokens)
        finish = None
        for position in range(first, first + num_tokens):
            token = token_at(sequence.text_key, position, limits.vocab_size)
            if token in sequence.sampling.end_tokens:
                finish = FinishReason.STOP
                break
            sequence.tokens.append(token)
            if len(sequence.tokens) == limits.max_context_len:
                finish = FinishReason.LENGTH
                break
        sequence.is_finished = finish is not None
        return tuple(sequence.tokens[first:]), finish

    def cancel(self, sequence: SequenceId) -> None:
        """Nothing happens where nothing is in flight. Raises KeyError where it is not held."""
        self._require_held(sequence)
        if isinstance(self._in_flight.get(sequence), Decode):
            self._in_flight[sequence] = Decode(sequence, 1)

    def release(self, sequence: SequenceId) -> None:
        self._require_held(sequence)
        if sequence in self._in_flight:
            raise ValueError(f"sequence {sequence} has work in flight")
        del self._held[sequence]
        self._released.add(sequence)

    def _require_held(self, sequence: SequenceId) -> None:
        if sequence not in self._held:
            state = "was released" if sequence in self._released else "is unknown"
            raise KeyError(f"sequence {sequence} {state}")

    def close(self) -> None:
        self._is_closed = True

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """What the cost model says, 0.0 without one; no time passes on the clock.

        Logits cost nothing here.
        """
        if self._cost is None:
            return 0.0
        return self._cost.target_s(batch_size, batch_size * tokens_per_row, context_len)

    def check_integrity(self) -> None:
        """Recompute what must hold between two calls. Raises AssertionError."""
        limits = self._capabilities
        assert self._held.keys().isdisjoint(self._released), "a released sequence is held"
        assert self._in_flight.keys() <= self._held.keys(), "work in flight of a stranger"
        assert len(self._held) <= limits.max_sequences, "more sequences than fit"
        for number, sequence in self._held.items():
            assert len(sequence.tokens) <= limits.max_context_len, f"sequence {number} too long"
            for position in range(sequence.num_prompt, len(sequence.tokens)):
                expected = token_at(sequence.text_key, position, limits.vocab_size)
                assert sequence.tokens[position] == expected, f"wrong text of {number}"


def _is_generation(work: Work) -> bool:
    return not isinstance(work, Prefill)
