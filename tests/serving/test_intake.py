"""From what a client wrote to what the loop runs: lengths, defaults, who drafts, and the budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from harness import CAPABILITIES, TOKENIZER, VOCAB_SIZE, fake_engine
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from smartspec_py.config import LimitsConfig
from smartspec_py.core.types import Verification
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.intake import Defaults, Intake, cache_budget
from smartspec_py.serving.messages import ResponseState
from smartspec_py.serving.request import GenerateParams, InvalidField, Request
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_proposer import FakeProposer
from smartspec_testing.local import LocalSink

HELLO = TOKENIZER.encode("hello").ids
"""Two tokens."""


def engine_with(
    names: Sequence[str] = ("draft_model",), max_draft_len: int = 8, **capabilities: object
) -> Engine:
    """A fake engine with proposers of these names, and a target that can so much."""
    target = FakeTarget(replace(CAPABILITIES, **capabilities))  # type: ignore[arg-type]
    made = {n: FakeProposer(0.5, vocab_size=VOCAB_SIZE, max_draft_len=max_draft_len) for n in names}
    return replace(fake_engine(), target=target, proposers=made)


def receive(
    params: GenerateParams,
    engine: Engine | None = None,
    limits: LimitsConfig | None = None,
    proposer: str | None = "draft_model",
) -> tuple[Request, ResponseState]:
    """At second 5 of the clock; the server's policy is fixed:3."""
    intake = Intake(
        engine or engine_with(),
        limits or LimitsConfig(max_context_len=256),
        Defaults("fixed:3", proposer),
        clock=lambda: 5.0,
    )
    arrival = intake.receive(params, LocalSink())
    return arrival.request, arrival.response


def test_what_is_left_out_is_the_server_s() -> None:
    request, response = receive(GenerateParams("hello", 9))
    assert (request.policy, request.proposers) == ("fixed:3", ("draft_model",))
    assert request.max_draft_len == 7
    assert (request.tokens, request.num_prompt, request.max_tokens) == (HELLO, 2, 9)
    assert (request.arrival_s, request.deadline_s, request.priority) == (5.0, None, 0)
    assert request.reuses_prefix
    assert response.seed == request.sampling.seed > 0
    assert (response.num_input_tokens, response.no_speculation) == (2, "")


def test_a_long_prompt_holds_up_no_other_thread() -> None:
    """The loop, and the beats by which the server is known to live, go on while it is tokenised."""
    text = "so it goes, word after word; " * 20_000
    limits = LimitsConfig(max_context_len=1_000_000)
    engine = engine_with(max_context_len=1_000_000)
    turns, is_over = [0], threading.Event()

    def turn() -> None:
        while not is_over.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=turn)
    other.start()
    request, _ = receive(GenerateParams(text, 1), engine, limits)
    is_over.set()
    other.join()
    assert request.num_prompt > 100_000
    assert turns[0] > 10


def test_what_is_said_is_taken() -> None:
    request, _ = receive(
        GenerateParams(
            "hello",
            9,
            policy="none",
            priority=2,
            deadline_ms=1500,
            seed=7,
            min_tokens=4,
            stop_words=("x",),
            reuse_prefix=False,
            verification=Verification.REJECTION,
            return_log_probs=True,
        )
    )
    assert (request.policy, request.priority, request.deadline_s) == ("none", 2, 6.5)
    assert (request.sampling.seed, request.sampling.min_tokens) == (7, 4)
    assert request.sampling.verification is Verification.REJECTION
    assert request.sampling.log_probs
    assert not request.reuses_prefix


def test_log_probs_of_a_prompt_need_all_of_it() -> None:
    asked = GenerateParams("hello", 9, num_token_log_probs=3, prompt_log_probs=True)
    request, _ = receive(asked)
    assert (request.sampling.num_top_log_probs, request.sampling.prompt_log_probs) == (3, True)
    assert request.sampling.log_probs
    assert not request.reuses_prefix


def test_a_prompt_of_tokens_is_not_tokenized() -> None:
    request, response = receive(GenerateParams("", 9, prompt_ids=(5, 3, 3)))
    assert (request.tokens, request.num_prompt) == ([5, 3, 3], 3)
    assert response.num_input_tokens == 3


