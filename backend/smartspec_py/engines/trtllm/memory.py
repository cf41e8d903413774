"""GPU memory of TensorRT-LLM engines: the requested cache size, and the real one. Never measured.

Memory for everything except keys and values is estimated from config.json. The real cache size is
read after loading. If memory is short, the executor makes the cache smaller than requested and
reports this only in its log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from smartspec_py.engines.trtllm.engine_dir import EngineFiles, Role
from smartspec_py.engines.trtllm.requests import Bindings, finish
from smartspec_py.faults import ConfigError

logger = logging.getLogger(__name__)

LEAST_CONTEXT = 16
"""The smallest context in tokens, for a cache and for the texts on which passes are timed."""

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of activations, and of keys and values that are not quantized (1 byte)."""

NUM_BUFFERS = 6
"""Buffers [max_batch_size, max_draft_len + 1, vocabulary] in float32: two of the decoder; in
the layer for external drafts, ids, mask, target logits and penalties."""


def bytes_per_token(engine: EngineFiles) -> int:
    """Bytes of keys and values per token, on one rank."""
    heads = engine.model("num_attention_heads", 1)
    kv_heads = engine.model("num_key_value_heads", heads)
    head_size = engine.model("head_size", engine.model("hidden_size") // heads)
    is_quantized = engine.get("pretrained_config.quantization.kv_cache_quant_algo")
    size = 1 if is_quantized else _element_bytes(engine)
    heads_of_rank = max(1, -(-kv_heads // engine.tp_size))
    return 2 * engine.model("num_hidden_layers") * heads_of_rank * head_size * size


def fixed_bytes(engine: EngineFiles) -> int:
    """An estimate of the memory of one rank besides keys and values: weights, NUM_BUFFERS, and the
    activations of max_num_tokens: gate and up of a layer; its input, its output and the residual.
    """
    rows, width = engine.built("max_batch_size"), engine.built("max_draft_len") + 1
    buffers = NUM_BUFFERS * rows * width * engine.vocab_size * 4
    hidden = engine.model("hidden_size")
    wide = -(-engine.model("intermediate_size", 4 * hidden) // engine.tp_size)
    activations = engine.built("max_num_tokens") * (2 * wide + 3 * hidden) * _element_bytes(engine)
    return (engine.folder / "rank0.engine").stat().st_size + activations + buffers


def _element_bytes(engine: EngineFiles) -> int:
    return BYTES.get(str(engine.get("pretrained_config.dtype")), 2)


def free_cache_tokens(engines: Sequence[EngineFiles], fraction: float) -> int:
    """Tokens that fit into the cache of each engine. Raises ConfigError if no cache fits.

    fraction: share of the free memory to use. All caches have room for equally many tokens, because
    each sequence is in both. Only GPU 0 is asked: it has a rank of each engine, so no other GPU of
    the same size has less room. Asking another GPU would make a CUDA context there.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(0)
    taken = sum(map(fixed_bytes, engines))
    num_tokens: int = (int(fraction * free_bytes) - taken) // sum(map(bytes_per_token, engines))
    if num_tokens < LEAST_CONTEXT:
        raise ConfigError(
            f"engine.json: engine.memory_fraction: {fraction} of {free_bytes / 2**30:.1f} GiB free "
            f"memory of GPU 0 has no room for a cache, because the engines need "
            f"{taken / 2**30:.1f} GiB: build with a smaller --max-num-tokens, or set "
            "engine.cache_tokens"
        )
    return num_tokens


def loaded_cache_tokens(executor: Any, bindings: Bindings, role: Role, num_asked: int) -> int:
    """Tokens that the cache of a loaded executor has room for; num_asked if unknown. It is read in
    the executor's statistics, which exist only after a request, so this runs one."""
    finish(executor, executor.enqueue_requests([bindings.Request([1], 1)]))
    caches = [entry.kv_cache_stats for entry in executor.get_latest_iteration_stats()]
    if not caches or caches[-1] is None:
        logger.warning("engine.%s: its statistics do not report the size of its cache", role)
        return num_asked
    block = int(caches[-1].tokens_per_block)
    num_tokens = int(caches[-1].max_num_blocks) * block
    if num_tokens + block <= num_asked:
        message = "engine.%s: memory was short: its cache has %d tokens instead of %d"
        logger.warning(message, role, num_tokens, num_asked)
    return num_tokens
