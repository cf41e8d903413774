"""From engine.json to an engine: the one place that knows which kinds there are.

Heavy imports stand inside the creators, so that a server of one kind needs no other's packages.
"""

from __future__ import annotations

from pathlib import Path

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import NO_TOKEN
from smartspec_py.serving.config import (
    FakeEngineConfig,
    LimitsConfig,
    ServerConfig,
    TorchEngineConfig,
)
from smartspec_py.serving.model_files import (
    load_tokenizer,
    num_token_ids,
    stepwise_capabilities,
)
from smartspec_py.serving.server import Engine


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, naming the key, for what engine.json got wrong.
    """
    if isinstance(config.engine, TorchEngineConfig):
        from smartspec_py.serving.build_torch import build_torch

        return build_torch(config.engine, config.limits, folder)
    return _build_fake(config.engine, config.limits, folder)


def _build_fake(config: FakeEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    from smartspec_py.engines.fake import FakeTarget
    from smartspec_py.proposers.fake import FakeProposer

    tokenizer = load_tokenizer("engine.tokenizer", folder / config.tokenizer)
    step = PassTable((1,), (1,), ((config.step_s,),))
    cost = CostModel(target=step, draft=PassTable((1,), (1,), ((config.step_s / 20,),)))
    vocab_size = num_token_ids(tokenizer)
    capabilities = stepwise_capabilities(limits, vocab_size)
    return Engine(
        tokenizer=tokenizer,
        end_token=NO_TOKEN,
        target=FakeTarget(capabilities, cost=cost, fail_at_step=config.fail_at_step),
        proposer=FakeProposer(
            config.accept_prob,
            vocab_size=vocab_size,
            max_draft_len=limits.max_draft_len,
            cost=cost,
        ),
        cost=cost,
    )
