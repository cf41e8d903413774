"""The context length where engine.json does not set it: what models and memory allow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines.checkpoints.recurrent import StateShapes
from smartspec_py.engines.local import build as build_local
from smartspec_py.engines.local import context
from smartspec_py.engines.runtimes import machine
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.step import Reason
from smartspec_testing.local import generate, serving

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
CPU = torch.device("cpu")
LIMITS = LimitsConfig(max_sequences=32)
TARGET_BYTES, TOKEN_BYTES = (layers * 2 * 8 * 16 * 4 for layers in (3, 3 + 2))
"""Of keys and values of a token, of the target and of both models, in float32: layers, heads,
width."""


@pytest.mark.parametrize(
    ("context_len", "expected", "reason"),
    [
        (100_000, 2048, "all positions of target"),
        (2047, 1536, "32 rows of this length in 0.3 GiB for keys and values, 50% of what"),
        (1100, 1024, "; target has 2048 positions"),
        (600, 512, "32 rows of this length"),
        (-1000, 512, "32 rows of this length"),
    ],
)
def test_half_of_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch, context_len: int, expected: int, reason: str
) -> None:
    """By how long a context 32 rows would fill half of it; 512 are never gone below."""
    free = 2 * 32 * TOKEN_BYTES * context_len
    for name in ("target", "draft"):
        raw = (PAIR / name / "model.safetensors").read_bytes()
        num_header_bytes = 8 + int.from_bytes(raw[:8], "little")
        free += 2 * (len(raw) - num_header_bytes)  # the files have two bytes a number
    monkeypatch.setattr(context, "free_bytes", lambda device: free)
    models = [PAIR / "target", PAIR / "draft"]
    found, why, *_ = context.choose_cache(models, CPU, torch.float32, LIMITS)
    assert found == expected
    assert reason in why


@pytest.mark.parametrize(
    ("limits", "context_len", "num_bytes"),
    [
        ({}, 1536, TOKEN_BYTES * 2000),  # of 2,000 tokens, in steps of 512
        ({"max_sequences": 1}, 1536, TOKEN_BYTES * 2000),
        ({"cache_bytes": TOKEN_BYTES * 5000}, 2048, TOKEN_BYTES * 5000),
        ({"cache_bytes": TOKEN_BYTES * 5000, "max_context_len": 700}, 700, TOKEN_BYTES * 5000),
        ({"cache_bytes": TOKEN_BYTES * 100}, 100, TOKEN_BYTES * 100),
        ({"max_context_len": 32_768}, 2000, TOKEN_BYTES * 2000),
        ({"max_context_len": 1900}, 1900, TOKEN_BYTES * 2000),
    ],
)
def test_one_text_may_use_all_blocks(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], context_len: int, num_bytes: int
) -> None:
    monkeypatch.setattr(context, "num_weights", lambda config: 1000)
    monkeypatch.setattr(context, "free_bytes", lambda device: TOKEN_BYTES * 4000 + 2 * 4000)
    models = [PAIR / "target", PAIR / "draft"]
    given = LimitsConfig.model_validate(limits)
    found = context.choose_cache(models, CPU, torch.float32, given, has_blocks=True)
    assert found.context_len == context_len
    assert found.num_bytes == num_bytes


def test_a_cache_without_room_is_refused() -> None:
    models = [PAIR / "target"]
    limits = LimitsConfig(cache_bytes=63 * TARGET_BYTES)
    least = f"limits.cache_bytes: {63 * TARGET_BYTES} .* at least {64 * TARGET_BYTES} "
    with pytest.raises(ConfigError, match=least):
        context.choose_cache(models, CPU, torch.float32, limits, has_blocks=True)


def test_a_server_whose_cache_holds_less_than_its_context(tmp_path: Path) -> None:
    """64 tokens of a context of 128. Requests that fit are served one after another, also those
    that could run together only if they shared blocks; longer ones are refused."""
    limits = {"max_sequences": 4, "max_context_len": 128, "profile_s": 0.0}
    limits |= {"cache_bytes": 64 * TARGET_BYTES, "max_draft_len": 2}
    engine = {"kind": "local", "model": str(PAIR / "target"), "dtype": "float32", "device": "cpu"}
    served = ServerConfig.model_validate({"engine": engine, "limits": limits})
    prompt = "one two three four five six seven eight nine ten eleven twelve"
    with serving(build_engine(served, tmp_path), served) as server:
        assert server.intake.max_context_len == 64
        params = [GenerateParams(f"{prompt} {i}", 20, policy="none", seed=1) for i in range(6)]
        alone = [generate(server, [one], 120.0)[0].tokens for one in params]
        together = [sink.tokens for sink in generate(server, params, 120.0)]
    assert together == alone
    assert all(len(tokens) == 20 for tokens in alone)


@pytest.mark.parametrize(
    ("weights", "kv_cache", "expected"),
    [("stored", "auto", 512), ("int8", "auto", 1024), ("int8", "u8", 1536)],
)
def test_smaller_keys_give_a_longer_context(
    monkeypatch: pytest.MonkeyPatch, weights: str, kv_cache: str, expected: int
) -> None:
    """Heads of 16 take 64, 32 or 24 bytes."""
    left = 2 * 3 * 2 * 8 * 64 * 600
    monkeypatch.setattr(context, "num_weights", lambda config: 0)
    monkeypatch.setattr(context, "free_bytes", lambda device: left)
    models = [PAIR / "target"]
    found = context.choose_cache(models, CPU, torch.float32, LIMITS, kv_cache, weights, True)
    assert found.context_len == expected


@pytest.mark.parametrize(
    ("weights", "keeps_experts", "expected"),
    [("int8", True, 4_000), ("int8", False, 10_000), ("int4", False, 6_500)],
)
def test_experts_of_a_file_with_4_bits(
    monkeypatch: pytest.MonkeyPatch, weights: str, keeps_experts: bool, expected: int
) -> None:
    """A third more than in the file."""
    config = context.text_config(PAIR / "target")
    config.model_type = "qwen3_moe"
    monkeypatch.setattr(context, "text_config", lambda folder: config)
    monkeypatch.setattr(context, "num_weights", lambda config: 10_000)
    monkeypatch.setattr(context, "file_bytes", lambda folder: 3_000)
    free = 100_000_000
    monkeypatch.setattr(context, "free_bytes", lambda device: free)
    found = context.choose_cache(
        [PAIR / "target"], CPU, torch.float32, LIMITS,
        weights=weights, has_blocks=True, keeps_experts=keeps_experts,
    )  # fmt: skip
    assert free - 2 * found.num_bytes == expected


@pytest.mark.parametrize(
    ("size", "num_rows", "num_kept", "left"),
    [
        (1_000, 32, 625, 10_000_000 - 32 * 8_000 - 625 * 4_000),
        (100_000, 3, 6, 10_000_000 - 3 * 800_000 - 6 * 400_000),
        (600_000, 1, 0, 10_000_000 - 4_800_000),
    ],
)
def test_recurrent_states_take_at_most_half(
    monkeypatch: pytest.MonkeyPatch, size: int, num_rows: int, num_kept: int, left: int
) -> None:
    """Two states of a text, and one of a prefix, of so many numbers."""
    shapes = StateShapes(1, (1, 1, size), 0, 4)
    monkeypatch.setattr(context, "state_shapes", lambda config: shapes)
    limits = LimitsConfig(cache_bytes=10_000_000)
    found = context.choose_cache([PAIR / "target"], CPU, torch.float32, limits, has_blocks=True)
    assert (found.num_rows, found.num_kept_states, found.num_bytes) == (num_rows, num_kept, left)
    limits = LimitsConfig(cache_bytes=16 * size - 1)
    if size > 64 * TARGET_BYTES // 8:
        with pytest.raises(ConfigError, match=f"{16 * size - 1} .* at least {16 * size} for"):
            context.choose_cache([PAIR / "target"], CPU, torch.float32, limits, has_blocks=True)


def test_a_draft_with_fewer_positions_does_not_shorten_the_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(PAIR / "draft", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    monkeypatch.setattr(context, "free_bytes", lambda device: 10**12)
    found = context.choose_cache([PAIR / "target", draft], CPU, torch.float32, LIMITS)
    assert found.context_len == 2048
    limits = {"max_sequences": 1, "max_draft_len": 4, "max_context_len": 160, "profile_s": 0.0}
    engine = {"kind": "local", "model": str(PAIR / "target"), "draft": str(draft)}
    engine |= {"runtime": "torch", "dtype": "float32", "device": "cpu", "num_threads": 1}
    served = ServerConfig.model_validate({"engine": engine, "limits": limits})
    with serving(build_engine(served, tmp_path), served) as server:
        params = [
            GenerateParams("one two three", 120, policy=policy, proposer=DRAFT_MODEL)
            for policy in ("none", "fixed:4")
        ]
        texts = [generate(server, [one], 120.0)[0].tokens for one in params]
        records = list(server.loop.records)
    assert len(texts[0]) == 120
    assert texts[0] == texts[1]
    assert not any(record.decision.reason is Reason.FAILED for record in records)
    drafted = [
        view.context_len + num
        for record in records
        for view in record.decision.views
        if (num := record.drafted.get(view.sequence))
    ]
    assert max(drafted) == 64


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000\n", "memory.stat": "anon 300\nfile 600\n"}, [700]),
        ({"memory.max": "max\n", "memory.stat": "anon 300\n"}, []),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.stat": "rss 1\ntotal_rss 400\n",
            },
            [600],
        ),
        ({"memory.max": "1000\n"}, []),
        ({}, []),
    ],
)
def test_the_limit_of_a_container(
    tmp_path: Path, files: dict[str, str], expected: list[int]
) -> None:
    """Cached files do not count: the kernel takes their memory back."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.left_in_groups(tmp_path) == expected


@pytest.mark.parametrize(
    ("served", "bytes_per_token", "timed"),
    [(100, 1000, 50), (512, 1000, 256), (2048, 1000, 512), (2048, 196_608, 170), (64, 1 << 40, 1)],
)
def test_the_context_of_timed_passes_is_bounded(
    served: int, bytes_per_token: int, timed: int
) -> None:
    """Half of the context, at most 512 tokens, and at most 1 GiB: 32 rows of 170 x 192 KiB."""
    limits = LimitsConfig(max_context_len=served, max_sequences=32)
    assert build_local._shape(limits, bytes_per_token).context_len == timed


def test_a_profile_is_valid_with_more_or_less_free_memory() -> None:
    """The served context changes with it."""
    shapes = [
        build_local._shape(LimitsConfig(max_context_len=length), 1000)
        for length in (4_096, 7_680, 11_776)
    ]
    assert len(set(shapes)) == 1
