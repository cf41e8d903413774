"""From engine.json to an engine: the one place that knows which kinds there are.

Heavy imports stand inside the creators, so that a server of one kind needs no other's packages.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.proposers.prompt_lookup import PromptLookupProposer
from smartspec_py.serving.config import (
    DRAFT_MODEL,
    PROMPT_LOOKUP,
    ConfigError,
    FakeEngineConfig,
    LimitsConfig,
    ServerConfig,
    TorchEngineConfig,
    TrtllmDoubleConfig,
    TrtllmEngineConfig,
)
from smartspec_py.serving.intake import Engine
from smartspec_py.serving.model_files import (
    load_tokenizer,
    num_token_ids,
    stepwise_capabilities,
)
from smartspec_py.serving.numpy_threads import keep_numpy_in_one_thread

logger = logging.getLogger(__name__)


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, naming the key, for what engine.json got wrong. From then on NumPy computes
    in the thread that calls it, in all of this process.
    """
    keep_numpy_in_one_thread()
    engine = _build_kind(config, folder)
    lookup = PromptLookupProposer(
        config.limits.max_draft_len, config.lookup.max_ngram, config.lookup.min_ngram
    )
    engine = replace(engine, proposers={**engine.proposers, PROMPT_LOOKUP: lookup})
    if config.proposer != "auto" and config.proposer not in engine.proposers:
        raise ConfigError(f"engine.json: proposer: {config.proposer}, but engine.draft is not set")
    return engine


def _build_kind(config: ServerConfig, folder: Path) -> Engine:
    match config.engine:
        case TorchEngineConfig() as torch:
            with uncollected_imports():
                from smartspec_py.engines.torch.build import build_torch
            return build_torch(torch, config.limits, folder)
        case TrtllmEngineConfig() as trtllm:
            from smartspec_py.engines.trtllm.build import build_trtllm

            return build_trtllm(trtllm, config.limits, folder)
        case TrtllmDoubleConfig() as double:
            from smartspec_py.engines.trtllm.build import build_trtllm_double

            return build_trtllm_double(double, config.limits, folder)
        case FakeEngineConfig() as fake:
            return _build_fake(fake, config.limits, folder)


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
    logger.info("engine libraries imported")


def _build_fake(config: FakeEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    from smartspec_testing.fake_engine import FakeTarget
    from smartspec_testing.fake_proposer import FakeProposer

    tokenizer = load_tokenizer("engine.tokenizer", folder / config.tokenizer)
    step = PassTable((1,), (1,), ((config.step_s,),))
    cost = CostModel(target=step, draft=PassTable((1,), (1,), ((config.step_s / 20,),)))
    vocab_size = num_token_ids(tokenizer)
    capabilities = stepwise_capabilities(limits, vocab_size)
    return Engine(
        tokenizer=tokenizer,
        end_tokens=(),
        target=FakeTarget(capabilities, cost=cost, fail_at_step=config.fail_at_step),
        proposers={
            DRAFT_MODEL: FakeProposer(
                config.accept_prob,
                vocab_size=vocab_size,
                max_draft_len=limits.max_draft_len,
                cost=cost,
            )
        },
        cost=cost,
    )
