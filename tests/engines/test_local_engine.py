"""The local engine against Transformers itself, token by token; and prefix reuse against none.

The reference computes every token by a full pass without cache and with Transformers' own
attention, so it shares neither the packing, nor the rows, nor the mask with what is tested.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_models import (
    MAX_DRAFT_LEN,
    MAX_LEN,
    OPENVINO,
    VOCAB_SIZE,
    check_cache,
    expected_text,
    make_model,
    make_proposer,
    make_runner,
    make_target,
    poll,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from smartspec_py.core.types import NO_TOKEN, SamplingParams, Verification
from smartspec_py.engines.base import Decode, Prefill, SequenceStart, Verify, Work
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.draft_model import DraftModelProposer
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig

pytestmark = pytest.mark.slow  # so that they run beside the others

NUM_TOKENS = 24
GREEDY = SamplingParams()


class Driver:
    """The least loop: chunks of a prompt, then drafts of random lengths, checked as they come.

    unread: tokens at the end of a sequence's known ones that no chunk has brought yet.
    num_cached: tokens that were found in the cache, by sequence.
    """

    def __init__(self, target: LocalTarget, proposer: DraftModelProposer, seed: int) -> None:
        self.target, self.proposer = target, proposer
        self.rng = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.unread: dict[int, list[int]] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.num_prompt: dict[int, int] = {}
        self.num_cached: dict[int, int] = {}
        self.num_accepted = 0

    def begin(
        self,
        sequence: int,
        tokens: list[int],
        sampling: SamplingParams = GREEDY,
        num_prompt: int | None = None,
    ) -> None:
        """num_prompt: None where all tokens are of the prompt."""
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        num_cached = self.target.begin(SequenceStart(sequence, tokens, num_prompt, sampling))
        assert 0 <= num_cached < len(tokens)
        self.tokens[sequence] = list(tokens)
        self.unread[sequence] = tokens[num_cached:]
        self.sampling[sequence], self.num_prompt[sequence] = sampling, num_prompt
        self.num_cached[sequence] = num_cached

    def generate(self, sequence: int, num_tokens: int) -> list[int]:
        """Step until so many tokens of its text are known; returns those."""
        first = self.num_prompt[sequence]
        while len(self.tokens[sequence]) < first + num_tokens:
            self.step()
        return self.tokens[sequence][first:][:num_tokens]

    def step(self) -> None:
        """Some sequences verify, some decode, some read a chunk of their prompt."""
        work: list[Work] = []
        decoding = [s for s in self.tokens if not self.unread[s] and self.rng.random() < 0.8]
        tasks = [
            DraftTask(
                s,
                self.tokens[s],
                self.num_prompt[s],
                self.rng.randrange(MAX_DRAFT_LEN + 1),
                self.sampling[s],
            )
            for s in decoding
        ]
        for task, draft in zip(tasks, self.propose(tasks), strict=True):
            work.append(Verify(task.sequence, draft) if draft.tokens else Decode(task.sequence, 1))
        for sequence, unread in self.unread.items():
            if unread:
                work.append(self.chunk(sequence, unread))
        self.rng.shuffle(work)
        for event in poll(self.target, *work):
            if event.num_drafted or event.hidden is not None:
                self.proposer.observe(event.sequence, event.num_accepted, event.hidden)
            self.tokens[event.sequence].extend(event.tokens)
            self.num_accepted += event.num_accepted

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return self.proposer.propose(tasks)

    def chunk(self, sequence: int, unread: list[int]) -> Prefill:
        size = min(self.rng.randrange(1, 24), len(unread))
        start = len(self.tokens[sequence]) - len(unread)
        chunk, unread[:] = tuple(unread[:size]), unread[size:]
        return Prefill(sequence, chunk, start, not unread)

    def end(self, sequence: int) -> list[int]:
        self.target.release(sequence)
        self.proposer.release(sequence)
        check_cache(self.target)
        check_cache(self.proposer)
        del self.unread[sequence]
        return self.tokens.pop(sequence)


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


KINDS = [
    *("llama, grouped keys", "qwen2, one key head", "gpt-neox", "mistral, window 11"),
    *("qwen2, window 11 above", "qwen3, window 1", "gemma2, window 11"),
    *(OPENVINO + kind for kind in ("llama, grouped keys", "qwen2, one key head")),
    *(OPENVINO + kind for kind in ("mistral, window 11", "qwen3, window 1")),
]
"""Different layouts. `test_model_types` has all types."""


@pytest.mark.parametrize(
    ("kind", "is_asynchronous"), [*((kind, False) for kind in KINDS), (KINDS[0], True)]
)
def test_text_is_that_of_transformers(
    kind: str, is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine sequences through five rows, joining and leaving between steps, drafts of 0 to 6. If
    passes are asynchronous, drafts stay on the device until they are verified."""
    monkeypatch.setattr(PyTorchRunner, "is_asynchronous", is_asynchronous)
    todo = list(enumerate(prompts(9, seed=1)))
    texts = dict(todo)
    driver = Driver(make_target(kind), make_proposer(kind), seed=2)
    done = {}
    while todo or driver.tokens:
        while todo and len(driver.tokens) < 5:
            driver.begin(*todo.pop(0))
        driver.step()
        for sequence in list(driver.tokens):
            if len(driver.tokens[sequence]) >= len(texts[sequence]) + NUM_TOKENS:
                done[sequence] = driver.end(sequence)
    for sequence, prompt in texts.items():
        generated = done[sequence][len(prompt) :][:NUM_TOKENS]
        assert generated == expected_text(kind, prompt, NUM_TOKENS), f"sequence {sequence}"
    assert driver.num_accepted > 20, "the draft must be right often enough to test acceptance"
    check_cache(driver.target)
    check_cache(driver.proposer)


