"""From engine.json to an engine of whichever kind, with what all kinds have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from threadpoolctl import ThreadpoolController

from smartspec_py.proposers.prompt_lookup import PromptLookupProposer
from smartspec_py.serving.config import PROMPT_LOOKUP, ConfigError, ServerConfig
from smartspec_py.serving.intake import Engine


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, naming the key, for what engine.json got wrong. From then on NumPy computes
    in the thread that calls it, in all of this process.
    """
    keep_numpy_in_one_thread()
    with uncollected_imports():
        build = config.engine.builder()
    engine = build(config.engine, config.limits, folder)
    lookup = PromptLookupProposer(
        config.limits.max_draft_len, config.lookup.max_ngram, config.lookup.min_ngram
    )
    engine = replace(engine, proposers={**engine.proposers, PROMPT_LOOKUP: lookup})
    if config.proposer != "auto" and config.proposer not in engine.proposers:
        raise ConfigError(f"engine.json: proposer: {config.proposer}, but engine.draft is not set")
    return engine


@cache
def keep_numpy_in_one_thread() -> None:
    """From now on NumPy computes in the thread that calls it, in all of this process.

    A solved system of ten equations wakes the threads of NumPy's OpenBLAS, which then spin for more
    work longer than a step takes: with a step every 25 ms they never slept, and pushed passes off
    their cores 300 times a second. Another library's OpenBLAS, as PyTorch's on ARM, stays as it is.
    """
    controller = ThreadpoolController()
    of_numpy = [path for lib in controller.lib_controllers if "numpy" in (path := lib.filepath)]
    controller.select(filepath=of_numpy).limit(limits=1)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Within, Python does not look for garbage. PyTorch and Transformers make 390,000 objects that
    stay; to look through them again and again took a sixth of their import. They are frozen: a
    collection while models are loaded would look through all of them once more."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
