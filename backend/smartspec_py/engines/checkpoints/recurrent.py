"""Sizes of recurrent states, of models that have them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

LINEAR_ATTENTION, CONV = "linear_attention", "conv"
"""In `layer_types`: layers with a recurrent state, and without keys. The second ones are those of
LFM2, which have a convolution only."""

TILE = 8
"""States are kept where a whole number of so many tokens is before them, see
`runtimes.openvino.recurrent`."""


class StateShapes(NamedTuple):
    """num_layers: that have states. delta: a state of one layer, [heads, key width, value width];
    () if it is the inputs of the convolution alone. width: inputs of a token that are kept until
    its tile is whole. kernel_size: of the convolution, which needs the inputs of tokens before
    it."""

    num_layers: int
    delta: tuple[int, ...]
    width: int
    kernel_size: int

    @property
    def num_before(self) -> int:
        """Tokens whose inputs the convolution of a token needs, beside its own."""
        return self.kernel_size - 1

    def num_bases(self, num_back: int) -> int:
        """States of a row from which the next pass may begin. num_back: tokens that can be taken
        back."""
        return 2 + num_back // TILE if self.delta else 0

    def num_past(self, num_back: int) -> int:
        """Tokens of a row whose inputs are kept: between a base and the end of the next pass are a
        tile and twice the tokens of a pass. Without tiles, those that can be taken back, and
        those behind the last state that is kept."""
        if not self.delta:
            return self.num_before + TILE + num_back
        return self.num_before + TILE + 2 * (num_back + 1)

    def row_bytes(self, num_back: int) -> int:
        """In float32."""
        states = self.num_bases(num_back) * self._delta_size
        return 4 * self.num_layers * (states + self.num_past(num_back) * self.width)

    @property
    def prefix_bytes(self) -> int:
        """Of the state behind a prefix, with the inputs that the next token needs."""
        return 4 * self.num_layers * (self._delta_size + self.num_before * self.width)

    @property
    def _delta_size(self) -> int:
        return math.prod(self.delta) if self.delta else 0


def state_shapes(hf_config: Any) -> StateShapes | None:
    """None if no layer has a recurrent state."""
    layers = getattr(hf_config, "layer_types", None) or []
    if num_convs := layers.count(CONV):
        return StateShapes(num_convs, (), hf_config.hidden_size, hf_config.conv_L_cache)
    num_layers = layers.count(LINEAR_ATTENTION)
    if not num_layers:
        return None
    if hasattr(hf_config, "mamba_n_heads"):
        num_heads, key_width = hf_config.mamba_n_heads, hf_config.mamba_d_state
        width = num_heads * hf_config.mamba_d_head + 2 * hf_config.mamba_n_groups * key_width
        delta = num_heads, key_width, hf_config.mamba_d_head
        return StateShapes(num_layers, delta, width + num_heads, hf_config.mamba_d_conv)
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
