"""JSON lines with a header that names format and version: the outside of every trace file.

The first line is an object with `format`, `version` and what holds for the whole file; each line
after it is one object. Reading is strict: another format or version is an error, not a guess.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A file cannot be read. The message says why."""


def write_text(path: Path, text: str) -> None:
    """Written beside and then renamed, so that a reader never sees half a file."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_lines(
    path: Path, file_format: str, version: int
) -> tuple[dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
    """The header without format and version, and the other lines with their numbers.

    Raises TraceError, then or while it is iterated, for what is not such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    return parse_lines(path.name, text, file_format, version)


def parse_lines(
    name: str, text: str, file_format: str, version: int
) -> tuple[dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
    """`read_lines` of a file's text."""
    lines = _objects(name, text)
    _, header = next(lines, (1, {}))
    found = header.pop("format", None), header.pop("version", None)
    if found != (file_format, version):
        raise TraceError(
            f"{name}: {found[0]!r} of version {found[1]!r}, "
            f"not {file_format!r} of version {version}"
        )
    return header, lines


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Whatever is wrong with what was read becomes a TraceError that says where it stands."""
    try:
        yield
    except KeyError as error:
        raise TraceError(f"{place}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{place}: {error}") from error


def _objects(name: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        with naming(f"{name}, line {number}"):
            found = json.loads(line)
            if not isinstance(found, dict):
                raise TraceError("no JSON object")
        yield number, found
