"""A matplotlib figure as SVG that stands inside an HTML page, and as PNG.

Inside a page ids must differ between pictures, colours follow light and dark, text is text in the
page's font, and no address of a namespace or a licence is left.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from smartspec_bench.page_colours import INK

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smartspec",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 9,
    "text.color": INK.light,
    "axes.labelcolor": INK.light,
    "axes.titlecolor": INK.light,
}
"""The font is one that matplotlib brings along, so that a picture is the same everywhere."""

_PNG_DPI = 160
_FONT = re.compile(r"font: ((?:[\w.]+ )*?[\d.]+px) [^;]+")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline_svg(
    figure: Figure, name: str, title: str, description: str, variables: Mapping[str, str]
) -> str:
    """An <svg> element. name: begins every id. variables: CSS variable by light colour."""
    buffer = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _value(_local(key), value, name, variables)
            for key, value in element.attrib.items()
        }
    _drop(root, {"metadata", "style"})
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    labels = (f"{name}-title", f"{name}-desc")
    root.attrib.update({"role": "img", "aria-labelledby": " ".join(labels)})
    for index, (tag, label, text) in enumerate(
        zip(("title", "desc"), labels, (title, description), strict=True)
    ):
        element = ElementTree.Element(tag, {"id": label})
        element.text = text
        root.insert(index, element)
    return ElementTree.tostring(root, encoding="unicode")


def write_png(figure: Figure, path: Path) -> None:
    """On white paper. Raises OSError."""
    with matplotlib.rc_context(RC):
        figure.savefig(path, format="png", dpi=_PNG_DPI, facecolor="white")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _value(key: str, value: str, name: str, variables: Mapping[str, str]) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    if key != "style":
        return value
    value = _FONT.sub(r"font: \1 var(--sans)", value)
    for colour, variable in variables.items():
        value = value.replace(colour, f"var({variable})")
    return value


def _drop(element: ElementTree.Element, tags: set[str]) -> None:
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _drop(child, tags)