def test_sampled_text_does_not_depend_on_the_plan() -> None:
    """The same seed through ten random plans gives one text, and another seed another."""
    prompt = prompts(1, seed=5)[0]

    def text(plan_seed: int, seed: int) -> list[int]:
        driver = Driver(make_target("llama"), make_proposer("llama"), plan_seed)
        driver.begin(0, prompt, SamplingParams(temperature=1.0, top_p=0.95, seed=seed))
        return driver.generate(0, NUM_TOKENS)

    assert len({tuple(text(plan_seed, seed=7)) for plan_seed in range(10)}) == 1
    assert text(0, seed=8) != text(0, seed=7)


def test_lag_is_what_the_draft_has_not_read() -> None:
    """Unknown: all but the last of 9 tokens. After 3 drafts of which 1 was kept, 11 are known and
    10 were read: nothing is missed. After 5 tokens without drafts, 5 are."""
    proposer = make_proposer("llama")
    tokens = list(range(9))
    assert proposer.draft_prefill_len(0, 9) == 8
    (draft,) = proposer.propose([DraftTask(0, tokens, 9, 3, GREEDY)])
    assert len(draft.tokens) == 3
    proposer.observe(0, 1)
    assert proposer.draft_prefill_len(0, 11) == 0
    assert proposer.draft_prefill_len(0, 16) == 5
    proposer.release(0)
    assert proposer.draft_prefill_len(0, 16) == 15
    assert proposer.num_available(0, tokens, SamplingParams()) == MAX_DRAFT_LEN


def test_a_long_lag_gives_the_same_drafts() -> None:
    """A cache that missed 30 tokens proposes what one that read all of them proposes."""
    tokens = prompts(1, seed=9)[0] + [1, 2, 3] * 11
    fresh, stale = make_proposer("llama"), make_proposer("llama")
    stale.propose([DraftTask(0, tokens[:3], 3, 2, GREEDY)])
    stale.observe(0, 0)
    expected = fresh.propose([DraftTask(0, tokens, 3, 4, GREEDY)])
    assert len(expected[0].tokens) == 4
    assert stale.propose([DraftTask(0, tokens, 3, 4, GREEDY)]) == expected


