"""Builds the engine that engine.json describes, and the parts that all kinds share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from smartspec_py.config import (
    EngineConfig,
    LimitsConfig,
    ServerConfig,
    TorchEngineConfig,
    TrtllmEngineConfig,
)
from smartspec_py.defaults import PROMPT_LOOKUP, ConfigError
from smartspec_py.engines.drafts.lookup import PromptLookupProposer
from smartspec_py.engines.engine import Engine


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, which names the wrong key of engine.json. After this call, NumPy uses only
    the calling thread, in the whole process.
    """
    keep_numpy_in_one_thread()
    with uncollected_imports():
        build = _builder(config.engine)
    engine = build(config.engine, config.limits, folder)
    lookup = PromptLookupProposer(
        config.limits.max_draft_len, config.lookup.max_ngram, config.lookup.min_ngram
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
    if isinstance(engine, TorchEngineConfig):
        from smartspec_py.engines.local.build import build_torch

        return build_torch
    if isinstance(engine, TrtllmEngineConfig):
        from smartspec_py.engines.trtllm.build import build_trtllm

        return build_trtllm
    return engine.builder()


@cache
def keep_numpy_in_one_thread() -> None:
    """Make NumPy use only the calling thread, in the whole process.

    Solving a system of ten equations wakes the threads of NumPy's OpenBLAS. They then spin for
    longer than a step takes. With a step every 25 ms they never slept, and they preempted the
    threads of passes 300 times per second. The OpenBLAS of other libraries, such as PyTorch's on
    ARM, is not changed.
    """
    controller = ThreadpoolController()
    of_numpy = [path for lib in controller.lib_controllers if "numpy" in (path := lib.filepath)]
    controller.select(filepath=of_numpy).limit(limits=1)


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
