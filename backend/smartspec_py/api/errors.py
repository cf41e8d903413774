"""The texts of errors about a request that the backend and the gateway both find.

Triton passes an error on as a text only. A text about a field is `FIELD: REASON`, with the name of
an input tensor, which `field_of` finds again. A reason is a text for people: no program reads it.
"""

from __future__ import annotations

from collections.abc import Collection

from smartspec_py.api.contract import INPUTS

_INPUT_NAMES = frozenset(spec.name for spec in INPUTS)


def field_text(field: str, reason: str) -> str:
    """The text of an error about this field."""
    return f"{field}: {reason}"


def field_of(text: str) -> tuple[str, str]:
    """The field and the reason of an error. The field is empty if the text is about none."""
    field, colon, reason = text.partition(": ")
    return (field, reason) if colon and field in _INPUT_NAMES else ("", text)


def why_incomplete(names: Collection[str]) -> str:
    """The error of a request with these fields: it lacks a required one. Empty if it does not."""
    missing = [spec.name for spec in INPUTS if not spec.is_optional and spec.name not in names]
    return f"{' and '.join(missing)}: required, but the request has no such field" * bool(missing)
