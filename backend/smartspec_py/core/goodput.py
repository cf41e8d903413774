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


def power_law_draft_len(scale: float, power: float, token_s: float, base_s: float) -> float:
    """The k, not rounded, that generates fastest by the power law of Su et al. (arXiv 2310.18813).

    They find scale * k^power drafts accepted, 0 < power < 1, and a step of base_s + token_s * k
    seconds (token_s: verifying a position and drafting it). Seconds a token are then smallest where

        scale (1 - power) token_s k^power - scale power base_s k^(power - 1) + token_s = 0

    whose left side rises in k, so that halving an interval finds its one root. Wrong at k = 0,
    where the law loses its meaning: the root is never 0, though not to speculate may be best. The
    root is looked for up to 1024; raises ValueError where a number is out of its range.
    """
    if not (0 < power < 1 and scale > 0 and token_s > 0 and base_s > 0):
        raise ValueError("power must lie in 0..1, and scale, token_s and base_s be positive")
    low, high = 0.0, 1024.0
    for _ in range(60):
        k = (low + high) / 2
        slope = scale * (1 - power) * token_s * k**power + token_s
        if slope < scale * power * base_s * k ** (power - 1):
            low = k
        else:
            high = k
    return high
