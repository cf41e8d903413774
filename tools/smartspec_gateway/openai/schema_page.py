"""The page of the routes and their fields. Without scripts, so it works without the internet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>SmartSpec: API</title>
<style>:root { color-scheme: light dark } body { font: 15px/1.5 system-ui; max-width: 60em;
margin: auto; padding: 1em } table { border-collapse: collapse } code { white-space: nowrap }
td, th { border: 1px solid #8886; padding: .2em .6em; text-align: left; vertical-align: top }
</style></head><body><h1>API</h1>
<p>Bodies are JSON. A field in bold must be given. <a href="openapi.json">openapi.json</a> has the
complete schema.</p>"""


def schema_page(document: Mapping[str, Any]) -> str:
    """HTML. document: an OpenAPI schema."""
    parts = [HEAD]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            parts += _table(body.get("schema", {}))
    return "\n".join(parts) + "\n</body></html>"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    if "properties" not in schema:
        return
    yield "<table><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>"
    for name, field in schema["properties"].items():
        shown = f"<b>{escape(name)}</b>" if name in schema.get("required", ()) else escape(name)
        default = "" if field.get("default") is None else repr(field["default"])
        cells = f"<code>{shown}</code>", escape(_type(field)), escape(default)
        rest = escape(field.get("description", ""))
        yield f"<tr><td>{'</td><td>'.join((*cells, rest))}</td></tr>"
    yield "</table>"


def _type(field: Mapping[str, Any]) -> str:
    """Such as `number 0..2`, or `array or string`."""
    if "anyOf" in field:
        names = [_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    bounds = "..".join(map(_bound, (field.get("minimum"), field.get("maximum"))))
    name = str(field.get("type") or field.get("$ref", "object").rpartition("/")[2])
    return name if bounds == ".." else f"{name} {bounds}"


def _bound(value: float | None) -> str:
    """Empty for what is only the end of a type's range."""
    return "" if value is None or abs(value) > 1e9 else f"{value:g}"
