"""The tokens that a head can draft, if its output layer would take most of the time of a draft.

Qwen3.5 has 248,320 tokens, and the output layer has as many rows: with 0.8 B, ten times the
weights of the layer that drafts. But a text uses few tokens. So the graph has only the rows of the
lowest numbers, which a BPE tokenizer gives to the most frequent tokens of its training. Other
tokens get their row here when a text has them. 94 % of the tokens of English text and code have low
numbers, and 99 % had them or had been seen. In Chinese, it was 53 and 82 % of the first 4,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from smartspec_py.engines.runtimes.openvino.weights import Compressed, rows_of

NUM_LOW = 32_768
"""Tokens with the lowest numbers."""

MOST_SEEN = 4_096
"""Others. The one that was added first is replaced."""

Floats = NDArray[np.float32]


def num_in_graph(num_tokens: int, num_bits: int) -> int:
    """Rows of the output layer in the graph. num_bits: of its weights. If they are as stored (0),
    it has all."""
    return NUM_LOW if num_bits and num_tokens > 2 * NUM_LOW else num_tokens


class SeenTokens:
    """Rows of the output layer for tokens of texts beyond NUM_LOW."""

    def __init__(self, layer: Sequence[Compressed], block: int) -> None:
        """layer: the output layer in 8 bits, in parts by columns. block: see `Products`."""
        self._layer, self._block = layer, block
        width = sum(part.values.shape[1] for part in layer)
        self._tokens = np.zeros(MOST_SEEN, np.int64)
        self._rows = np.zeros((MOST_SEEN, width), np.float32)
        self._places: dict[int, int] = {}
        self._num_added = 0

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens of a text."""
        new = {token for token in tokens if token >= NUM_LOW} - self._places.keys()
        if not new:
            return
        added = np.array(sorted(new)[:MOST_SEEN])
        places = (self._num_added + np.arange(len(added))) % MOST_SEEN
        if self._num_added + len(added) > MOST_SEEN:
            for token in self._tokens[places].tolist():
                self._places.pop(token, None)
        self._num_added += len(added)
        self._tokens[places], self._rows[places] = added, self._read(added)
        self._places |= zip(added.tolist(), places.tolist(), strict=True)

    def logits(self, low: Floats, states: Floats, num_tokens: int) -> Floats:
        """Of all num_tokens tokens, [n, num_tokens]; -inf for those that are not drafted. low: of
        the lowest numbers. states: after the last norm, [n, width]."""
        logits = np.full((len(low), num_tokens), -np.inf, np.float32)
        logits[:, :NUM_LOW] = low
        if num := min(self._num_added, MOST_SEEN):
            logits[:, self._tokens[:num]] = states @ self._rows[:num].T
        return logits

    def _read(self, tokens: NDArray[np.int64]) -> Floats:
        """Their rows of the output layer, [n, width]."""
        return rows_of(self._layer, self._block, torch.from_numpy(tokens)).numpy()
