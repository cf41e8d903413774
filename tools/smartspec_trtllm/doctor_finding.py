"""What `smartspec doctor` finds: one question, and what the executor at hand says to it."""

from __future__ import annotations

from dataclasses import dataclass

UNSETTLED = "not settled"


@dataclass(frozen=True)
class Finding:
    """answer: short, one of few where it can be. evidence: what was seen. meaning: what follows
    from it for the adapter and for engine.json."""

    name: str
    question: str
    answer: str
    evidence: str
    meaning: str

    @property
    def is_settled(self) -> bool:
        return self.answer != UNSETTLED


class UnsettledError(Exception):
    """An experiment could not be carried out; its text says why, and what would help."""
