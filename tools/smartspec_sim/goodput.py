"""The formulas of goodput, one a function.

Goodput here is SmartSpec's: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066). It has no latency target in
it, unlike the goodput of DistServe or of load generators, which counts requests that met one.

Symbols: a_j, the probability that draft j is accepted given that all before it were; k, the draft
length; s(j), the survival: the probability that the first j drafts are all accepted.
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
    """Tokens that one sequence gains in a step of k drafts: 1 + s(1) + .. + s(k).

    Accepted drafts and the one token that the target adds itself. With one probability a at every
    position it is SmartSpec's accepted length (1 - a^(k+1)) / (1 - a). Takes acceptance as
    independent of everything but the position. Raises IndexError beyond the known positions.
    """
    tokens, survives = 1.0, 1.0
    for position in range(draft_len):
        survives *= accept_probs[position]
        tokens += survives
    return tokens


def accept_trials(num_drafted: int, num_accepted: int) -> int:
    """Drafts that were put to the test: those accepted, and the first that was not.

    Drafts behind a rejected one say nothing. Dividing by `num_drafted` instead would read a
    conditional probability of 0.7 as 0.39 at k = 5.
    """
    return num_accepted + (1 if num_accepted < num_drafted else 0)
