"""Passes of an EAGLE-3 head, which reads a state with each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from smartspec_py.engines.device import on_device
from smartspec_py.engines.drafts.eagle.head import EagleHead
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import (
    PYTORCH,
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
)

NUM_KEPT = 64
"""States of a row: the longest input of a tree, and one more."""


class OwnStates:
    """The states that the head returned last: one for each row, or one for each node of a tree."""

    def __init__(
        self, fuse: Callable[[torch.Tensor], torch.Tensor], width: int, config: RunnerConfig
    ) -> None:
        """fuse: see `EagleHead`. width: of a state."""
        self._fuse = fuse
        shape = config.num_rows, NUM_KEPT, width
        self._states = torch.zeros(shape, dtype=config.dtype, device=config.device)

    def given(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """The state that the head reads with each token, [N, hidden_size]: those of the target,
        fused, if the inputs have states, and else the head's own after the token's parent."""
        states = _states_of(inputs)
        if states is not None:
            return self._fuse(states.to(self._states))
        return self._states[
            self._index(
                (row_input.row, parent) for row_input in inputs for parent in _parents(row_input)
            )
        ]

    def keep(self, inputs: Sequence[RowInput], states: torch.Tensor) -> None:
        """states: one for each wanted token, in the order of the inputs."""
        places = self._index(
            (row_input.row, token + 1 if row_input.tree else 0)
            for row_input in inputs
            for token in range(len(row_input.tokens) - row_input.num_logits, len(row_input.tokens))
        )
        self._states[places] = states.to(self._states)

    def _index(self, places: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of some states, each by its row and its place there."""
        numbers = [number for place in places for number in place]
        index = on_device(numbers, self._states.device).view(-1, 2)
        return index[:, 0], index[:, 1]


class EagleRunner(Runner):
    """An EAGLE-3 head and its cache, computed by PyTorch. `RowInput.states` are those of the target
    at the token before each; without them, the head continues with its own."""

    runtime = PYTORCH

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        super().__init__(config)
        self._passes = GraphRunner(head, replace(config, gives_hidden=True, state_layers=()))
        self.cache = self._passes.cache
        self._states = OwnStates(head.fuse, head.config.hidden_size, config)

    @property
    def about(self) -> str:
        return self._passes.about

    @property
    def is_asynchronous(self) -> bool:
        return self._passes.is_asynchronous

    @property
    def bytes_per_token(self) -> int:
        return self._passes.bytes_per_token

    def warm(self) -> None:
        self._passes.warm()

    @torch.inference_mode()
    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        """See `Runner`."""
        output = self._passes.forward(inputs, token_ids, self._states.given(inputs))
        self._states.keep(inputs, torch.cat([*output.states]))
        return output


def _parents(row_input: RowInput) -> Sequence[int]:
    """Of each token, the node whose state the head reads with it."""
    return row_input.tree.parents if row_input.tree else [0] * len(row_input.tokens)


def _states_of(inputs: Sequence[RowInput]) -> torch.Tensor | None:
    """The states of all inputs, [N, width]. Either all have states or none has."""
    given = [row.states for row in inputs if row.states is not None]
    assert len(given) in (0, len(inputs)), "only some inputs have states"
    return torch.cat(given) if given else None
