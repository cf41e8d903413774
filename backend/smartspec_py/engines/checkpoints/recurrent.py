"""Sizes of recurrent states, of models that have them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

LINEAR_ATTENTION = "linear_attention"
"""In `layer_types`: a layer with a recurrent state, and without keys."""

TILE = 8
"""States are kept where a whole number of so many tokens is before them, see
`runtimes.openvino.recurrent`."""


class StateShapes(NamedTuple):
    """num_layers: that have states. delta: a state of one layer, [heads, key width, value width].
    width: inputs of a token that are kept until its tile is whole. kernel_size: of the convolution,
    which needs the inputs of tokens before it."""

    num_layers: int
    delta: tuple[int, int, int]
    width: int
    kernel_size: int

    @property
    def num_before(self) -> int:
        """Tokens whose inputs the convolution of a token needs, beside its own."""
        return self.kernel_size - 1

    def num_bases(self, num_back: int) -> int:
        """States of a row from which the next pass may begin. num_back: tokens that can be taken
        back."""
        return 2 + num_back // TILE

    def num_past(self, num_back: int) -> int:
        """Tokens of a row whose inputs are kept: between a base and the end of the next pass are a
        tile and twice the tokens of a pass."""
        return self.num_before + TILE + 2 * (num_back + 1)

    def row_bytes(self, num_back: int) -> int:
        """In float32."""
        states = self.num_bases(num_back) * math.prod(self.delta)
        return 4 * self.num_layers * (states + self.num_past(num_back) * self.width)

    @property
    def prefix_bytes(self) -> int:
        """Of the state behind a prefix, with the inputs that the next token needs."""
        return 4 * self.num_layers * (math.prod(self.delta) + self.num_before * self.width)


def state_shapes(hf_config: Any) -> StateShapes | None:
    """None if no layer has a recurrent state."""
    num_layers = (getattr(hf_config, "layer_types", None) or []).count(LINEAR_ATTENTION)
    if not num_layers:
        return None
    key_width = hf_config.linear_key_head_dim
    num_values, value_width = hf_config.linear_num_value_heads, hf_config.linear_value_head_dim
    convolved = 2 * hf_config.linear_num_key_heads * key_width + num_values * value_width
    return StateShapes(
        num_layers,
        (num_values, key_width, value_width),
        convolved + 2 * num_values,
        hf_config.linear_conv_kernel_dim,
    )


def num_key_layers(hf_config: Any) -> int:
    """Layers that have keys and values."""
    shapes = state_shapes(hf_config)
    return int(hf_config.num_hidden_layers) - (shapes.num_layers if shapes else 0)


def has_tiled_heads(hf_config: Any) -> bool:
    """Whether the heads of values are in the order of a GGUF file, see `gguf.config`."""
    return bool(getattr(hf_config, "linear_heads_are_tiled", False))
