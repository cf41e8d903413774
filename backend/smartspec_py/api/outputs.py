"""Outputs in the JSON of Triton's generate extension."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Escaped in JSON, because some clients end a line at them."""


def outputs_json(outputs: Mapping[str, Sequence[Any]]) -> str:
    """The outputs by name, those of one element as a bare value. It is one line."""
    document = {name: found[0] if len(found) == 1 else found for name, found in outputs.items()}
    return json.dumps(document, ensure_ascii=False).translate(LINE_ENDS)