@pytest.mark.parametrize(
    ("params", "part"),
    [
        (GenerateParams("", 9), "text_input: got '', must be text of at least one token, or use"),
        (GenerateParams("a", 9, prompt_ids=(1,)), "input_ids: got '1 tokens', must be left out"),
        (GenerateParams("", 9, prompt_ids=(10**6,)), "input_ids: got 1000000, must be in 0.."),
        (
            GenerateParams("", 9, prompt_ids=(1,) * 5000),
            "got '5000 tokens', must be at most",
        ),
        (GenerateParams("", 9, prompt_ids=(1,), exclude_input=False), "exclude_input_in_output"),
    ],
)
def test_wrong_prompts(params: GenerateParams, part: str) -> None:
    with pytest.raises(InvalidField) as raised:
        receive(params)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("end_id", "ignore_eos", "end_tokens"),
    [(None, False, (42, 43)), (7, False, (7,)), (-1, False, ()), (None, True, ()), (7, True, ())],
)
def test_the_end_tokens(end_id: int | None, ignore_eos: bool, end_tokens: tuple[int, ...]) -> None:
    """A request's end_id replaces all of the model's. Its stop_token_ids are added."""
    engine = replace(engine_with(), end_tokens=(42, 43))
    params = GenerateParams("hello", 9, end_id=end_id, ignore_eos=ignore_eos)
    assert receive(params, engine)[0].sampling.end_tokens == end_tokens
    params = replace(params, stop_token_ids=(5, 5, 42))
    expected = tuple(dict.fromkeys([*end_tokens, 5, 42]))
    assert receive(params, engine)[0].sampling.end_tokens == expected


def test_top_p_of_0_is_greedy() -> None:
    sampling = receive(GenerateParams("hello", 9, temperature=1.0, top_p=0.0))[0].sampling
    assert (sampling.is_greedy, sampling.top_p) == (True, 1.0)


def test_an_empty_prompt_is_served_if_the_tokenizer_adds_a_start_token() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 5)])
    engine = replace(engine_with(), tokenizer=tokenizer)
    assert receive(GenerateParams("", 9), engine)[0].tokens == [5]


@pytest.mark.parametrize(
    ("names", "default", "asked", "expected"),
    [
        (("draft_model", "prompt_lookup"), "draft_model", None, "draft_model"),
        (("draft_model", "prompt_lookup"), "draft_model", "prompt_lookup", "prompt_lookup"),
        (("prompt_lookup",), "prompt_lookup", None, "prompt_lookup"),
        ((), None, None, None),
    ],
)
def test_who_drafts(
    names: Sequence[str], default: str | None, asked: str | None, expected: str | None
) -> None:
    params = GenerateParams("hello", 9, proposer=asked)
    request, response = receive(params, engine_with(names), proposer=default)
    assert request.proposers[:1] == (() if expected is None else (expected,))
    assert request.max_draft_len == (0 if expected is None else 7)
    assert response.no_speculation == ""


@pytest.mark.parametrize(
    ("asked", "limit", "of_target", "of_proposer", "expected"),
    [(None, 7, 8, 8, 7), (3, 7, 8, 8, 3), (9, 7, 8, 8, 7), (9, 7, 5, 8, 5), (9, 7, 5, 4, 4)],
)
def test_the_least_limit_on_drafts_holds(
    asked: int | None, limit: int, of_target: int, of_proposer: int, expected: int
) -> None:
    engine = engine_with(max_draft_len=of_proposer)
    engine = replace(engine, target=FakeTarget(replace(CAPABILITIES, max_draft_len=of_target)))
    limits = LimitsConfig(max_context_len=256, max_draft_len=limit)
    request, _ = receive(GenerateParams("hello", 9, num_draft_tokens=asked), engine, limits)
    assert request.max_draft_len == expected


