"""Text that UTF-8 can hold. JSON may escape half of a surrogate pair, and Python keeps it."""

from __future__ import annotations

import re

LONE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(
    r"(\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""Other escapes and whole pairs, which are the group; and lone surrogates."""


def without_surrogates(text: str) -> str:
    """The text with U+FFFD in the place of lone surrogates."""
    return LONE.sub("\ufffd", text)


def without_escaped_surrogates(text: str) -> str:
    """The same for a text of JSON, which may be cut."""
    return ESCAPED.sub(lambda found: found[1] or "\\ufffd", text)
