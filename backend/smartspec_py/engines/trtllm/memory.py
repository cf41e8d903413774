"""GPU memory of TensorRT-LLM engines: the cache size that is requested, and the real cache size.

Memory for everything except keys and values is estimated from config.json. This project never
measured it. The real cache size is read after loading. If memory is short, the executor makes the
cache smaller than requested and reports this only in its log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from smartspec_py.engines.trtllm import engine_config
from smartspec_py.engines.trtllm.engine_config import Role
from smartspec_py.engines.trtllm.placement import Devices
from smartspec_py.engines.trtllm.requests import Bindings, finish
from smartspec_py.serving.config import ConfigError

logger = logging.getLogger(__name__)

LEAST_CONTEXT = 16
"""The smallest context in tokens, for a cache and for the texts on which passes are timed."""

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of activations, and of keys and values without quantization. Quantized keys and
values have 1 byte."""

WIDE_ACTIVATIONS = 2
HIDDEN_ACTIVATIONS = 3
"""Activations per token of an iteration that exist at the same time: gate and up of a layer; its
input, its output and the residual."""

NUM_BUFFERS = 6
"""Two buffers of the decoder. In the layer for external drafts: ids, mask, target logits and
penalties."""

NUM_ASKS = 3
"""Requests to try until there are statistics. Those of worker processes may arrive after the
response."""


def bytes_per_token(engine: engine_config.Engine) -> int:
    """Bytes of keys and values per token, on one rank."""
    heads = engine.count("pretrained_config.num_attention_heads", 1)
    kv_heads = engine.count("pretrained_config.num_key_value_heads", heads)
    width = engine.count("pretrained_config.hidden_size") // heads
    head_size = engine.count("pretrained_config.head_size", width)
    is_quantized = engine.get("pretrained_config.quantization.kv_cache_quant_algo")
    size = 1 if is_quantized else _element_bytes(engine)
    of_rank = max(1, -(-kv_heads // engine.tp_size))
    return 2 * engine.count("pretrained_config.num_hidden_layers") * of_rank * head_size * size


def cache_tokens(engines: Sequence[engine_config.Engine], num_bytes: int) -> int:
    """Tokens that fit into the cache of each engine of a GPU, if all have the same number.

    num_bytes: memory of the GPU for everything that the engines have there: weights, activations,
    the decoders' buffers, keys and values. The result may be negative.
    """
    taken = sum(
        _weight_bytes(engine) + activation_bytes(engine) + _decoder_bytes(engine)
        for engine in engines
    )
    return (num_bytes - taken) // sum(map(bytes_per_token, engines))


def activation_bytes(engine: engine_config.Engine) -> int:
    """Bytes of an iteration of max_num_tokens on one rank; an estimate."""
    hidden = engine.count("pretrained_config.hidden_size")
    wide = engine.count("pretrained_config.intermediate_size", 4 * hidden)
    width = WIDE_ACTIVATIONS * -(-wide // engine.tp_size) + HIDDEN_ACTIVATIONS * hidden
    return engine.count("build_config.max_num_tokens") * width * _element_bytes(engine)


def _element_bytes(engine: engine_config.Engine) -> int:
    return BYTES.get(str(engine.get("pretrained_config.dtype")), 2)


def _weight_bytes(engine: engine_config.Engine) -> int:
    return engine.rank_sizes.get("rank0.engine", 0)


def _decoder_bytes(engine: engine_config.Engine) -> int:
    """Bytes of NUM_BUFFERS buffers [max_batch_size, max_draft_len + 1, padded vocabulary] in
    float32."""
    rows = engine.count("build_config.max_batch_size")
    width = engine.count("build_config.max_draft_len") + 1
    return NUM_BUFFERS * rows * width * engine.padded_vocab_size * 4


def free_cache_tokens(
    engines: Sequence[engine_config.Engine], places: Mapping[Role, Devices], fraction: float
) -> int:
    """`cache_tokens` for a fraction of the memory that is free now, on the GPU with the least room.

    places: the GPUs of each engine. More tokens in one cache than in the other would be of no use,
    because each sequence is in both. Raises ConfigError if a GPU has no room for a cache.
    """
    import torch

    found = {}
    for gpu in sorted({gpu for devices in places.values() for gpu in devices}):
        here = [engine for engine in engines if gpu in places[engine.role]]
        free_bytes, _ = torch.cuda.mem_get_info(gpu)
        found[gpu] = cache_tokens(here, int(fraction * free_bytes))
        if found[gpu] < LEAST_CONTEXT:
            activations = sum(map(activation_bytes, here)) / 2**30
            raise ConfigError(
                f"engine.json: engine.memory_fraction: {fraction} of {free_bytes / 2**30:.1f} GiB "
                f"free memory of GPU {gpu} has no room for a cache after the weights of the "
                f"engines there and their activations (an estimated {activations:.1f} GiB): build "
                "with a smaller --max-num-tokens, or set engine.cache_tokens"
            )
    return min(found.values())


def loaded_cache_tokens(
    executor: Any, bindings: Bindings, engine: engine_config.Engine, num_asked: int
) -> int:
    """Tokens that the cache of a loaded executor has room for; num_asked if unknown.

    The number comes from the executor's statistics. They exist only after a request, so this runs
    one.
    """
    for _ in range(NUM_ASKS):
        finish(executor, executor.enqueue_requests([bindings.Request([1], 1)]))
        for entry in reversed(executor.get_latest_iteration_stats()):
            if entry.kv_cache_stats is not None:
                return _room(entry.kv_cache_stats, engine, num_asked)
    logger.warning("engine.%s: its statistics do not report the size of its cache", engine.role)
    return num_asked


def _room(stats: Any, engine: engine_config.Engine, num_asked: int) -> int:
    found = int(stats.max_num_blocks) * int(stats.tokens_per_block)
    if found + int(stats.tokens_per_block) <= num_asked:
        logger.warning(
            "engine.%s: its cache has room for %d tokens instead of the requested %d, because "
            "memory was short when it was loaded",
            engine.role,
            found,
            num_asked,
        )
    return found
