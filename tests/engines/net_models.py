"""What the tests of models with gated delta nets share."""

from __future__ import annotations

from typing import Any

from smartspec_testing.local import LocalSink

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": 0,
}


def tokens_of(sinks: list[LocalSink]) -> list[list[int]]:
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    return [sink.tokens for sink in sinks]
