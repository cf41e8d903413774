"""Cost models without a machine: numbers by hand, and what must hold for all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from smartspec_sim.hardware import (
    COMPUTE_SHARE,
    GPUS,
    KV_SHARE,
    MEMORY_SHARE,
    MODELS,
    HardwareError,
    check_fits,
    gpu_hardware,
    roofline,
)


def test_the_published_fit_by_hand() -> None:
    """8 rows of 4 tokens, 1,000 of context: 32 x 18.44 us - 8 x 43.31 us + 6.939 ms = 7.1826 ms,
    and 8,000 x 48.59 ns = 0.3887 ms."""
    cost = gpu_hardware("h100", 1, "llama-3-8b", None, 32).cost
    assert cost.target_s(8, 32, 0) == pytest.approx(7.1826e-3, rel=1e-4)
    assert cost.target_s(8, 32, 1000) == pytest.approx(7.5713e-3, rel=1e-4)


def test_the_roofline_by_hand() -> None:
    """Llama-3-8B on an A100-80GB: 16.06 GB at 0.69 x 2.039 TB/s are 11.42 ms; a token is 16.06
    GFLOP at 0.88 x 312 TFLOP/s, 58.5 us, so that reading lasts as long as 195 tokens."""
    pass_s = roofline(MODELS["llama-3-8b"], GPUS["a100-80gb"], 1)
    assert pass_s(1, 1) == pytest.approx(11.415e-3, rel=1e-3)
    assert pass_s(32, 195) == pass_s(1, 1)
    assert pass_s(1, 512) == pytest.approx(512 * 58.494e-6, rel=1e-3)


def test_the_shares_are_those_of_the_published_fit() -> None:
    gpu, model = GPUS["h100"], MODELS["llama-3-8b"]
    assert model.weight_bytes / gpu.bandwidth / 6.939e-3 == pytest.approx(MEMORY_SHARE, abs=0.01)
    assert model.kv_bytes / gpu.bandwidth / 4.859e-8 == pytest.approx(KV_SHARE, abs=0.01)
    assert 2 * model.parameters / gpu.flops / 1.844e-5 == pytest.approx(COMPUTE_SHARE, abs=0.01)


PAIRS = [
    ("h100", 1, "llama-3-8b", "eagle"),
    ("h100", 4, "llama-3.1-70b", "llama-3.2-1b"),
    ("a100-80gb", 1, "vicuna-7b", "llama-160m"),
    ("l40s", 1, "vicuna-7b", "llama-160m"),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_no_pass_takes_less_than_a_smaller_one(pair: tuple[str, int, str, str]) -> None:
    """In rows at each number of tokens a row, in tokens at each number of rows, and in context:
    also across row 32, where the published fit ends."""
    cost = gpu_hardware(*pair, 128).cost
    for tokens in (1, 2, 5, 8):
        by_rows = [cost.target_s(rows, rows * tokens, 500) for rows in range(1, 129)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(by_rows))
    for rows in (1, 8, 33, 100):
        by_tokens = [cost.target_s(rows, tokens, 500) for tokens in range(rows, 16 * rows)]
        assert all(a <= b for a, b in pairwise(by_tokens))
    by_rows = [cost.draft_s(rows) for rows in range(1, 129)]
    assert all(a <= b for a, b in pairwise(by_rows))
    assert cost.target_s(8, 8, 1000) > cost.target_s(8, 8, 500) > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("b17", 1, "llama-3-8b", None, 8), "--gpu: 'b17'"),
        (("h100", 1, "gpt-9", None, 8), "--model: 'gpt-9'"),
        (("h100", 1, "llama-3-8b", "gpt-9", 8), "--draft: 'gpt-9'"),
        (("h100", 1, "vicuna-7b", "eagle", 8), "--draft: eagle"),
        # 141.2 GB of weights, and 72 GB usable.
        (("h100", 1, "llama-3.1-70b", None, 8), "1 x h100 can hold only 72.0 GB"),
    ],
)
def test_what_does_not_exist_or_fit_says_so(arguments: tuple[object, ...], word: str) -> None:
    with pytest.raises(HardwareError, match=word):
        gpu_hardware(*arguments)  # type: ignore[arg-type]


def test_cache_that_does_not_fit_says_what_would() -> None:
    """An L4 has 21.6 GB usable, 16.06 of them weights. A token of Llama-3-8B is 131,072 bytes:
    there is room for 42,266 tokens, so for 20 rows of 2,048."""
    hardware = gpu_hardware("l4", 1, "llama-3-8b", None, 32)
    check_fits(hardware, 20, 2048)
    with pytest.raises(HardwareError, match="--rows to at most 20"):
        check_fits(hardware, 21, 2048)
