"""The findings of `smartspec doctor`: a question, and the answer of the installed executor."""

from __future__ import annotations

from dataclasses import dataclass

UNSETTLED = "not settled"


@dataclass(frozen=True)
class Finding:
    """answer: short, and one of a few values if possible. evidence: what was measured. meaning:
    the consequence for the adapter and for engine.json."""

    name: str
    question: str
    answer: str
    evidence: str
    meaning: str

    @property
    def is_settled(self) -> bool:
        return self.answer != UNSETTLED


class UnsettledError(Exception):
    """An experiment could not run; the message says why, and what would help."""
