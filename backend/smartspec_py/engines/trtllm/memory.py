"""GPU memory of TensorRT-LLM engines: how many tokens their caches are given, and really have.

All that is taken beside keys and values is estimated from config.json, never measured by this
project. The real size of a cache is read back after loading: the executor makes it smaller than it
was asked for where memory is short, and says so in its log alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from smartspec_py.engines.trtllm import engine_config
from smartspec_py.engines.trtllm.requests import Bindings, finish
from smartspec_py.serving.config import ConfigError

logger = logging.getLogger(__name__)

LEAST_CONTEXT = 16
"""Tokens of a context, at least: of a cache, and of texts on which passes are timed."""

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of an element of activations, and of keys and values that are not quantised; those that are have
1."""

WIDE_ACTIVATIONS = 2
HIDDEN_ACTIVATIONS = 3
"""That live at once for each token of an iteration: gate and up of a layer; its input, its output
and the residual."""

NUM_ASKS = 3
"""Requests until there are statistics: those of worker processes may come behind the response."""


def bytes_per_token(engine: engine_config.Engine) -> int:
    """Of keys and values on one rank."""
    heads = engine.count("pretrained_config.num_attention_heads", 1)
    kv_heads = engine.count("pretrained_config.num_key_value_heads", heads)
    width = engine.count("pretrained_config.hidden_size") // heads
    head_size = engine.count("pretrained_config.head_size", width)
    is_quantized = engine.get("pretrained_config.quantization.kv_cache_quant_algo")
    size = 1 if is_quantized else _element_bytes(engine)
    of_rank = max(1, -(-kv_heads // engine.tp_size))
    return 2 * engine.count("pretrained_config.num_hidden_layers") * of_rank * head_size * size


def cache_tokens(engines: Sequence[engine_config.Engine], num_bytes: int) -> int:
    """Tokens that fit into each cache, as many in both, where num_bytes hold all that the engines
    have on the first GPU: weights, activations, the decoders' buffers, keys and values. May be
    negative."""
    taken = sum(
        _weight_bytes(engine) + activation_bytes(engine) + _decoder_bytes(engine)
        for engine in engines
    )
    return (num_bytes - taken) // sum(map(bytes_per_token, engines))


def activation_bytes(engine: engine_config.Engine) -> int:
    """Of an iteration of max_num_tokens on one rank; an estimate."""
    hidden = engine.count("pretrained_config.hidden_size")
    wide = engine.count("pretrained_config.intermediate_size", 4 * hidden)
    width = WIDE_ACTIVATIONS * -(-wide // engine.tp_size) + HIDDEN_ACTIVATIONS * hidden
    return engine.count("build_config.max_num_tokens") * width * _element_bytes(engine)


def _element_bytes(engine: engine_config.Engine) -> int:
    return BYTES.get(str(engine.get("pretrained_config.dtype")), 2)


def _weight_bytes(engine: engine_config.Engine) -> int:
    return engine.rank_sizes.get("rank0.engine", 0)


def _decoder_bytes(engine: engine_config.Engine) -> int:
    """Of the two buffers [max_batch_size, max_draft_len + 1, padded vocabulary] in float32."""
    rows = engine.count("build_config.max_batch_size")
    width = engine.count("build_config.max_draft_len") + 1
    return 2 * rows * width * engine.padded_vocab_size * 4


def free_cache_tokens(engines: Sequence[engine_config.Engine], fraction: float) -> int:
    """`cache_tokens` of a fraction of the memory that is free now. Raises ConfigError where it has
    no room."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(0)
    found = cache_tokens(engines, int(fraction * free_bytes))
    if found < LEAST_CONTEXT:
        activations = sum(map(activation_bytes, engines)) / 2**30
        raise ConfigError(
            f"engine.json: engine.memory_fraction: {fraction} of {free_bytes / 2**30:.1f} GiB that "
            "are free has no room for a cache beside the weights of both engines and their "
            f"activations, {activations:.1f} GiB by estimate: build with a smaller "
            "--max-num-tokens, or set engine.cache_tokens"
        )
    return found


def loaded_cache_tokens(
    executor: Any, bindings: Bindings, engine: engine_config.Engine, num_asked: int
) -> int:
    """Tokens that the cache of a loaded executor has room for, by its statistics; num_asked where
    they do not tell. It runs a request, without which there are none."""
    for _ in range(NUM_ASKS):
        finish(executor, executor.enqueue_requests([bindings.Request([1], 1)]))
        for entry in reversed(executor.get_latest_iteration_stats()):
            if entry.kv_cache_stats is not None:
                return _room(entry.kv_cache_stats, engine, num_asked)
    logger.warning("engine.%s: its statistics do not tell the size of its cache", engine.role)
    return num_asked


def _room(stats: Any, engine: engine_config.Engine, num_asked: int) -> int:
    found = int(stats.max_num_blocks) * int(stats.tokens_per_block)
    if found + int(stats.tokens_per_block) <= num_asked:
        logger.warning(
            "engine.%s: its cache has room for %d tokens, not for the %d that were asked for: "
            "memory was short when it was loaded",
            engine.role,
            found,
            num_asked,
        )
    return found
