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
from smartspec_py.core.types import FinishReason, SpecMetrics, TokenLogProb
from smartspec_py.serving.messages import Progress, Reply
from smartspec_py.serving.request import ErrorCode, GenerateParams, RequestError


@pytest.fixture(scope="module")
def codec() -> Iterator[ModuleType]:
    with codec_on_double() as module:
        yield module


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
PROGRESS = Progress(3, 8, 2, "heads", 4, 1.0, 2.0, 3.0, 4e9)
PIECE = Reply(
    PARAMS,
    text="né",
    tokens=(7, 8),
    log_probs=(TokenLogProb(7, -0.5, ((9, -0.25),)), TokenLogProb(8, -1.25)),
    prompt_log_probs=(TokenLogProb(1, -2.0),),
    progress=PROGRESS,
    cum_log_prob=-7.5,
    seed=2**64 - 1,
    num_input_tokens=5,
    no_speculation="no draft",
)
LAST = replace(PIECE, finish_reason=FinishReason.DEADLINE, spec_metrics='{"a": 1}')

NUM = {"num_input_tokens": 0, "num_output_tokens": 2}
ALWAYS = {
    "text_output": "né".encode(),
    "finish_reason": b"",
    "acceptance_rate": 0.25,
    "total_accepted_draft_tokens": 2,
    "total_draft_tokens": 8,
    "num_steps": 3,
    "seed": 2**64 - 1,
}
AT_END = {
    "finish_reason": b"deadline",
    "num_cached_tokens": 4,
    "metrics": b'{"a": 1}',
    "no_speculation": b"no draft",
}
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
    "drafter": b"heads",
}

REPLIES: list[tuple[Reply, dict[str, Any]]] = [
    (PIECE, ALWAYS | NUM),
    (
        replace(PIECE, progress=Progress()),
        ALWAYS | NUM | dict.fromkeys(list(ALWAYS)[2:6], 0),
    ),
    (LAST, ALWAYS | NUM | AT_END | {"num_input_tokens": 5}),
    (
        replace(LAST, spec_metrics="", no_speculation=""),
        ALWAYS | NUM | {"finish_reason": b"deadline", "num_cached_tokens": 4}
        | {"num_input_tokens": 5},
    ),
    (replace(PIECE, params=PERF), ALWAYS | NUM | dict.fromkeys(TIMES, 0) | BLOCKS),
    (
        replace(LAST, params=PERF),
        ALWAYS | NUM | AT_END | {"num_input_tokens": 5}
        | dict(zip(TIMES, (10**9, 2 * 10**9, 3 * 10**9, 4 * 10**18), strict=True)) | BLOCKS,
    ),
    (replace(PIECE, params=TOKENS), ALWAYS | OF_TOKENS),
    (replace(LAST, explanation="a trace"), {"explanation": b"a trace"}),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "outputs"), REPLIES)
def test_replies_have_what_applies(
    codec: ModuleType, reply: Reply, outputs: dict[str, Any]
) -> None:
    """Each as [1, 1], or [1, 1, n] of a list, and of the table's type; the text is [1]."""
    arrays = codec.encode(reply).arrays()
    found = {name: array.ravel().tolist() for name, array in arrays.items()}
    assert found == {
        name: value if isinstance(value, list) else [value] for name, value in outputs.items()
    }
    dtypes = {spec.name: NUMPY_TYPES[spec.dtype] for spec in OUTPUTS}
    for name, array in arrays.items():
        length = (len(outputs[name]),) if isinstance(outputs[name], list) else ()
        assert array.shape == ((1,) if name == "text_output" else (1, 1, *length))
        assert array.dtype == dtypes[name]


def test_only_requested_outputs_are_sent(codec: ModuleType) -> None:
    """Triton itself would free the others without Python's lock."""
    wanted = frozenset({"text_output", "num_steps", "metrics"})
    assert set(codec.encode(PIECE, wanted).arrays()) == {"text_output", "num_steps"}
    assert codec.encode(replace(LAST, explanation="trace"), wanted).arrays() == {}


@pytest.mark.parametrize("code", ErrorCode)
def test_errors(codec: ModuleType, code: ErrorCode) -> None:
    response = codec.encode_error(RequestError(code, "what it was"))
    assert response.error.message == "what it was"
    assert code.name.lower().startswith(response.error.code)
    assert response.output_tensors == []
