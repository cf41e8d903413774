"""Compares the installed bindings with `signatures.json`: missing, new and changed names.

Compiled classes have their constructor's signature only as text. nanobind has it in
`__nb_signature__` and in the docstring, pybind11 only in the docstring. Names, kinds (positional or
keyword-only), order and defaults are compared. Types are not, because a type has many spellings.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from smartspec_trtllm.contract_data import (
    Argument,
    ClassContract,
    Contract,
    Signature,
    load_contract,
)
from smartspec_trtllm.doctor_uses import AdapterUses, adapter_uses


class Kind(StrEnum):
    MISSING = "missing"
    ADDED = "added"
    CHANGED = "changed"
    UNKNOWN = "cannot be compared"


@dataclass(frozen=True)
class Difference:
    """name: as in `Contract.names`. is_used: whether the adapter uses it."""

    kind: Kind
    name: str
    detail: str
    is_used: bool

    @property
    def breaks_adapter(self) -> bool:
        return self.is_used and self.kind in (Kind.MISSING, Kind.CHANGED)


@dataclass(frozen=True)
class Parameter:
    """default: its source text; None if there is no default."""

    name: str
    is_keyword_only: bool
    default: str | None


def compare(bindings: Any, uses: AdapterUses | None = None) -> list[Difference]:
    """bindings: the module. uses: what the adapter uses; if None, it is read from its source."""
    contract, uses = load_contract(), uses or adapter_uses()
    found = [
        Difference(kind, name, detail, uses.is_used(name))
        for kind, name, detail in (*_enums(bindings, contract), *_classes(bindings, contract))
    ]
    return sorted(found, key=lambda difference: not difference.is_used)


_Row = tuple[Kind, str, str]


def _enums(bindings: Any, contract: Contract) -> Iterator[_Row]:
    for name, expected in contract.enums.items():
        enum = _looked_up(bindings, name)
        if enum is None:
            yield Kind.MISSING, name, "no such enum"
            continue
        members = getattr(enum, "__members__", None)
        if members is None:
            yield Kind.UNKNOWN, name, "the enum does not list its members"
            continue
        for member in sorted(set(expected) ^ set(members)):
            kind = Kind.MISSING if member in expected else Kind.ADDED
            yield kind, f"{name}.{member}", "enum member"


def _classes(bindings: Any, contract: Contract) -> Iterator[_Row]:
    outer = {inner: c.name for c in contract.classes.values() for inner in c.nested}
    for name, expected in contract.classes.items():
        owner = outer.get(name, expected.submodule)
        found = _looked_up(bindings, f"{owner}.{name}" if owner else name)
        if found is None:
            yield Kind.MISSING, name, "no such class"
            continue
        yield from _members(found, expected)
        yield from _constructor(found, expected)


def _looked_up(bindings: Any, dotted: str) -> Any:
    found = bindings
    for part in dotted.split("."):
        found = getattr(found, part, None)
    return found


def _members(found: Any, expected: ClassContract) -> Iterator[_Row]:
    names = {name for name in dir(found) if not name.startswith("_")}
    names |= {name for name in inspect.get_annotations(found) if not name.startswith("_")}
    for name in sorted(expected.members - names - {"__enter__", "__exit__"}):
        yield Kind.MISSING, f"{expected.name}.{name}", "attribute or method"
    for name in sorted(names & expected.writable):
        attribute = inspect.getattr_static(found, name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            yield Kind.CHANGED, f"{expected.name}.{name}", "is read-only now"
    for name in sorted(names - expected.members - _argument_names(expected)):
        yield Kind.ADDED, f"{expected.name}.{name}", "attribute or method"


def _argument_names(expected: ClassContract) -> set[str]:
    return {argument.name for init in expected.inits for argument in init.arguments}


def _constructor(found: Any, expected: ClassContract) -> Iterator[_Row]:
    if not any(init.arguments for init in expected.inits):
        return
    overloads = list(signatures_of(found))
    if not overloads:
        yield Kind.UNKNOWN, expected.name, "the constructor's signature cannot be read"
        return
    for init in expected.inits:
        nearest = max(overloads, key=lambda overload: _likeness(init, overload))
        if len(expected.inits) == 1 or _likeness(init, nearest) == len(init.arguments):
            yield from _parameters(expected.name, init, nearest)
        else:
            names = ", ".join(argument.name for argument in init.arguments)
            where = f"{expected.name}({init.arguments[0].name})"
            yield Kind.MISSING, where, f"overload of the constructor ({names})"


def _likeness(expected: Signature, found: Sequence[Parameter]) -> int:
    """Number of common names minus number of other names; len(expected.arguments) if equal."""
    names, others = {a.name for a in expected.arguments}, {p.name for p in found}
    return len(names & others) - len(names ^ others)


def _parameters(name: str, init: Signature, found: Sequence[Parameter]) -> Iterator[_Row]:
    parameters = {parameter.name: parameter for parameter in found}
    expected = {argument.name: argument for argument in init.arguments}
    for argument in init.arguments:
        where = f"{name}({argument.name})"
        if argument.name not in parameters:
            yield Kind.MISSING, where, "argument of the constructor"
        else:
            yield from _parameter(where, argument, parameters[argument.name])
    for parameter in found:
        if parameter.name not in expected:
            default = f"default {parameter.default}" if parameter.default else "required"
            yield Kind.ADDED, f"{name}({parameter.name})", f"argument, {default}"
    order = [p.name for p in found if p.name in expected and not p.is_keyword_only]
    wanted = [a.name for a in init.arguments if a.name in order]
    if order != wanted:
        yield Kind.CHANGED, name, f"positional arguments: {wanted} expected, {order} found"


def _parameter(where: str, expected: Argument, found: Parameter) -> Iterator[_Row]:
    if expected.is_keyword_only != found.is_keyword_only:
        kind = "keyword-only" if found.is_keyword_only else "positional as well"
        yield Kind.CHANGED, where, f"is {kind} now"
    if expected.is_required:
        if found.default is not None:
            yield Kind.ADDED, where, f"a default, {found.default}"
    elif found.default is None:
        yield Kind.CHANGED, where, "is required now"
    else:
        is_equal = _is_default(expected.default, found.default)
        if is_equal is None:
            detail = f"default: {expected.default} expected, {found.default} found"
            yield Kind.UNKNOWN, where, detail
        elif not is_equal:
            yield (
                Kind.CHANGED,
                where,
                f"default: {expected.default!r} expected, {found.default} found",
            )


def _is_default(expected: Any, found: str) -> bool | None:
    """Whether the defaults are equal; None if the found text cannot be interpreted."""
    if isinstance(expected, str) and " " in expected:
        return None  # a remark, not a value
    try:
        return bool(ast.literal_eval(found) == expected)
    except (ValueError, SyntaxError):
        pass
    if not isinstance(expected, str):
        return False if re.fullmatch(r"[\w.]+", found) else None
    if expected.endswith("()"):
        return True if expected[:-2] in found or found == "<factory>" else None
    enum, _, member = expected.rpartition(".")
    match = re.search(rf"\b{re.escape(enum)}\.(\w+)", found)
    return match[1] == member if match else None


def signatures_of(found: Any) -> Iterator[list[Parameter]]:
    """The constructor's overloads; empty if they cannot be read."""
    for text in _signature_texts(found.__init__):
        if "__init__(" in text:
            yield parse_signature(text)