def test_the_draft_stops_at_the_end_token() -> None:
    """What would follow the end of the text is not worth a pass."""
    proposer = make_proposer("llama")
    tokens = prompts(1, seed=3)[0]
    (draft,) = proposer.propose([DraftTask(0, tokens, len(tokens), 6, GREEDY)])
    ending = SamplingParams(end_tokens=(999, draft.tokens[2]))
    first = draft.tokens.index(draft.tokens[2])
    other = make_proposer("llama")
    (ended,) = other.propose([DraftTask(0, tokens, len(tokens), 6, ending)])
    assert ended.tokens == draft.tokens[: first + 1]


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_drafts_on_the_device_are_those_of_the_host(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several lengths, greedy and sampled. What follows an end token is drafted in vain. With a
    penalty, a draft depends on the ones before, which the host must know."""
    rejection = Verification.REJECTION
    first = make_proposer("llama").propose([DraftTask(0, [5, 6, 7], 3, 6, GREEDY)])[0].tokens[0]
    samplings = [
        GREEDY,
        SamplingParams(temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, seed=2, verification=rejection, frequency_penalty=penalty),
        SamplingParams(end_tokens=(first,)),
    ]
    tasks = [
        DraftTask(i, [5, 6, 7], 3, num, sampling)
        for i, (num, sampling) in enumerate(zip((2, 6, 3, 5), samplings, strict=True))
    ]
    on_host = make_proposer("llama").propose(tasks)
    monkeypatch.setattr(PyTorchRunner, "is_asynchronous", True)
    given = []
    forward = PyTorchRunner.forward

    def noted(self: PyTorchRunner, inputs: Any, token_ids: Any = None) -> Any:
        given.append(None if token_ids is None else len(token_ids))
        return forward(self, inputs, token_ids)

    monkeypatch.setattr(PyTorchRunner, "forward", noted)
    on_device = make_proposer("llama").propose(tasks)
    assert [len(draft.tokens) for draft in on_host] == [2, 6, 3, 1]
    torch.testing.assert_close(on_device[2].probs, on_host[2].probs)
    if penalty:
        assert [draft.tokens for draft in on_device] == [draft.tokens for draft in on_host]
        assert given == [None] * 6
        return
    assert [draft.tokens for draft in on_device] == [(NO_TOKEN,) * num for num in (2, 6, 3, 5)]
    for draft, known in zip(on_device, on_host, strict=True):
        assert tuple(draft.on_device[: len(known.tokens)].tolist()) == known.tokens
    assert given == [None, 4, 3, 2, 2, 1]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_drafts_on_the_device_are_verified_like_others(
    is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside drafts that the host knows, and a chunk of a prompt. The host waits for the device
    once, but twice where the target is on a CPU and the draft model is not."""
    first, second, prompt = [1, 2, 3, 4], [9, 8, 7], tuple(range(10, 30))
    drafts = tuple(expected_text("llama", first, 5)[1:])
    events, copies = [], 0
    to_host = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return to_host(tensor)

    for given in (None, torch.tensor(drafts)):
        monkeypatch.setattr(PyTorchRunner, "is_asynchronous", is_asynchronous and given is not None)
        target = make_target("llama")
        for i, tokens in enumerate((first, second, list(prompt))):
            target.begin(SequenceStart(i, tokens, len(tokens), GREEDY))
        poll(target, *(Prefill(i, tuple(t), 0, True) for i, t in enumerate((first, second))))
        known = drafts if given is None else (NO_TOKEN,) * 4
        work = [
            Prefill(2, prompt[:12], 0, False),
            Verify(1, Draft((5, 6, 7))),
            Verify(0, Draft(known, on_device=given)),
        ]
        copies = 0
        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        events.append([event._replace(pass_s=0.0) for event in poll(target, *work)])
        monkeypatch.undo()
        assert copies == (1 if given is None or is_asynchronous else 2)
    assert events[0] == events[1]
    assert events[0][2].num_accepted == 4


def test_a_pass_can_be_timed_in_any_room() -> None:
    """Rows of 96 tokens: asked for more, the pass is as long as the row."""
    target = make_target("llama")
    for tokens, context_len in ((1, 0), (64, 90), (96, 96), (200, 10)):
        assert target.time_pass(2, tokens, context_len) > 0


@pytest.mark.parametrize("kv_cache", ["auto", "u8"])
def test_timed_passes_write_the_memory_that_they_read(kv_cache: str) -> None:
    """Pages that were never written are one page, which would be in the processor's caches."""
    runner = make_runner(make_model("llama"), with_openvino=True, kv_cache=kv_cache)
    tensors = [tensor.data for tensor in runner.cache.tensors.values()]
    for data in tensors:
        data[:] = 1
    runner.time_pass(2, 1, 40)  # of the four blocks of 32 tokens of each row, it reads two
    for data in tensors:
        assert [bool(block.any()) for block in data[[0, 2, 4, 6]]] == [False, True, False, True]
    runner.release()
    assert not any(data.any() for data in tensors)
    for data in tensors:
        data[6:9] = 1
    runner.cache.copy_block(7, 1, 20)
    runner.cache.clear([6, 8])
    for data in tensors:
        assert [bool(block.all()) for block in data[:3]] == [False, True, False]
        assert [bool(block.any()) for block in data[6:9]] == [False, True, False]


def driver_of(
    kind: str = "llama", *, reuses_prefixes: bool = True, max_sequences: int = 5, seed: int = 2
) -> Driver:
    return Driver(
        make_target(kind, reuses_prefixes=reuses_prefixes, max_sequences=max_sequences),
        make_proposer(kind, reuses_prefixes=reuses_prefixes, max_sequences=max_sequences),
        seed,
    )


SEEDED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3),
]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_openvino_in_bfloat16_with_any_number_of_threads(num_threads: int) -> None:
    """Where the processor has AMX the MLP is one operator, which one thread cannot compute: it ends
    the process. Hidden layers are of the sizes that it takes."""
    from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB_SIZE,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = [(7 * i) % VOCAB_SIZE for i in range(70)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]

    own = RunnerConfig(Path(), torch.device("cpu"), torch.bfloat16, 2, 128, VOCAB_SIZE)
    made = OpenVinoRunner(model, replace(own, num_threads=num_threads))
    found = made.forward([RowInput(1, 0, tokens, 1)]).logits[0]
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0.0)


