"""Chats and agents that come back with the same beginning and a little more, on a real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import LocalSink, generate, serving

pytestmark = pytest.mark.slow  # so that they run beside the others

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
TARGET_BYTES, DRAFT_BYTES = (layers * 2 * 8 * 16 * 4 for layers in (3, 2))
"""Keys and values of a token, in float32: layers, heads, width."""

WORDS = ["bread", "boats", "birds", "rain", "river", "summer", "winter", "people", "walk", "town"]


def config_of(**limits: Any) -> ServerConfig:
    engine = {"kind": "local", "model": str(PAIR / "target"), "draft": str(PAIR / "draft")}
    engine |= {"dtype": "float32", "device": "cpu", "num_threads": 1}
    limits = {"max_context_len": 1024, "profile_s": 0.0, "max_draft_len": 4, **limits}
    return ServerConfig.model_validate({"engine": engine, "limits": limits})


def text(num_words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def asked(prompt: str, **more: Any) -> GenerateParams:
    return GenerateParams(prompt, **{"max_tokens": 8, "policy": "none", "seed": 1, **more})


def pool_of(engine: Engine) -> Any:
    return engine.target.pool  # type: ignore[attr-defined]


def num_new(sink: LocalSink) -> int:
    """Tokens of the prompt that were not cached."""
    return sink.last.num_input_tokens - sink.progress.num_cached


def test_a_small_request_does_not_end_a_conversation(tmp_path: Path) -> None:
    """Nor does another conversation."""
    config = config_of()
    chats = [text(150, 1), text(150, 2)]
    with serving(build_engine(config, tmp_path), config) as server:
        first = [generate(server, [asked(chat)])[0] for chat in chats]
        generate(server, [asked("What is two and two?")])
        again = [generate(server, [asked(chat + text(5, 3))])[0] for chat in chats]
    for before, after in zip(first, again, strict=True):
        assert before.progress.num_cached == 0
        assert before.last.num_input_tokens > 150
        assert num_new(after) < 40


def test_the_next_turn_of_a_chat_reads_the_answer_again(tmp_path: Path) -> None:
    """So that no bit depends on what is cached. The draft model knows all that it read."""
    config = config_of()
    engine = build_engine(config, tmp_path)
    drafts = engine.proposers["draft_model"].pool  # type: ignore[attr-defined]
    found: list[int] = []
    allocate = drafts.allocate

    def recorded(*given: Any) -> Any:
        table = allocate(*given)
        found.append(table.num_cached)
        return table

    drafts.allocate = recorded
    ids = tuple(random.Random(5).randrange(10, 90) for _ in range(150))
    more: dict[str, Any] = {"policy": "fixed:3", "proposer": "draft_model", "ignore_eos": True}
    with serving(engine, config) as server:
        first = generate(server, [asked("", prompt_ids=ids, max_tokens=40, **more)])[0]
        turn = (*ids, *first.tokens, 5, 6, 7)
        then, alone = (
            generate(server, [asked("", prompt_ids=turn, reuse_prefix=reuses, **more)])[0]
            for reuses in (True, False)
        )
    assert first.progress.num_cached == alone.progress.num_cached == 0
    assert then.progress.num_cached == 150
    assert then.tokens == alone.tokens
    assert found[0] == found[2] == 0
    assert found[1] >= 180


@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_agents_with_one_system_prompt_hold_it_once(tmp_path: Path, policy: str) -> None:
    """They arrive together. The first one reads it, and the others wait for that."""
    config = config_of(max_sequences=10, prefill_chunk=64)
    system = text(300, 4)
    params = [asked(f"{system} Agent {i}: {text(4, i)}", policy=policy) for i in range(10)]
    engine = build_engine(config, tmp_path)
    with serving(engine, config) as server:
        sinks = generate(server, params)
        num_used = pool_of(engine).num_used
        num_blocks = -(-sinks[0].last.num_input_tokens // 32)
        assert num_blocks > 10
        assert num_used <= num_blocks + 2 * 10, "once, and up to two blocks of each"
        alone = [
            generate(server, [asked(one.text, policy=policy, reuse_prefix=False)])[0]
            for one in params
        ]
    assert [sink.tokens for sink in sinks] == [sink.tokens for sink in alone]
    assert sum(num_new(sink) < 40 for sink in sinks) == 9
    assert all(sink.progress.num_cached == 0 for sink in alone)


def watch_memory(memory: Memory) -> list[int]:
    """The bytes that are used, whenever a block is taken."""
    used: list[int] = []
    make_room = memory.make_room

    def watched(num_bytes: int) -> None:
        make_room(num_bytes)
        used.append(memory.used + num_bytes)

    memory.make_room = watched  # type: ignore[method-assign]
    return used


def test_memory_stays_within_what_was_said(tmp_path: Path) -> None:
    """Chats that grow, and short requests, in a cache with room for a few of them. Some are
    preempted. The texts are those of a server with room for all."""
    rng = random.Random(1)
    cache_bytes = 600 * TARGET_BYTES + 300 * DRAFT_BYTES
    systems = [text(40, i) for i in range(3)]
    params = [
        asked(
            f"{rng.choice(systems)} {text(rng.choice([3, 30, 90]), i)}",
            policy=rng.choice(["none", "fixed:3"]),
            max_tokens=rng.choice([8, 60]),
            reuse_prefix=rng.random() < 0.9,
            ignore_eos=True,
        )
        for i in range(24)
    ]
    found: list[list[list[int]]] = []
    for limits in ({"max_sequences": 8, "cache_bytes": cache_bytes}, {"max_sequences": 32}):
        config = config_of(**limits)
        engine = build_engine(config, tmp_path)
        with serving(engine, config) as server:
            used = watch_memory(pool_of(engine)._memory)
            found.append([sink.tokens for sink in generate(server, params, 300.0)])
            num_preempted = server.loop.lifecycle.num_preemptions
        if "cache_bytes" in limits:
            assert num_preempted > 0
            # A block more for each request, of target and draft.
            slack = 8 * 32 * (TARGET_BYTES + DRAFT_BYTES)
            assert 0.8 * cache_bytes < max(used) <= cache_bytes + slack
    assert found[0] == found[1]
