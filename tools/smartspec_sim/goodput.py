"""The formulas of goodput, one per function.

This is SmartSpec's goodput: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066). It includes no latency
target. The goodput of DistServe and of load generators is different: it counts requests that met a
latency target.

Symbols: a_j is the probability that draft j is accepted, given that all drafts before it were
accepted. k is the draft length. s(j) is the survival: the probability that the first j drafts are
all accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def survival(accept_probs: Sequence[float] | Floats) -> Floats:
    """s(1)..s(k) = a_1, a_1 a_2, .. for k conditional probabilities; shape [k], no unit."""
    return np.multiply.accumulate(np.asarray(accept_probs, dtype=np.float64))


def expected_tokens(accept_probs: Sequence[float] | Floats, draft_len: int) -> float:
    """Expected tokens of one sequence in a step with k drafts: 1 + s(1) + .. + s(k).

    Counts accepted drafts and the one token that the target adds. With the same probability a at
    every position, this is SmartSpec's accepted length (1 - a^(k+1)) / (1 - a). Assumes that
    acceptance depends only on the position. Raises IndexError beyond the known positions.
    """
    tokens, survives = 1.0, 1.0
    for position in range(draft_len):
        survives *= accept_probs[position]
        tokens += survives
    return tokens


def accept_trials(num_drafted: int, num_accepted: int) -> int:
    """Number of drafts that were tested: the accepted ones and the first rejected one.

    Drafts after a rejected one carry no information. Dividing by `num_drafted` would estimate a
    conditional probability of 0.7 as 0.39 at k = 5.
    """
    return num_accepted + (1 if num_accepted < num_drafted else 0)
