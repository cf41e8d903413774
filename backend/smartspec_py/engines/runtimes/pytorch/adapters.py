"""The adapters of a model that PyTorch runs: see `checkpoints.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from smartspec_py.engines.runtimes.runner import RunnerConfig


class AdaptedLayers:
    """Adds to the outputs of a model's linear layers what the adapters of the tokens add. Call
    `choose` before each pass."""

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        adapters = config.adapters
        self._foreign = ~adapters.columns.to(config.device)
        self._is_foreign: torch.Tensor | None = None
        for layer in adapters.layers:
            a, b = (matrix.to(config.device, config.dtype) for matrix in adapters.joined(layer))
            model.get_submodule(layer).register_forward_hook(self._hook(a, b))

    def choose(self, adapters: torch.Tensor | None) -> None:
        """adapters: of each token, [N]; None if no token has one."""
        self._is_foreign = None if adapters is None else self._foreign[adapters]

    def _hook(self, a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        def add(layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            if self._is_foreign is None:
                return output
            # Infinity in the columns of another adapter becomes 0.
            own = F.linear(inputs[0], a).masked_fill(self._is_foreign, 0.0)
            return output + F.linear(own, b)

        return add
