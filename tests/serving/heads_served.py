"""What the tests of Medusa and EAGLE heads share: the shipped target with heads, and requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from smartspec_bench import texts
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.server import Server
from smartspec_testing import local
from smartspec_testing.local import LocalSink, generate

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
MODEL = TINY / "target"

REQUESTS = [
    GenerateParams(texts.prompt(workload, index), 28, seed=9, **sampling)
    for workload in texts.TINY
    for index, sampling in enumerate(
        (
            {},
            {"temperature": 0.8},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
            {"temperature": 1.0, "top_p": 0.9, "bad_words": (" the",)},
        )
    )
]
"""Prompts that the heads were not trained on."""

MIXED = REQUESTS[::3]
"""Of every workload and with every kind of sampling."""


def config_of(limits: dict[str, Any] | None = None, **engine: Any) -> ServerConfig:
    few = {"max_sequences": 4, "max_context_len": 256, "prefill_chunk": 48, "profile_s": 0.0}
    engine = {"kind": "local", "model": str(MODEL), "num_threads": 1, "dtype": "float32"} | engine
    return ServerConfig.model_validate({"engine": engine, "limits": few | (limits or {})})


def serving(
    config: ServerConfig, engine: Engine | None = None, **changes: Any
) -> AbstractContextManager[Server]:
    """engine: None builds one. changes: of its fields."""
    return local.serving(replace(engine or build_engine(config, Path.cwd()), **changes), config)


def served(
    config: ServerConfig, params: Sequence[GenerateParams], **changes: Any
) -> tuple[list[LocalSink], int]:
    """The answers without errors, and how many requests were preempted."""
    with serving(config, **changes) as server:
        sinks = generate(server, params, 120.0)
        num_preemptions = server.loop.lifecycle.num_preemptions
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    return sinks, num_preemptions
