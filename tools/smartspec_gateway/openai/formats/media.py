"""Results of tools as text. A client cannot leave out what a tool gave, such as an image, and it
sends it again in each later request. The model is told that it was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KINDS = {
    "image_url": "image",
    "input_image": "image",
    "file": "document",
    "input_file": "document",
    "input_audio": "audio",
    "tool_reference": "tool",
}
"""Names in markers, by the type of a part. Other types are their own names."""

NAMES = ("title", "filename", "tool_name")
"""Fields with the name of a part."""

MAX_NAME = 80


def with_markers(*text_types: str) -> Callable[[Any], Any]:
    """Makes parts that are no text parts of text, such as `[image]` or `[document: name]`.

    text_types: of parts with text. The first one is the type of the markers.
    """

    def part(found: Any) -> Any:
        kind = found.get("type") if isinstance(found, dict) else None
        if not isinstance(kind, str) or kind in text_types:
            return found
        return {"type": text_types[0], "text": _marker(kind, found)}

    def parts(content: Any) -> Any:
        return list(map(part, content)) if isinstance(content, list) else content

    return parts


def _marker(kind: str, part: dict[str, Any]) -> str:
    inner = part["file"] if isinstance(part.get("file"), dict) else part
    names = (inner.get(name) for name in NAMES)
    name = next((name for name in names if isinstance(name, str) and name), None)
    words = KINDS.get(kind, kind)[:MAX_NAME]
    return f"[{words}]" if name is None else f"[{words}: {name[:MAX_NAME]}]"
