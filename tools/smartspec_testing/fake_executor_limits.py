"""What the executor's fake can hold: from an engine directory and an `ExecutorConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from smartspec_testing.fake_executor_blocks import BlockPool
from smartspec_testing.fake_executor_jobs import EngineLimits
from smartspec_testing.fake_executor_plain import plain
from smartspec_testing.fake_executor_values import Request, undoubled_field

DRAFT_TOKENS_EXTERNAL = 2
"""The build's `speculative_decoding_mode` that takes drafts from outside."""


def read_limits(engine_dir: Path) -> EngineLimits:
    """From `config.json`. Raises RuntimeError where it is missing, as the real one does."""
    path = engine_dir / "config.json"
    if not path.exists():
        raise RuntimeError(f"File does not exist: {path}")
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    build = document["build_config"]
    takes_drafts = build.get("speculative_decoding_mode") == DRAFT_TOKENS_EXTERNAL
    return EngineLimits(
        max_batch_size=build["max_batch_size"],
        max_num_tokens=build["max_num_tokens"],
        max_input_len=build["max_input_len"],
        max_seq_len=build["max_seq_len"],
        max_draft_len=build.get("max_draft_len", 0) if takes_drafts else 0,
        vocab_size=document["pretrained_config"]["vocab_size"],
        tokens_per_block=build.get("plugin_config", {}).get("tokens_per_block", 32),
    )


def permissive_config() -> Any:
    return plain("ExecutorConfig")(gather_generation_logits=True)


def limits_of(model_path: EngineLimits | str | PathLike[str], config: Any) -> EngineLimits:
    """The engine's limits, lowered by the config. Raises RuntimeError for what cannot be served."""
    limits = model_path if isinstance(model_path, EngineLimits) else read_limits(Path(model_path))
    limits = replace(
        limits,
        max_batch_size=min(limits.max_batch_size, config.max_batch_size or limits.max_batch_size),
        max_num_tokens=min(limits.max_num_tokens, config.max_num_tokens or limits.max_num_tokens),
    )
    if limits.max_draft_len and not config.kv_cache_config.enable_block_reuse:
        raise RuntimeError("external drafts need enable_block_reuse=True")
    least = limits.tokens_per_block + limits.max_draft_len
    if config.enable_chunked_context and limits.max_num_tokens < least:
        raise RuntimeError(f"chunked context needs max_num_tokens of at least {least}")
    return limits


def make_blocks(limits: EngineLimits, config: Any) -> BlockPool:
    size = limits.tokens_per_block
    num_blocks = limits.num_blocks or limits.max_batch_size * -(-limits.max_seq_len // size)
    if config.max_tokens is not None:
        num_blocks = min(num_blocks, config.max_tokens // size)
    return BlockPool(num_blocks, size, config.enable_block_reuse, config.enable_partial_reuse)


def problem_of(request: Request, limits: EngineLimits, config: Any) -> str | None:
    """Why the request gets a response with an error; None where its fields are right."""
    output, bias = request.output_config, request.embedding_bias
    if len(request.drafts) > limits.max_draft_len:
        return f"draft tokens exceed max_draft_len {limits.max_draft_len}"
    if bias is not None and tuple(bias.shape) != (limits.vocab_size,):
        return f"embedding_bias must be [{limits.vocab_size}], got {tuple(bias.shape)}"
    if output.return_context_logits:
        return "return_context_logits: the engine gathers no context logits"
    if output.return_generation_logits and not config.gather_generation_logits:
        return "return_generation_logits needs gather_generation_logits=True"
    return None


def check_doubled(request: Request) -> None:
    """Raises RuntimeError where the fake does not do what a field asks for."""
    if name := undoubled_field(request):
        raise RuntimeError(f"the fake does not act on {name}, which would change the text")
