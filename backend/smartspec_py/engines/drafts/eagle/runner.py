"""Passes of an EAGLE-3 head, which reads a state with each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from smartspec_py.engines.device import on_device
from smartspec_py.engines.drafts.eagle.head import EagleHead
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig

NUM_KEPT = 64
"""States of a row: the longest input of a tree, and one more."""


class EagleRunner(GraphRunner):
    """An EAGLE-3 head and its cache, computed by PyTorch. `RowInput.states` are those of the target
    at the token before each; without them, the head continues with its own: those that it returned
    last, one for each row, or one for each node of a tree."""

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        super().__init__(head, config)
        self._fuse = head.fuse
        shape = config.num_rows, NUM_KEPT, head.config.hidden_size
        self._own = torch.zeros(shape, dtype=config.dtype, device=config.device)

    @torch.inference_mode()
    def forward(
        self,
        inputs: Sequence[RowInput],
        token_ids: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> PassOutput:
        """See `PyTorchRunner`. states: None takes those of the inputs."""
        given = self._read(inputs) if states is None else states
        output = super().forward(inputs, token_ids, given)
        self._keep(inputs, torch.cat([*output.states]))
        return output

    def _read(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """The state that the head reads with each token, [N, hidden_size]: those of the target,
        fused, if the inputs have states, and else the head's own after the token's parent."""
        states = _states_of(inputs)
        if states is not None:
            return self._fuse(states.to(self._own))
        return self._own[
            self._index(
                (row_input.row, parent) for row_input in inputs for parent in _parents(row_input)
            )
        ]

    def _keep(self, inputs: Sequence[RowInput], states: torch.Tensor) -> None:
        """states: one for each wanted token, in the order of the inputs."""
        places = self._index(
            (row_input.row, token + 1 if row_input.tree else 0)
            for row_input in inputs
            for token in range(len(row_input.tokens) - row_input.num_logits, len(row_input.tokens))
        )
        self._own[places] = states.to(self._own)

    def _index(self, places: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of some states, each by its row and its place there."""
        numbers = [number for place in places for number in place]
        index = on_device(numbers, self._own.device).view(-1, 2)
        return index[:, 0], index[:, 1]


def _parents(row_input: RowInput) -> Sequence[int]:
    """Of each token, the node whose state the head reads with it."""
    return row_input.tree.parents if row_input.tree else [0] * len(row_input.tokens)


def _states_of(inputs: Sequence[RowInput]) -> torch.Tensor | None:
    """The states of all inputs, [N, width]. Either all have states or none has."""
    given = [row.states for row in inputs if row.states is not None]
    assert len(given) in (0, len(inputs)), "only some inputs have states"
    return torch.cat(given) if given else None