@pytest.mark.parametrize("kind", ["gpt-neox", "openvino: llama, grouped keys"])
def test_prefix_reuse_changes_no_text(kind: str) -> None:
    """Eight sequences with 30 tokens in common, through three rows, under four samplings.

    The common part is read twice or so: by those that begin before anybody has read it. The rest
    take it over, from living rows and from memories.
    """
    shared = [(11 * i) % VOCAB_SIZE for i in range(30)]
    rests = [[60 + i, 61 + i] for i in range(8)]

    def texts(reuses_prefixes: bool) -> tuple[dict[int, list[int]], dict[int, int]]:
        driver = driver_of(kind, reuses_prefixes=reuses_prefixes, max_sequences=3)
        todo, done = list(enumerate(rests)), {}
        while todo or driver.tokens:
            while todo and len(driver.tokens) < 3:
                number, rest = todo.pop(0)
                driver.begin(number, shared + rest, SEEDED[number % 4])
            driver.step()
            for number in list(driver.tokens):
                if len(driver.tokens[number]) >= 32 + NUM_TOKENS:
                    done[number] = driver.end(number)[32:][:NUM_TOKENS]
        return done, driver.num_cached

    plain, none_cached = texts(reuses_prefixes=False)
    reused, num_cached = texts(reuses_prefixes=True)
    assert reused == plain
    assert set(none_cached.values()) == {0}
    assert [num_cached[number] for number in range(3)] == [0, 0, 0]
    assert all(num_cached[number] >= 30 for number in range(3, 8))
    greedy = [number for number in range(8) if number % 4 == 0]
    for number in greedy:
        assert plain[number] == expected_text(kind, shared + rests[number], NUM_TOKENS)


def write(
    target: LocalTarget,
    sequence: int,
    tokens: list[int],
    num_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    reuses_prefix: bool = True,
) -> tuple[int, list[int]]:
    """A sequence alone, without drafts: how many tokens it found cached, and its text."""
    num_cached = target.begin(SequenceStart(sequence, tokens, len(tokens), sampling, reuses_prefix))
    prefill = Prefill(sequence, tuple(tokens[num_cached:]), num_cached, True)
    text = [*poll(target, prefill)[0].tokens]
    while len(text) < num_tokens:
        text += poll(target, Decode(sequence, 1))[0].tokens
    return num_cached, text


MEMORY = [40 + i for i in range(20)]


@pytest.mark.parametrize(
    ("tokens", "num_generated", "reuses_prefix", "num_cached"),
    [
        (MEMORY, 0, True, 19),  # the last one must be read, to draw what follows it
        (MEMORY, 5, True, 20),  # of a prompt, only what was read as a prompt
        ([*MEMORY, 1, 2], 0, True, 20),
        ([*MEMORY[:12], 1, 2], 0, True, 12),
        (MEMORY[:9], 0, True, 8),
        (MEMORY[:8], 0, True, 0),  # 7 at most, which is not worth a copy
        ([*MEMORY[:7], 1, 2, 3], 0, True, 0),
        (MEMORY, 0, False, 0),
    ],
)
@pytest.mark.parametrize("is_released", [True, False])
def test_how_many_tokens_are_found_in_the_cache(
    tokens: list[int], num_generated: int, reuses_prefix: bool, num_cached: int, is_released: bool
) -> None:
    """20 tokens were read and 5 generated. The row gives those 20, whether its owner has gone or
    not."""
    target = make_target("llama")
    _, text = write(target, 0, MEMORY, 5)
    if is_released:
        target.release(0)
    tokens = [*tokens, *text[:num_generated]]
    found, following = write(target, 1, tokens, 6, reuses_prefix=reuses_prefix)
    assert found == num_cached
    assert following == expected_text("llama", tokens, 6)
    check_cache(target)


