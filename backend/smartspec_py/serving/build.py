"""Builds the engine that engine.json describes, and the parts that all kinds share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from smartspec_py.config import (
    EngineConfig,
    LimitsConfig,
    LocalEngineConfig,
    ServerConfig,
    TrtllmEngineConfig,
)
from smartspec_py.constants import PROMPT_LOOKUP
from smartspec_py.engines.drafts.lookup import PromptLookupProposer
from smartspec_py.engines.engine import Engine
from smartspec_py.faults import ConfigError


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, which names the wrong key of engine.json.
    """
    with uncollected_imports():
        build = _builder(config.engine)
    engine = build(config.engine, config.limits, folder)
    lookup = PromptLookupProposer(
        config.limits.max_draft_len,
        config.lookup.max_ngram,
        config.lookup.min_ngram,
        config.lookup.history_tokens,
    )
    engine = replace(engine, proposers={**engine.proposers, PROMPT_LOOKUP: lookup})
    if config.proposer != "auto" and config.proposer not in engine.proposers:
        names = ", ".join(sorted(engine.proposers))
        raise ConfigError(
            f"engine.json: proposer: got {config.proposer}, must be auto or one of this engine's: "
            f"{names}"
        )
    return engine


def _builder(engine: EngineConfig) -> Callable[[Any, LimitsConfig, Path], Engine]:
    """The function that builds this kind. Imports the packages that only this kind needs."""
    if isinstance(engine, LocalEngineConfig):
        from smartspec_py.engines.local.build import build_local

        return build_local
    if isinstance(engine, TrtllmEngineConfig):
        from smartspec_py.engines.trtllm.build import build_trtllm

        return build_trtllm
    return engine.builder()


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Disable Python's garbage collection inside the context, and freeze all objects after it.

    Importing PyTorch and Transformers creates 390,000 permanent objects. Scanning them repeatedly
    took one sixth of the import time. Frozen objects are also not scanned while models are loaded.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
