"""Requests to values, and replies to tensors, against a fake of Triton's module."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_triton import codec, request
from fuzz_values import NOT_UTF8, OPTIONAL, SPECS, invalid_values, valid_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from smartspec_py.api.contract import GATEWAY, OUTPUTS
from smartspec_py.api.inputs import FIELDS, GenerateParams
from smartspec_py.api.tensor_spec import NUMPY_TYPES
from smartspec_py.core.types import FinishReason, SpecMetrics, TokenLogProb, Verification
from smartspec_py.serving.messages import Progress, Reply
from smartspec_py.serving.request import ErrorCode, FieldError, RequestError

REQUIRED = {"text_input": "Question:", "max_tokens": 4}
ALL_OUTPUTS = {spec.name: spec for spec in OUTPUTS}


def decode(**fields: Any) -> GenerateParams:
    return codec.decode(request(REQUIRED | fields))


def test_fields_have_their_names_in_a_request() -> None:
    """Those whose names differ from the tensor's, or that are converted. The property below covers
    the others."""
    assert decode() == GenerateParams(text="Question:", max_tokens=4)
    found = decode(
        text_input="漢字 🙂",
        input_ids=[5, 0],
        request_priority=-100,
        seed=2**64 - 1,
        embedding_bias_words=["a", "b"],
        embedding_bias_weights=[-1000.0, 0.125],
        speculation_policy="fixed:3",
        lora_name="sql",
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
        adapter="sql",
        verification=Verification.REJECTION,
        exclude_input=False,
        num_token_log_probs=5,
        prompt_log_probs=True,
        spec_metrics=SpecMetrics.DETAILED,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1, "stop_token_ids": [], "stop_words": [""], "bad_words": ["", ""]},
        {"embedding_bias_words": [""], "embedding_bias_weights": [0.0], "beam_width": 1},
        {"length_penalty": 0.0, "use_draft_logits": False, "guided_decoding_guide": ""},
    ],
)
def test_values_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert decode(**fields) == decode()


def test_numbers_are_those_of_the_client() -> None:
    """FP32 holds 0.01 as 0.0099999998, which is below the range."""
    found = decode(repetition_penalty=0.01, temperature=0.7)
    assert (found.repetition_penalty, found.temperature) == (0.01, 0.7)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text_input": NOT_UTF8}, "text_input: got b'\\xff\\xfe\\xfd', must be valid UTF-8"),
    ({"text_input": ["a", "b"]}, "text_input: got 2 values, must be one value"),
    ({"max_tokens": []}, "max_tokens: got 0 values, must be one value"),
    ({"max_tokens": 0}, "max_tokens: got 0, must be at least 1"),
    ({"temperature": float("nan")}, "temperature: got nan, must be finite and at least 0"),
    ({"top_k": -2}, "top_k: got -2, must be at least -1 (0 or -1: off)"),
    ({"top_p": -0.5}, "top_p: got -0.5, must be in [0, 1]"),
    ({"stop_token_ids": [7, -1]}, "stop_token_ids: got -1, must be at least 0"),
    ({"stop_words": ["a", ""]}, "stop_words: got '', must be at least one character"),
    ({"stop_words": ["a"] * 17}, "stop_words: got 17 elements, must be a list of at most 16"),
    ({"bad_words": ["a" * 1025]}, "bad_words: got 'aaa"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: got '0 weights', must be as many"),
    ({"embedding_bias_weights": [1.0]}, "embedding_bias_weights: got '1 weights', must be as many"),
    ({"verification": "Coupled"}, "verification: got 'Coupled', must be coupled or rejection"),
    ({"beam_width": 2}, "beam_width: got 2, must be 1 (beam search is not supported)"),
    ({"return_context_logits": True}, "return_context_logits: got True, must be false (logits"),
]


@pytest.mark.parametrize(("fields", "start"), REFUSED, ids=lambda item: str(item)[:40])
def test_errors_name_field_value_and_range(fields: dict[str, Any], start: str) -> None:
    with pytest.raises(FieldError) as raised:
        decode(**fields)
    assert str(raised.value).startswith(start)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "parameters", "message"),
    [
        ({"max_tokens": 1}, {}, "^text_input: required"),
        ({"top_k": 1}, {}, "^text_input and max_tokens: required"),
        (REQUIRED, {"lora_weights": 1}, "lora_weights: not supported"),
        (REQUIRED, {"best_of": 1}, "unknown parameter 'best_of'"),
        (REQUIRED, {"early_stopping": False, "zeta": False}, "unknown parameter 'zeta'"),
    ],
)
def test_missing_tensors_and_parameters_are_named(
    fields: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        codec.decode(request(fields, **parameters))
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert codec.decode(request(REQUIRED, early_stopping=False, id="mine")) == decode()


def shortest(value: Any) -> Any:
    """The number with the fewest digits that FP32 holds as this one, or a list of them."""
    return [*map(shortest, value)] if isinstance(value, list) else float(str(np.float32(value)))


def expected(fields: dict[str, Any]) -> GenerateParams:
    """What the values are once they were FP32."""
    params: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            continue
        if SPECS[name].dtype == "FP32":
            value = shortest(value)
        params[FIELDS[name]] = tuple(value) if SPECS[name].is_list else SPECS[name].convert(value)
    return GenerateParams(**params)


names = st.lists(st.sampled_from(OPTIONAL), unique=True)
# A seed and not st.randoms: the many draws of long lists are not worth shrinking.
chance = st.integers(0, 2**32).map(random.Random)


@settings(deadline=None)
@given(names=names, rng=chance)
def test_any_valid_fields_decode_to_themselves_and_an_invalid_one_is_named(
    names: list[str], rng: random.Random
) -> None:
    fields = valid_fields(rng, [*REQUIRED, *names])
    assert codec.decode(request(fields)) == expected(fields)
    bad = rng.choice([name for name in SPECS if invalid_values(SPECS[name])])
    fields[bad] = rng.choice(invalid_values(SPECS[bad]))
    with pytest.raises(FieldError, match=rf"^{bad}: got ") as raised:
        codec.decode(request(fields))
    assert len(str(raised.value)) < 300


PARAMS = GenerateParams("", 9)
PERF = replace(PARAMS, return_perf_metrics=True)
TOKENS = replace(
    PARAMS,
    return_log_probs=True,
    num_token_log_probs=1,
    return_output_ids=True,
    spec_metrics=SpecMetrics.DETAILED,
    return_num_input_tokens=False,
    return_num_output_tokens=False,
)
PIECE = Reply(
    PARAMS,
    text="né",
    tokens=(7, 8),
    log_probs=(TokenLogProb(7, -0.5, ((9, -0.25),)), TokenLogProb(8, -1.25)),
    prompt_log_probs=(TokenLogProb(1, -2.0),),
    progress=Progress(3, 8, 2, "heads", 4, 1.0, 2.0, 3.0, 4e9),
    cum_log_prob=-7.5,
    seed=2**64 - 1,
    num_input_tokens=5,
    no_speculation="no draft",
)
LAST = replace(PIECE, finish_reason=FinishReason.DEADLINE, spec_metrics='{"a": 1}')

COUNTS = {"num_input_tokens": 0, "num_output_tokens": 2}
ALWAYS = {
    "text_output": "né".encode(),
    "finish_reason": b"",
    "acceptance_rate": 0.25,
    "total_accepted_draft_tokens": 2,
    "total_draft_tokens": 8,
    "num_steps": 3,
    "seed": 2**64 - 1,
}
END = {
    "num_input_tokens": 5,
    "num_output_tokens": 2,
    "finish_reason": b"deadline",
    "num_cached_tokens": 4,
}
MORE_AT_END = {"metrics": b'{"a": 1}', "no_speculation": b"no draft"}
TIMES = [f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")]
BLOCKS = dict.fromkeys(
    [f"kv_cache_{name}_blocks" for name in ("alloc_new", "reused", "alloc_total")], 0
)
OF_TOKENS = {
    "output_ids": [7, 8],
    "output_log_probs": [-0.5, -1.25],
    "cum_log_probs": -7.5,
    "token_log_probs": b'{"prompt":[[1,-2.0,[]]],"output":[[7,-0.5,[[9,-0.25]]],[8,-1.25,[]]]}',
    "proposer": b"heads",
}
SPENT = dict(zip(TIMES, (10**9, 2 * 10**9, 3 * 10**9, 4 * 10**18), strict=True))


@pytest.mark.parametrize(
    ("reply", "outputs"),
    [
        (PIECE, ALWAYS | COUNTS),
        (replace(PIECE, progress=Progress()), ALWAYS | COUNTS | dict.fromkeys([*ALWAYS][2:6], 0)),
        (LAST, ALWAYS | END | MORE_AT_END),
        (replace(LAST, spec_metrics="", no_speculation=""), ALWAYS | END),
        (replace(PIECE, params=PERF), ALWAYS | COUNTS | dict.fromkeys(TIMES, 0) | BLOCKS),
        (replace(LAST, params=PERF), ALWAYS | END | MORE_AT_END | SPENT | BLOCKS),
        (replace(PIECE, params=TOKENS), ALWAYS | OF_TOKENS),
        (replace(LAST, explanation="a trace"), {"explanation": b"a trace"}),
    ],
)
def test_replies_have_what_applies_and_is_wanted(reply: Reply, outputs: dict[str, Any]) -> None:
    """Each as [1, 1], or [1, 1, n] of a list, and of the table's type; the text is [1]."""
    found = {t.name(): t.as_numpy() for t in codec.encode(reply, ALL_OUTPUTS).output_tensors}
    values = {name: array.ravel().tolist() for name, array in found.items()}
    assert values == {n: v if isinstance(v, list) else [v] for n, v in outputs.items()}
    for name, array in found.items():
        length = (len(outputs[name]),) if isinstance(outputs[name], list) else ()
        assert array.shape == ((1,) if name == "text_output" else (1, 1, *length))
        assert array.dtype == NUMPY_TYPES[ALL_OUTPUTS[name].dtype]
    wanted = {"text_output", "num_steps", "metrics"}
    sent = [tensor.name() for tensor in codec.encode(reply, wanted).output_tensors]
    assert set(sent) == wanted & outputs.keys()