def test_drafts_may_fill_the_row() -> None:
    target = make_target("llama")
    prompt = [5] * (MAX_LEN - 6)
    first, *drafts = expected_text("llama", prompt, 6)
    target.begin(SequenceStart(1, prompt, len(prompt), GREEDY))
    [event] = poll(target, Prefill(1, tuple(prompt), 0, True))
    assert event.tokens == (first,)
    [event] = poll(target, Verify(1, Draft(tuple(drafts))))
    assert event.tokens[:-1] == tuple(drafts)


PENALISED = [
    SamplingParams(temperature=0.8, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(frequency_penalty=0.7, bad_words=((3,), (5, 6)), logit_bias=((9, 2.0),)),
    SamplingParams(temperature=1.0, seed=8, end_tokens=(7,), min_tokens=20),
]


@pytest.mark.parametrize("reuses_prefixes", [True, False])
@pytest.mark.parametrize("sampling", [*SEEDED, *PENALISED], ids=lambda s: str(s)[15:60])
def test_preemption_changes_no_text(sampling: SamplingParams, reuses_prefixes: bool) -> None:
    """Released and begun again at random, three sequences write what they write undisturbed.

    Also where the sampling counts tokens: after `begin` the generated ones still count as such.
    """
    starts = prompts(3, seed=21)

    def texts(preempt_prob: float) -> tuple[list[list[int]], int]:
        driver = driver_of(reuses_prefixes=reuses_prefixes, seed=5)
        rng, num_preempted = random.Random(1), 0
        for number, prompt in enumerate(starts):
            driver.begin(number, prompt, sampling)
        while any(len(driver.tokens[n]) < len(starts[n]) + NUM_TOKENS for n in range(3)):
            driver.step()
            for number in range(3):
                if rng.random() < preempt_prob:
                    known = driver.end(number)
                    driver.begin(number, known, sampling, len(starts[number]))
                    num_preempted += 1
        return [driver.tokens[n][len(starts[n]) :][:NUM_TOKENS] for n in range(3)], num_preempted

    plain, _ = texts(0.0)
    preempted, num_preempted = texts(0.15)
    assert preempted == plain
    assert num_preempted > 5


def test_drafts_are_the_same_with_and_without_reuse() -> None:
    """A draft cache that took over 30 tokens, in place or from a living row, drafts what one does
    that read all of them."""
    tokens = [(7 * i) % VOCAB_SIZE for i in range(40)]
    for is_released in (True, False):
        proposer, fresh = make_proposer("llama"), make_proposer("llama", reuses_prefixes=False)
        proposer.propose([DraftTask(0, tokens[:35], 35, 3, GREEDY)])
        proposer.observe(0, 0)
        if is_released:
            proposer.release(0)
        task = DraftTask(1, [*tokens[:30], 1, 2, 3], 33, 5, GREEDY)
        assert proposer.propose([task]) == fresh.propose([task])
        proposer.observe(1, 0)
        check_cache(proposer)


def test_a_memory_holds_no_rejected_drafts() -> None:
    """Six draft rows; five are released before the drafts of the last are judged, and its row is
    brought down. What is left above must not pass for more than the tokens known then: a sequence
    that goes on like the last one is drafted for as if nothing had been cached."""
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(6)]
    proposer = make_proposer("llama", max_sequences=6)
    fresh = make_proposer("llama", reuses_prefixes=False)
    drafts = proposer.propose([DraftTask(n, texts[n], 20, 5, GREEDY) for n in range(6)])
    for number in range(5):
        proposer.release(number)
    proposer.observe(5, 0)
    wrong = drafts[5].tokens
    others = [next(t for t in range(VOCAB_SIZE) if t not in wrong[:4]) for _ in range(5)]
    texts[5].extend(others)
    task = DraftTask(7, [*texts[5], 1], 26, 5, GREEDY)
    assert proposer.propose([task]) == fresh.propose([task])


@pytest.mark.parametrize("reuses_prefix", [True, False])
def test_a_request_may_keep_from_what_the_draft_read_before(reuses_prefix: bool) -> None:
    proposer = make_proposer("llama")
    tokens = list(range(3, 23))
    proposer.propose([DraftTask(1, tokens, 20, 3, GREEDY)])
    proposer.release(1)
    lengths = []
    forward = proposer.runner.forward

    def counted(inputs: Sequence[RowInput], token_ids: None = None) -> PassOutput:
        lengths.append(len(inputs[0].tokens))
        return forward(inputs, token_ids)

    proposer.runner.forward = counted  # type: ignore[method-assign]
    proposer.propose([DraftTask(2, tokens, 20, 3, GREEDY, reuses_prefix)])
    assert lengths == ([1, 1, 1] if reuses_prefix else [19, 1, 1, 1])
