"""Finds what the adapter uses of the bindings, by reading its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import smartspec_py
from smartspec_trtllm.contract_data import load_contract


@dataclass(frozen=True)
class AdapterUses:
    """arguments: as `Request(end_id)`. attributes: names without class, because the source does not
    show the class of an object. So `is_used` may be true by mistake, but never false."""

    arguments: frozenset[str]
    attributes: frozenset[str]

    def is_used(self, name: str) -> bool:
        """name: such as `Request`, `Request(end_id)`, `Result.is_final`, `FinishReason.END_ID`."""
        if name.endswith(")"):
            return name in self.arguments
        return re.split(r"\.", name)[-1] in self.attributes


def adapter_files() -> list[Path]:
    return sorted(Path(smartspec_py.__path__[0], "engines", "trtllm").glob("*.py"))


@cache
def adapter_uses() -> AdapterUses:
    return uses_of(path.read_text(encoding="utf-8") for path in adapter_files())


def uses_of(sources: Iterable[str]) -> AdapterUses:
    arguments: set[str] = set()
    attributes: set[str] = set()
    for source in sources:
        tree = ast.parse(source)
        for call in calls_of_bindings(tree):
            arguments |= {f"{call.name}({name})" for name in _argument_names(call)}
        attributes |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return AdapterUses(frozenset(arguments), frozenset(attributes))


@dataclass(frozen=True)
class Call:
    """A call of a class of the bindings. num_positional: number of arguments without keyword."""

    name: str
    num_positional: int
    keywords: tuple[str, ...]


def calls_of_bindings(tree: ast.AST) -> Iterator[Call]:
    """Calls of members of `bindings` or `_bindings`, except where that is the fake itself."""
    for node in ast.iter_child_nodes(tree):
        if _imports_double(node):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = getattr(owner, "id", None) or getattr(owner, "attr", None)
            if name in ("bindings", "_bindings"):
                keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
                yield Call(node.func.attr, len(node.args), keywords)
        yield from calls_of_bindings(node)


def _argument_names(call: Call) -> list[str]:
    """Names of all arguments; positional ones follow the first overload that fits the call."""
    contract = load_contract().classes.get(call.name)
    for init in contract.inits if contract else ():
        names = [argument.name for argument in init.arguments]
        if set(call.keywords) <= set(names):
            return [*names[: call.num_positional], *call.keywords]
    return list(call.keywords)


def _imports_double(node: ast.AST) -> bool:
    """Whether this is a function that imports the fake under the name of the bindings."""
    return isinstance(node, ast.FunctionDef) and any(
        alias.name == "fake_executor"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    )