@pytest.mark.parametrize(
    ("changes", "is_speculated"),
    [({}, True), ({"temperature": 1.0}, False), ({"frequency_penalty": 1.0}, False)],
)
def test_why_a_request_is_not_speculated_on(changes: dict[str, float], is_speculated: bool) -> None:
    engine = engine_with(verifies_sampling=False)
    params = replace(GenerateParams("hello", 9), **changes)  # type: ignore[arg-type]
    request, response = receive(params, engine)
    assert bool(request.proposers) is is_speculated
    assert ("plain greedy" in response.no_speculation) is not is_speculated


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (GenerateParams("hello", 9, proposer="oracle"), ["proposer", "'oracle'", "draft_model"]),
        (GenerateParams("hello", 9, min_tokens=10), ["min_tokens", "got 10", "max_tokens", "9"]),
        (GenerateParams("hello", 255), ["max_tokens", "at most 254"]),
        (GenerateParams("hello", 9, end_id=10**6), ["end_id", "1000000", "in -1.."]),
        (GenerateParams("hello", 9, stop_token_ids=(10**6,)), ["stop_token_ids", "in 0.."]),
        (GenerateParams("hello", 9, bad_words=("",)), ["bad_words"]),
        (
            GenerateParams("hello", 9, bias_words=("",), bias_weights=(1.0,)),
            ["embedding_bias_words"],
        ),
    ],
)
def test_refused_by_name(params: GenerateParams, words: list[str]) -> None:
    with pytest.raises(InvalidField) as caught:
        receive(params)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("min_p", {"min_p": 0.1}),
        ("bad_words", {"bad_words": ("x",)}),
        ("embedding_bias_words", {"bias_words": ("x",), "bias_weights": (1.0,)}),
        ("return_log_probs", {"return_log_probs": True}),
    ],
)
def test_what_the_engine_cannot_do_is_refused(field: str, changes: dict[str, object]) -> None:
    """At its default the field is no reason."""
    engine = engine_with(unsupported=frozenset({field}))
    receive(GenerateParams("hello", 9), engine)
    with pytest.raises(InvalidField, match=f"{field}: .*this engine does not support it"):
        receive(replace(GenerateParams("hello", 9), **changes), engine)  # type: ignore[arg-type]


def test_bias_of_a_token_in_several_words_adds_up() -> None:
    """`hello` is (hel, lo) and `lo` alone another token, or the same: whatever it is, it adds."""
    word = tuple(TOKENIZER.encode("hello", add_special_tokens=False).ids)
    other = tuple(TOKENIZER.encode("lo", add_special_tokens=False).ids)
    params = GenerateParams("x", 5, bias_words=("hello", "lo"), bias_weights=(1.5, -4.0))
    expected = dict.fromkeys(word, 1.5)
    for token in other:
        expected[token] = expected.get(token, 0.0) - 4.0
    assert dict(receive(params)[0].sampling.logit_bias) == expected


def test_a_bad_word_is_banned_with_and_without_a_space() -> None:
    words = receive(GenerateParams("x", 5, bad_words=("hello",)))[0].sampling.bad_words
    spelled = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in ("hello", " hello")]
    assert sorted(words) == sorted(map(tuple, spelled))


@pytest.mark.parametrize(
    ("of_target", "of_draft", "limit", "own_limit", "capacity"),
    [
        # 3 rows of 100 tokens: all full, in both caches
        (10, 2, None, None, 300 * 12),
        # a limit in tokens of the target's cache; the draft's share of it comes off
        (10, 2, 200, None, 2000),
        (10, 2, 200, 150, 1500),
        (10, 2, None, 150, 1500),
        # of a target that cannot tell, tokens are worth nothing: the limit is none of the draft's
        (0, 2, None, None, 600),
        (0, 2, 200, None, 600),
        (0, 0, 200, None, 0),
    ],
)
def test_the_budget(
    of_target: int, of_draft: int, limit: int | None, own_limit: int | None, capacity: int
) -> None:
    engine = engine_with(
        max_sequences=3, bytes_per_token=of_target, max_cache_tokens=own_limit, max_context_len=120
    )
    proposer = FakeProposer(0.5, vocab_size=VOCAB_SIZE, bytes_per_token=of_draft)
    engine = replace(engine, proposers={"draft_model": proposer})
    limits = LimitsConfig(max_context_len=100, max_cache_tokens=limit)
    budget = cache_budget(engine, limits)
    assert (budget.capacity, budget.target_bytes) == (capacity, of_target)
    assert budget.largest_draft_bytes == of_draft


def test_what_the_whole_cache_cannot_hold_is_refused() -> None:
    """The budget is 20 tokens, the context limit 100: prompt and max_tokens share the 20."""
    engine = engine_with(bytes_per_token=4)
    limits = LimitsConfig(max_context_len=100, max_cache_tokens=20)
    receive(GenerateParams("hello", 18), engine, limits)
    with pytest.raises(InvalidField, match="max_tokens: got 19, must be at most 18"):
        receive(GenerateParams("hello", 19), engine, limits)


def test_requests_are_sorted_by_what_the_client_says_or_by_how_they_are_drawn() -> None:
    intake = Intake(engine_with(), LimitsConfig(), Defaults("fixed:3", "draft_model"))

    def kind(**fields: object) -> str:
        params = GenerateParams("hello", 4, **fields)  # type: ignore[arg-type]
        return intake.receive(params, LocalSink()).request.cohort

    assert kind() == "greedy"
    assert len({kind(), kind(temperature=0.2), kind(temperature=0.9)}) == 3
    assert kind(workload="mine") == kind(workload="mine", temperature=0.9) == "workload mine"
