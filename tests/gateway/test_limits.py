"""Each limit: the last value that passes, and the first that does not."""

from __future__ import annotations

import pytest

from smartspec_gateway.limits import MAX_ELEMENTS, Limits, Refused
from smartspec_gateway.v2 import _FORWARDED, _GENERATE, _check_route
from smartspec_py.api.inputs import MAX_PROMPT_IDS
from smartspec_py.serving.intake import MAX_BYTES_PER_TOKEN

MODEL = "/v2/models/smartspec"
MIB = 1 << 20


def status_of(check: object, *arguments: object) -> int:
    """0 where nothing is refused."""
    try:
        check(*arguments)  # type: ignore[operator]
    except Refused as refused:
        return refused.status
    return 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 0),
        ("GET", "/v2/health/live", 0),
        ("GET", MODEL, 0),
        ("GET", MODEL + "/versions/1/ready", 0),
        ("GET", MODEL + "/config", 0),
        ("GET", "/v2/models/stats", 0),
        ("POST", MODEL + "/versions/1/generate", 0),
        ("POST", "/v2/models/tensorrt_llm_bls/generate_stream", 0),
        ("GET", MODEL + "/generate", 405),
        ("OPTIONS", "/v2", 405),
        ("POST", MODEL + "/infer", 501),
        ("POST", "/v2/repository/index", 404),
        ("POST", "/v2/repository/models/smartspec/unload", 404),
        ("POST", "/v2/systemsharedmemory/region/a/register", 404),
        ("GET", "/v2/trace/setting", 404),
        ("GET", "/v2/logging", 404),
        ("POST", MODEL + "/../../repository/index", 404),
        ("POST", "/v2/models/%2e%2e/generate", 404),
        ("POST", "/v2/models/" + "a" * 257 + "/generate", 404),
        ("POST", "/v2/models/é/generate", 404),
        ("GET", MODEL + "/ready\n", 404),
        ("GET", "http://other/v2", 404),
    ],
)
def test_routes(method: str, path: str, status: int) -> None:
    is_generate = _GENERATE.fullmatch(path) is not None
    assert not (is_generate and _FORWARDED.fullmatch(path))
    assert status_of(_check_route, method, path, is_generate) == status


@pytest.mark.parametrize(
    ("context_len", "expected"),
    [
        (0, 4 * MIB),
        (4096, 4 * MIB),
        (131_072, 131_072 * 6 * MAX_BYTES_PER_TOKEN),
        (1_000_000, 64 * MIB),
    ],
)
def test_a_body_has_room_for_the_longest_prompt(context_len: int, expected: int) -> None:
    """Each byte of the text as six."""
    found = Limits(context_len)
    assert found.max_body_bytes == expected
    assert status_of(found.check_size, expected) == 0
    assert status_of(found.check_size, expected + 1) == 413


def test_a_body_has_room_for_a_batch_of_token_ids() -> None:
    """128 prompts, as lm-eval sends them, and the longest single prompt."""
    limits = Limits(4096)
    for num in (128 * 4096, MAX_PROMPT_IDS, MAX_ELEMENTS):
        assert status_of(limits.check_elements, num) == 0
    assert status_of(limits.check_elements, MAX_ELEMENTS + 1) == 413