def _signature_texts(init: Any) -> list[str]:
    compiled = getattr(init, "__nb_signature__", None)
    if compiled:
        return [_with_defaults(text, defaults or ()) for text, _, defaults in compiled]
    if inspect.isfunction(init):
        return [f"__init__{inspect.signature(init)}"]
    return (init.__doc__ or "").splitlines()


def _with_defaults(text: str, defaults: Sequence[Any]) -> str:
    """Insert defaults into a signature of nanobind. It writes the n-th default as `\\n`, or as
    `\\=n` if it is text, and stores the value separately (as nanobind's stubgen.py reads it)."""

    def default(match: re.Match[str]) -> str:
        value = defaults[int(match[2])]
        return str(value) if match[1] else repr(value)

    return re.sub(r"\\(=?)(\d+)", default, text)


def parse_signature(text: str) -> list[Parameter]:
    """The parameters between the brackets of `__init__(self, ...)`, without self."""
    parameters: list[Parameter] = []
    is_keyword_only = False
    for part in _parts(text[text.index("__init__(") + len("__init__(") :]):
        if part == "*":
            is_keyword_only = True
            continue
        declared, default = _split_default(part)
        name = declared.partition(":")[0].strip()
        if name not in ("self", "/"):
            parameters.append(Parameter(name, is_keyword_only, default))
    return parameters


def _parts(text: str) -> list[str]:
    """The parts between top-level commas, up to the closing bracket."""
    parts, start = [], 0
    for index, sign in _top_level(text):
        if sign in ",)":
            parts.append(text[start:index].strip())
            start = index + 1
        if sign == ")":
            break
    return [part for part in parts if part]


def _split_default(part: str) -> tuple[str, str | None]:
    """The text before and after the top-level "="; a "=" inside a type does not count."""
    for index, sign in _top_level(part):
        if sign == "=":
            return part[:index], part[index + 1 :].strip()
    return part, None


def _top_level(text: str) -> Iterator[tuple[int, str]]:
    """Characters outside of brackets and quotes, with their positions."""
    depth, quote = 0, ""
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{<":
            depth += 1
        elif depth and sign in ")]}>":
            depth -= 1
        elif not depth:
            yield index, sign
