"""From what a client sent to what the loop runs: lengths, defaults, proposers, and the budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from harness import CAPABILITIES, TOKENIZER, VOCAB_SIZE, fake_engine
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig
from smartspec_py.core.types import SamplingParams, Verification
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.intake import Intake, cache_budget
from smartspec_py.serving.messages import Reply
from smartspec_py.serving.request import FieldError, Request
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_proposer import FakeProposer
from smartspec_testing.local import LocalSink

HELLO = TOKENIZER.encode("hello").ids
"""Two tokens."""
LIMITS = LimitsConfig(max_context_len=256)


def engine_with(
    names: Sequence[str] = ("draft_model",), max_draft_len: int = 8, **capabilities: Any
) -> Engine:
    """A fake engine with proposers of these names, and a target with these capabilities."""
    target = FakeTarget(replace(CAPABILITIES, **capabilities))
    made = {n: FakeProposer(0.5, vocab_size=VOCAB_SIZE, max_draft_len=max_draft_len) for n in names}
    return replace(fake_engine(), target=target, proposers=made)


def receive(
    engine: Engine | None = None,
    limits: LimitsConfig = LIMITS,
    default: str = "draft_model",
    **fields: Any,
) -> tuple[Request, Reply]:
    """The request for the loop, and what is equal in all its replies.

    At second 5 of the clock; the server's policy is fixed:3.
    """
    intake = Intake(engine or engine_with(), limits, "fixed:3", default, clock=lambda: 5.0)
    params = GenerateParams(**{"text": "hello", "max_tokens": 9} | fields)
    request, response = intake.receive(params, LocalSink())
    return request, response.common


def test_what_is_left_out_is_the_server_s() -> None:
    request, response = receive()
    assert (request.policy, request.proposers) == ("fixed:3", ("draft_model",))
    assert (request.max_draft_len, request.reuses_prefix) == (7, True)
    assert (request.tokens, request.num_prompt, request.max_tokens) == (HELLO, 2, 9)
    assert (request.arrival_s, request.deadline_s, request.priority) == (5.0, None, 0)
    assert response.seed == request.sampling.seed > 0
    assert (response.num_input_tokens, response.no_speculation) == (2, "")


def test_what_is_set_is_taken() -> None:
    """Log-probabilities of a prompt need all of it, so that its prefix is not reused."""
    request, _ = receive(
        policy="none",
        priority=2,
        deadline_ms=1500,
        tpot_slo_ms=20.0,
        seed=7,
        min_tokens=4,
        verification=Verification.REJECTION,
        num_token_log_probs=3,
        prompt_log_probs=True,
    )
    assert (request.policy, request.priority, request.deadline_s) == ("none", 2, 6.5)
    assert (request.slo_s_per_token, request.reuses_prefix) == (0.02, False)
    assert request.sampling == SamplingParams(
        seed=7,
        min_tokens=4,
        verification=Verification.REJECTION,
        log_probs=True,
        num_top_log_probs=3,
        prompt_log_probs=True,
    )
    assert not receive(reuse_prefix=False)[0].reuses_prefix


def test_a_long_prompt_does_not_block_other_threads() -> None:
    """The loop, and the beats by which the launcher knows that the server lives."""
    text = "so it goes, word after word; " * 20_000
    turns, is_over = [0], threading.Event()

    def turn() -> None:
        while not is_over.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=turn)
    other.start()
    limits = LimitsConfig(max_context_len=1_000_000)
    request, _ = receive(engine_with(max_context_len=1_000_000), limits, text=text)
    is_over.set()
    other.join()
    assert request.num_prompt > 100_000
    assert turns[0] > 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"bad_words": ("x" * 1024,) * 17},
            "bad_words: got '17408 bytes', must be at most 16384 in",
        ),
        (
            {"bias_words": ("x" * 1024,) * 17, "bias_weights": (1.0,) * 17},
            "embedding_bias_words: got '17408 bytes', must be at most 16384 in all",
        ),
        (
            {"num_token_log_probs": 20, "max_tokens": 50_000},
            "return_token_log_probs: got 20, must be less: a response with 50000 tokens would have "
            "1100000 values, and may have 1048576; set stream, or lower max_tokens",
        ),
        (
            {
                "num_token_log_probs": 20,
                "prompt_log_probs": True,
                "stream": True,
                "text": "",
                "prompt_ids": (1,) * 50_000,
            },
            "return_token_log_probs: got 20, must be less: a response with 50000 tokens would",
        ),
    ],
)
def test_products_of_allowed_values_are_bounded(fields: dict[str, Any], message: str) -> None:
    engine = engine_with(max_context_len=100_000)
    with pytest.raises(FieldError) as raised:
        receive(engine, LimitsConfig(max_context_len=100_000), **fields)
    assert str(raised.value).startswith(message)


def test_log_probs_of_a_whole_context_are_allowed() -> None:
    engine, limits = engine_with(max_context_len=40_000), LimitsConfig(max_context_len=40_000)
    receive(engine, limits, num_token_log_probs=20, max_tokens=39_000)
    receive(engine, limits, num_token_log_probs=20, max_tokens=39_000, stream=True)


def test_a_prompt_of_tokens_is_not_tokenized() -> None:
    request, response = receive(text="", prompt_ids=(5, 3, 3))
    assert request.tokens == [5, 3, 3]
    assert request.num_prompt == response.num_input_tokens == 3
    # An empty text is served if the tokenizer adds a start token.
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 5)])
    engine = replace(engine_with(), tokenizer=tokenizer)
    assert receive(engine, text="")[0].tokens == [5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "text_input: got '', must be text of at least one token, or use input_ids"),
        ({"text": "a", "prompt_ids": (1,)}, "input_ids: got 1 tokens, must be left out"),
        ({"text": "", "prompt_ids": (10**6,)}, "input_ids: got 1000000, must be in 0..2047"),
        ({"text": "", "prompt_ids": (1,) * 5000}, "input_ids: got 5000 tokens, must be at most"),
        (
            {"text": "", "prompt_ids": (1,), "exclude_input": False},
            "exclude_input_in_output: got False, must be true with input_ids",
        ),
        # A long text is refused before it is tokenized, which would delay others.
        ({"text": "x" * 16_385}, "text_input: got '16385 bytes', must be at most 16384 bytes"),
        ({"text": "ab " * 300}, "tokens, must be at most 255 tokens"),
        ({"max_tokens": 255}, "max_tokens: got 255, must be at most 254: the prompt has 2 tokens"),
        ({"min_tokens": 10}, "min_tokens: got 10, must be at most max_tokens, which is 9"),
        ({"proposer": "oracle"}, "proposer: got 'oracle', must be draft_model"),
        ({"policy": "fixed:0"}, "speculation_policy: got 'fixed:0', must be"),
        ({"end_id": 10**6}, "end_id: got 1000000, must be in -1..2047"),
        ({"end_id": -2}, "end_id: got -2, must be in -1..2047"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids: got 1000000, must be in 0..2047"),
        ({"bad_words": ("",)}, "bad_words: got '', must be text of at least one token"),
    ],
)
def test_errors_name_field_value_and_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as raised:
        receive(**fields)
    assert message in str(raised.value)


def test_an_adapter_is_one_of_the_server() -> None:
    engine = engine_with(adapters=("sql", "chat"))
    assert receive(engine)[0].adapter == ""
    assert receive(engine, adapter="chat")[0].adapter == "chat"
    with pytest.raises(FieldError, match="lora_name: got 'other', must be sql or chat"):
        receive(engine, adapter="other")
    with pytest.raises(FieldError, match="lora_name: got 'sql', must be left out: this server"):
        receive(adapter="sql")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("min_p", {"min_p": 0.1}),
        ("embedding_bias_words", {"bias_words": ("x",), "bias_weights": (1.0,)}),
    ],
)
def test_what_the_engine_cannot_do_is_refused(field: str, fields: dict[str, Any]) -> None:
    """At its default the field is no reason."""
    engine = engine_with(unsupported=frozenset({field}))
    receive(engine)
    with pytest.raises(FieldError, match=f"{field}: .*this engine does not support it"):
        receive(engine, **fields)


@pytest.mark.parametrize(
    ("end_id", "ignore_eos", "end_tokens"),
    [(None, False, [42, 43]), (7, False, [7]), (-1, False, []), (None, True, []), (7, True, [])],
)
def test_the_end_tokens(end_id: int | None, ignore_eos: bool, end_tokens: list[int]) -> None:
    """A request's end_id replaces all of the model's. Its stop_token_ids are added, and stop words
    that are special tokens, which are no text."""
    engine = replace(engine_with(), end_tokens=(42, 43))
    for more, words in (((), ()), ((5, 5, 42), ("<|end|>", "hello"))):
        request, _ = receive(
            engine, end_id=end_id, ignore_eos=ignore_eos, stop_token_ids=more, stop_words=words
        )
        named = [TOKENIZER.token_to_id("<|end|>")] if words else []
        assert request.sampling.end_tokens == tuple(dict.fromkeys([*end_tokens, *more, *named]))


BOTH = ("draft_model", "prompt_lookup")


@pytest.mark.parametrize(
    ("names", "default", "asked", "expected"),
    [
        (BOTH, "draft_model", None, ["draft_model"]),
        (BOTH, "auto", None, ["draft_model", "prompt_lookup"]),
        (BOTH, "auto", "prompt_lookup", ["prompt_lookup"]),
        (("prompt_lookup",), "auto", None, ["prompt_lookup"]),
        ((), "auto", None, []),
    ],
)
def test_who_drafts(
    names: Sequence[str], default: str, asked: str | None, expected: list[str]
) -> None:
    """The planner may choose another one if neither the client nor engine.json names one."""
    request, response = receive(engine_with(names), default=default, proposer=asked)
    assert list(request.proposers) == expected
    assert request.max_draft_len == (7 if expected else 0)
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
    assert receive(engine, limits, num_draft_tokens=asked)[0].max_draft_len == expected


@pytest.mark.parametrize(
    ("fields", "is_speculated"),
    [({}, True), ({"temperature": 1.0}, False), ({"frequency_penalty": 1.0}, False)],
)
def test_why_a_request_cannot_use_speculation(
    fields: dict[str, float], is_speculated: bool
) -> None:
    request, response = receive(engine_with(verifies_sampling=False), **fields)
    assert bool(request.proposers) is is_speculated
    assert ("plain greedy" in response.no_speculation) is not is_speculated


def test_words_become_tokens() -> None:
    """The biases of a token in several words add up. A bad word is banned with and without a
    space. A top_p of 0 is greedy."""
    hel, lo = HELLO
    sampling = receive(
        bias_words=("hello", "hel"),
        bias_weights=(1.5, -4.0),
        bad_words=("hello",),
        temperature=1.0,
        top_p=0.0,
    )[0].sampling
    assert dict(sampling.logit_bias) == {hel: -2.5, lo: 1.5}
    assert set(sampling.bad_words) == {(hel, lo), tuple(TOKENIZER.encode(" hello").ids)}
    assert (sampling.is_greedy, sampling.top_p) == (True, 1.0)


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
    budget = cache_budget(engine, LimitsConfig(max_context_len=100, max_cache_tokens=limit))
    assert (budget.capacity, budget.target_bytes) == (capacity, of_target)
    assert budget.largest_draft_bytes == of_draft


def test_what_the_whole_cache_cannot_hold_is_refused() -> None:
    """The budget is 20 tokens, the context limit 100: prompt and max_tokens share the 20."""
    engine = engine_with(bytes_per_token=4)
    limits = LimitsConfig(max_context_len=100, max_cache_tokens=20)
    receive(engine, limits, max_tokens=18)
    with pytest.raises(FieldError, match="max_tokens: got 19, must be at most 18"):
        receive(engine, limits, max_tokens=19)


def test_acceptance_groups_are_by_workload_or_by_temperature() -> None:
    def group(**fields: Any) -> str:
        return receive(**fields)[0].acceptance_group

    assert group() == "greedy"
    assert len({group(), group(temperature=0.2), group(temperature=0.9)}) == 3
    assert group(workload="mine") == group(workload="mine", temperature=0.9) == "workload mine"


def test_acceptance_groups_are_by_adapter() -> None:
    engine = engine_with(adapters=("sql", "chat"))
    fields: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"workload": "mine"}]
    found = {
        receive(engine, adapter=adapter, **each)[0].acceptance_group
        for adapter in (None, "sql", "chat")
        for each in fields
    }
    assert len(found) == 9
