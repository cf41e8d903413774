"""What a kind of engine builds: models, proposers, cost model and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from smartspec_py.constants import LEAST_CHUNK
from smartspec_py.core.cost import CostModel
from smartspec_py.engines.base import Target
from smartspec_py.engines.proposer import Proposer


@dataclass(frozen=True)
class Engine:
    """The models, the cost model and the tokenizer that a server uses.

    end_tokens: tokens that end the model's text; may be empty.
    proposers: by the names that requests use; may be empty.
    profile_path: the file that stores `cost`. None if it is not stored.
    kernels: a description of how the models are computed.
    facts: for the launcher's start line, by the keys `model`, `dtype`, `runtime` and `threads`.
    """

    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    target: Target
    proposers: Mapping[str, Proposer]
    cost: CostModel
    profile_path: Path | None = None
    kernels: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)

    def prefill_chunk(self, configured: int | None) -> int:
        """Prompt tokens per step: the configured value, or the largest chunk in the profile."""
        measured = LEAST_CHUNK if self.cost.prompt is None else self.cost.prompt.tokens_per_row[-1]
        return configured or max(LEAST_CHUNK, measured)
