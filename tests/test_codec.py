"""Requests to values, against a fake of Triton's module: tables for each field, and a property
that says the same of any mixture of fields.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_triton import codec_on_double, request
from fuzz_values import NOT_UTF8, OPTIONAL, SPECS, invalid_values, valid_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from smartspec_py.api.inputs import FIELDS
from smartspec_py.core.types import SpecMetrics, Verification
from smartspec_py.serving.request import ErrorCode, GenerateParams, InvalidField, RequestError

REQUIRED = {"text_input": "Question:", "max_tokens": 4}


@pytest.fixture(scope="module")
def codec() -> Iterator[ModuleType]:
    with codec_on_double() as module:
        yield module


def decode(codec: ModuleType, **fields: Any) -> GenerateParams:
    params: GenerateParams = codec.decode(request(REQUIRED | fields))
    return params


def test_two_fields_are_enough(codec: ModuleType) -> None:
    assert decode(codec) == GenerateParams(text="Question:", max_tokens=4)


def test_fields_have_their_names_in_a_request(codec: ModuleType) -> None:
    """Those whose names differ from the tensor's, or that are converted. The property below covers
    the others."""
    found = decode(
        codec,
        text_input="漢字 🙂",
        input_ids=[5, 0],
        request_priority=-100,
        random_seed=2**64 - 1,
        embedding_bias_words=["a", "b"],
        embedding_bias_weights=[-1000.0, 0.125],
        speculation_policy="fixed:3",
        verification="rejection",
        exclude_input_in_output=False,
        return_token_log_probs=5,
        return_prompt_log_probs=True,
        return_spec_metrics="detailed",
    )
    assert found == GenerateParams(
        text="漢字 🙂",
        max_tokens=4,
        prompt_ids=(5, 0),
        priority=-100,
        seed=2**64 - 1,
        bias_words=("a", "b"),
        bias_weights=(-1000.0, 0.125),
        policy="fixed:3",
        verification=Verification.REJECTION,
        exclude_input=False,
        num_token_log_probs=5,
        prompt_log_probs=True,
        spec_metrics=SpecMetrics.DETAILED,
    )


NOTHING: list[dict[str, Any]] = [
    {"top_k": -1},
    {"stop_token_ids": []},
    {"stop_words": [""]},
    {"stop_words": []},
    {"bad_words": ["", ""]},
    {"embedding_bias_words": [""], "embedding_bias_weights": [0.0]},
    {"num_return_sequences": 1, "beam_width": 1, "length_penalty": 1.0},
    {"length_penalty": 0.0, "use_draft_logits": False, "return_context_logits": False},
    {"guided_decoding_guide_type": "", "guided_decoding_guide": "", "pad_id": -5},
]


@pytest.mark.parametrize("fields", NOTHING, ids=lambda fields: "+".join(fields))
def test_values_that_ask_for_nothing(codec: ModuleType, fields: dict[str, Any]) -> None:
    assert decode(codec, **fields) == decode(codec)


NO_NUMBER = float("nan")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [3, -1]}, "input_ids: got -1, must be at least 0"),
    ({"return_token_log_probs": 21}, "return_token_log_probs: got 21, must be in 0..20"),
    ({"text_input": NOT_UTF8}, "text_input: got b'\\xff\\xfe\\xfd', must be valid UTF-8"),
    ({"text_input": ["a", "b"]}, "text_input: got [1, 2], must be one value"),
    ({"max_tokens": []}, "max_tokens: got [1, 0], must be one value"),
    ({"max_tokens": 0}, "max_tokens: got 0, must be at least 1"),
    ({"temperature": NO_NUMBER}, "temperature: got nan, must be finite and at least 0"),
    ({"top_k": -2}, "top_k: got -2, must be at least -1 (0 or -1: off)"),
    ({"top_p": -0.5}, "top_p: got -0.5, must be in [0, 1]"),
    ({"stop_token_ids": [7, -1]}, "stop_token_ids: got -1, must be at least 0"),
    ({"stop_token_ids": [7] * 65}, "stop_token_ids: got '65 elements', must be a list of at most"),
    ({"min_p": 1.5}, "min_p: got 1.5, must be in [0, 1]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0, must be in [0.01, 100]"),
    ({"presence_penalty": 100.5}, "presence_penalty: got 100.5, must be in [-100, 100]"),
    ({"stop_words": ["a", ""]}, "stop_words: got '', must be at least one character"),
    ({"stop_words": ["a"] * 17}, "stop_words: got '17 elements', must be a list of at most 16"),
    ({"bad_words": ["a", NOT_UTF8]}, "bad_words: got b'\\xff\\xfe\\xfd', must be valid UTF-8"),
    ({"bad_words": ["a"] * 65}, "bad_words: got '65 elements', must be a list of at most 64"),
    ({"bad_words": ["a" * 1025]}, "bad_words: got 'aaa"),
    (
        {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
        "embedding_bias_weights: got '1 weights', must be as many as embedding_bias_words (2)",
    ),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: got '0 weights'"),
    ({"embedding_bias_weights": [1.0]}, "embedding_bias_weights: got '1 weights'"),
    (
        {"embedding_bias_words": ["a"], "embedding_bias_weights": [1001.0]},
        "embedding_bias_weights: got 1001.0, must be in [-1000, 1000]",
    ),
    ({"seed": 1, "random_seed": 2}, "random_seed: got 2, must be equal to seed, or left out"),
    ({"request_priority": 101}, "request_priority: got 101, must be in -100..100"),
    ({"deadline_ms": 0}, "deadline_ms: got 0, must be at least 1"),
    ({"verification": "Coupled"}, "verification: got 'Coupled', must be coupled or rejection"),
    (
        {"return_spec_metrics": ""},
        "return_spec_metrics: got '', must be none, summary or detailed",
    ),
    ({"speculation_policy": "p" * 65}, "speculation_policy: got 'ppp"),
    ({"proposer": ""}, "proposer: got '', must be at least one character"),
    ({"beam_width": 2}, "beam_width: got 2, must be 1 (beam search is not supported)"),
    ({"length_penalty": 0.5}, "length_penalty: got 0.5, must be 0 or 1 (beam search"),
    ({"return_context_logits": True}, "return_context_logits: got True, must be false (logits"),
    (
        {"guided_decoding_guide": "{}"},
        "guided_decoding_guide: got '{}', must be empty (guided decoding is not supported)",
    ),
]


@pytest.mark.parametrize(("fields", "start"), REFUSED, ids=lambda item: str(item)[:40])
def test_errors_name_field_value_and_range(
    codec: ModuleType, fields: dict[str, Any], start: str
) -> None:
    with pytest.raises(InvalidField) as raised:
        decode(codec, **fields)
    assert str(raised.value).startswith(start)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert len(str(raised.value)) < 300, "whatever was sent"


@pytest.mark.parametrize("missing", [["text_input"], ["max_tokens"], list(REQUIRED)])
def test_what_is_required_and_missing_is_named(codec: ModuleType, missing: list[str]) -> None:
    fields = {name: value for name, value in REQUIRED.items() if name not in missing}
    message = f"^{' and '.join(missing)}: required"
    with pytest.raises(RequestError, match=message) as raised:
        codec.decode(request(fields | {"top_k": 1, "seed": 2}))
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


def test_parameters_are_never_dropped(codec: ModuleType) -> None:
    for name, said in (
        ("lora_task_id", "LoRA"),
        ("best_of", "unknown parameter"),
        ("top_p", "tensor"),
    ):
        with pytest.raises(RequestError, match=name) as refused:
            codec.decode(request(REQUIRED, **{name: 1}))
        assert said in str(refused.value)
    with pytest.raises(RequestError, match="zeta"):
        codec.decode(request(REQUIRED, early_stopping=False, zeta=False))
    assert codec.decode(request(REQUIRED, early_stopping=False, id="mine")) == decode(codec)


def expected(fields: dict[str, Any]) -> GenerateParams:
    """What the values are once FP32 has rounded them."""
    params: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            continue
        if SPECS[name].dtype == "FP32":
            value = np.array(value, dtype=np.float32).tolist()
        params[FIELDS[name]] = tuple(value) if SPECS[name].is_list else SPECS[name].convert(value)
    return GenerateParams(**params)


names = st.lists(st.sampled_from(OPTIONAL), unique=True)
# A seed and not st.randoms: the many draws of long lists are not worth shrinking.
chance = st.integers(0, 2**32).map(random.Random)


@settings(deadline=None)
@given(names=names, rng=chance)
def test_any_valid_fields_decode_to_themselves(
    codec: ModuleType, names: list[str], rng: random.Random
) -> None:
    fields = valid_fields(rng, [*REQUIRED, *names])
    assert codec.decode(request(fields)) == expected(fields)


@settings(deadline=None)
@given(names=names, rng=chance)
def test_one_invalid_value_is_named(
    codec: ModuleType, names: list[str], rng: random.Random
) -> None:
    fields = valid_fields(rng, [*REQUIRED, *names])
    bad = rng.choice([name for name in SPECS if invalid_values(SPECS[name])])
    fields[bad] = rng.choice(invalid_values(SPECS[bad]))
    with pytest.raises(InvalidField, match=rf"^{bad}: got ") as raised:
        codec.decode(request(fields))
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, False), ({"health_check": False}, False), ({"health_check": True}, True)],
)
def test_a_health_check_is_known_before_it_is_decoded(
    codec: ModuleType, fields: dict[str, Any], expected: bool
) -> None:
    assert codec.asks_for_health(request(REQUIRED | fields)) is expected
    assert decode(codec, **fields).health_check is expected
