"""The formulas of goodput, one a function.

Goodput here is SmartSpec's: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066). It has no latency target in
it, unlike the goodput of DistServe or of load generators, which counts requests that met one.

Symbols: a, the conditional acceptance probability of one draft; k, the draft length; s(j), the
survival: the probability that the first j drafts are all accepted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def survival(accept_prob: float, draft_len: int) -> Floats:
    """s(1)..s(k) = a, a^2, .. a^k; shape [draft_len], no unit.

    Takes the drafts of a step as independent and equally likely to be accepted, which overrates
    deep drafts where acceptance falls with the position.
    """
    powers: Floats = np.power(accept_prob, np.arange(1, draft_len + 1, dtype=np.float64))
    return powers


def expected_tokens(accept_prob: float, draft_len: int) -> float:
    """Tokens that one sequence gains in a step: (1 - a^(k+1)) / (1 - a), the limit k + 1 at a = 1.

    Accepted drafts and the one token that the target adds itself (SmartSpec's accepted length).
    """
    tokens, survives = 1.0, 1.0
    for _ in range(draft_len):
        survives *= accept_prob
        tokens += survives
    return tokens


def accept_trials(num_drafted: int, num_accepted: int) -> int:
    """Drafts that were put to the test: those accepted, and the first that was not.

    Drafts behind a rejected one say nothing. Dividing by `num_drafted` instead would read a
    conditional probability of 0.7 as 0.39 at k = 5.
    """
    return num_accepted + (1 if num_accepted < num_drafted else 0)