@pytest.mark.parametrize("code", ErrorCode)
def test_errors(code: ErrorCode) -> None:
    response = codec.encode_error(code, "what it was")
    assert response.error.message == "what it was"
    assert code.name.lower().startswith(response.error.code)
    assert response.output_tensors == []
    found = codec.encode_error(code, "what it was", is_gateway=True).error
    assert found.message == f"{code.value}: what it was"
    assert found.code == response.error.code


@pytest.mark.parametrize(
    ("parameters", "wanted", "is_gateway"),
    [
        ({}, {"seed"}, False),
        ({GATEWAY: ""}, {"seed"}, True),
        ({GATEWAY: "seed,num_steps"}, {"seed"}, True),
    ],
)
def test_the_gateway_names_the_outputs(
    parameters: dict[str, str], wanted: set[str], is_gateway: bool
) -> None:
    """It is a parameter of the request. What Triton does not expect is not sent."""
    asked = request(REQUIRED, **parameters)
    assert codec.wanted_outputs(asked) == (wanted, is_gateway)
    assert codec.decode(asked) == decode()


def test_a_parameter_of_the_gateway_of_another_type_is_refused() -> None:
    """As an answer, so what makes the answer must not fail first."""
    asked = request(REQUIRED, **{GATEWAY: 1})
    assert codec.wanted_outputs(asked) == ({"seed"}, False)
    with pytest.raises(RequestError, match="unknown parameter"):
        codec.decode(asked)
