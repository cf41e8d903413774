"""From engine.json to an engine: the one place that knows which kinds there are.

Heavy imports stand inside the creators, so that a server of one kind needs no other's packages.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tokenizers import Tokenizer

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import NO_TOKEN
from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.serving.config import (
    ConfigError,
    FakeEngineConfig,
    LimitsConfig,
    ServerConfig,
    TorchEngineConfig,
)
from smartspec_py.serving.server import Engine

logger = logging.getLogger(__name__)


def build_engine(config: ServerConfig, folder: Path) -> Engine:
    """Load models and cost model. Relative paths are relative to `folder`, where engine.json is.

    Raises ConfigError, naming the key, for what engine.json got wrong.
    """
    if isinstance(config.engine, TorchEngineConfig):
        from smartspec_py.engines.torch_build import build_torch

        return build_torch(config.engine, config.limits, folder)
    return _build_fake(config.engine, config.limits, folder)


def _build_fake(config: FakeEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    from smartspec_py.engines.fake import FakeTarget
    from smartspec_py.proposers.fake import FakeProposer

    tokenizer = load_tokenizer("engine.tokenizer", folder / config.tokenizer)
    step = PassTable((1,), (1,), ((config.step_s,),))
    cost = CostModel(target=step, draft=PassTable((1,), (1,), ((config.step_s / 20,),)))
    vocab_size = tokenizer.get_vocab_size()
    capabilities = TargetCapabilities(
        max_sequences=limits.max_sequences,
        max_context_len=limits.max_context_len,
        max_draft_len=limits.max_draft_len,
        max_decode_tokens=1,
        max_prefill_tokens=limits.prefill_chunk,
        verifies_sampling=True,
        vocab_size=vocab_size,
    )
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


def existing(key: str, path: Path) -> Path:
    """The path. Raises ConfigError, naming the key, where nothing is there."""
    if not path.exists():
        raise ConfigError(f"engine.json: {key}: {path} does not exist")
    return path


def load_tokenizer(key: str, folder: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = existing(key, folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"engine.json: {key}: {folder} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def end_token(folder: Path) -> int:
    """The model's end of text, by its generation_config.json or config.json; NO_TOKEN if none."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return int(value[0] if isinstance(value, list) else value)
    return NO_TOKEN
