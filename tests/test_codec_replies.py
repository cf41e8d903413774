"""Replies and errors to tensors: what applies is there, in its type and shape, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from fake_triton import codec_on_double

from smartspec_py.api.contract import OUTPUTS
from smartspec_py.api.tensor_spec import NUMPY_TYPES
from smartspec_py.core.types import FinishReason
from smartspec_py.serving.messages import Progress, Reply, Summary, Times
from smartspec_py.serving.request import ErrorCode, RequestError


@pytest.fixture(scope="module")
def codec() -> Iterator[ModuleType]:
    with codec_on_double() as module:
        yield module


PIECE = Reply(
    text="né",
    num_output_tokens=2,
    num_input_tokens=0,
    progress=Progress(num_steps=3, num_drafted=8, num_accepted=2),
    seed=2**64 - 1,
)
ALWAYS = {
    "text_output": "né".encode(),
    "finish_reason": b"",
    "num_input_tokens": 0,
    "num_output_tokens": 2,
    "acceptance_rate": 0.25,
    "total_accepted_draft_tokens": 2,
    "total_draft_tokens": 8,
    "num_steps": 3,
    "seed": 2**64 - 1,
}
LAST = replace(
    PIECE,
    finish_reason=FinishReason.DEADLINE,
    num_input_tokens=5,
    summary=Summary(num_cached_tokens=4),
)
LAST_ALWAYS = ALWAYS | {"finish_reason": b"deadline", "num_input_tokens": 5, "num_cached_tokens": 4}

TIMES = [f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")]
BLOCKS = dict.fromkeys(
    [f"kv_cache_{name}_blocks" for name in ("alloc_new", "reused", "alloc_total")], 0
)

REPLIES: list[tuple[Reply, dict[str, Any]]] = [
    (PIECE, ALWAYS),
    (replace(PIECE, progress=Progress()), ALWAYS | dict.fromkeys(list(ALWAYS)[4:8], 0)),
    (replace(PIECE, times=Times()), ALWAYS | dict.fromkeys(TIMES, 0) | BLOCKS),
    (LAST, LAST_ALWAYS),
    (
        replace(
            LAST,
            times=Times(10, 20, 30, 2**62),
            summary=Summary(
                num_cached_tokens=4, spec_metrics='{"a": 1}', no_speculation="no draft"
            ),
        ),
        LAST_ALWAYS
        | {
            "arrival_time_ns": 10,
            "first_scheduled_time_ns": 20,
            "first_token_time_ns": 30,
            "last_token_time_ns": 2**62,
            **BLOCKS,
            "metrics": b'{"a": 1}',
            "no_speculation": b"no draft",
        },
    ),
]


@pytest.mark.parametrize(("reply", "outputs"), REPLIES)
def test_replies_have_what_applies(
    codec: ModuleType, reply: Reply, outputs: dict[str, Any]
) -> None:
    """Each as [1, 1] and of the table's type; the text is [1]."""
    arrays = codec.encode(reply).arrays()
    assert {name: array.item() for name, array in arrays.items()} == outputs
    dtypes = {spec.name: NUMPY_TYPES[spec.dtype] for spec in OUTPUTS}
    for name, array in arrays.items():
        assert array.shape == ((1,) if name == "text_output" else (1, 1))
        assert array.dtype == dtypes[name]


def test_log_probs_have_their_own_shape(codec: ModuleType) -> None:
    for log_probs in ((-0.5, -1.25), (-0.5,), ()):
        reply = replace(PIECE, log_probs=log_probs, cum_log_prob=-7.5)
        arrays = codec.encode(reply).arrays()
        assert arrays["output_log_probs"].shape == (1, 1, len(log_probs))
        assert arrays["output_log_probs"].ravel().tolist() == list(log_probs)
        assert arrays["cum_log_probs"].tolist() == [[-7.5]]


def test_tokens_and_their_proposer(codec: ModuleType) -> None:
    reply = replace(PIECE, output_ids=(7, 8), token_log_probs='{"output":[]}', proposer="heads")
    arrays = codec.encode(reply).arrays()
    assert arrays["output_ids"].tolist() == [[[7, 8]]]
    assert arrays["token_log_probs"].item() == b'{"output":[]}'
    assert arrays["proposer"].item() == arrays["drafter"].item() == b"heads"


def test_only_requested_outputs_are_sent(codec: ModuleType) -> None:
    """Triton itself would free the others without Python's lock."""
    wanted = frozenset({"text_output", "num_steps", "metrics"})
    assert set(codec.encode(PIECE, wanted).arrays()) == {"text_output", "num_steps"}
    assert codec.encode_explanation("trace", wanted).arrays() == {}
    assert set(codec.encode_explanation("trace").arrays()) == {"explanation"}


def test_counts_that_are_not_wanted_are_left_out(codec: ModuleType) -> None:
    reply = replace(LAST, num_input_tokens=None, num_output_tokens=None)
    left = set(LAST_ALWAYS) - {"num_input_tokens", "num_output_tokens"}
    assert set(codec.encode(reply).arrays()) == left


CODES = [
    (ErrorCode.INVALID_ARGUMENT, "invalid"),
    (ErrorCode.UNAVAILABLE, "unavailable"),
    (ErrorCode.INTERNAL, "internal"),
]


@pytest.mark.parametrize(("code", "wire"), CODES)
def test_errors(codec: ModuleType, code: ErrorCode, wire: str) -> None:
    response = codec.encode_error(RequestError(code, "what it was"))
    assert (response.error.message, response.error.code) == ("what it was", wire)
    assert response.output_tensors == []
