"""The documented signatures of TensorRT-LLM's executor bindings, from `signatures.json`.

That file lists the classes, arguments, attributes and enums of `tensorrt_llm.bindings.executor`, as
found in its sources. Each entry names its source file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from smartspec_trtllm.contract_kinds import is_of_kind

_EXIT_ARGUMENTS = ("exc_type", "exc_value", "traceback")


class ContractError(Exception):
    """A name that the bindings do not have, or a value that they would not accept."""


@dataclass(frozen=True)
class Argument:
    """kind: its Python type as text, e.g. "Optional[list[int]]". default: None if required."""

    name: str
    kind: str
    is_required: bool
    default: Any
    is_keyword_only: bool


@dataclass(frozen=True)
class Signature:
    """One way to call a function or constructor."""

    arguments: tuple[Argument, ...]

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with a call, with argument and value; None if nothing is."""
        positional = [a for a in self.arguments if not a.is_keyword_only]
        if len(args) > len(positional):
            excess = args[len(positional)]
            return f"takes {len(positional)} positional arguments, got {excess!r} beyond them"
        given = {a.name: value for a, value in zip(positional, args, strict=False)}
        for name, value in kwargs.items():
            if name in given:
                return f"argument {name} is given twice, the second time as {value!r}"
            given[name] = value
        return self._value_problem(given)

    def _value_problem(self, given: Mapping[str, Any]) -> str | None:
        known = {argument.name: argument for argument in self.arguments}
        for name, value in given.items():
            if name not in known:
                return f"no argument {name} (got {value!r})"
            if not is_of_kind(value, known[name].kind):
                return f"argument {name} must be {known[name].kind}, got {value!r}"
        missing = [a.name for a in self.arguments if a.is_required and a.name not in given]
        return f"argument {missing[0]} is missing" if missing else None


@dataclass(frozen=True)
class ClassContract:
    """inits: the constructor's overloads; empty if the class is never constructed. nested: names of
    nested classes and enums. submodule: below the module of the bindings; "" for the module itself.
    """

    name: str
    inits: tuple[Signature, ...]
    attributes: frozenset[str]
    writable: frozenset[str]
    methods: Mapping[str, tuple[Signature, ...]]
    statics: frozenset[str]
    nested: frozenset[str]
    submodule: str

    @property
    def members(self) -> frozenset[str]:
        return self.attributes | self.methods.keys() | self.statics | self.nested


@dataclass(frozen=True)
class Contract:
    """version: of TensorRT-LLM. enums: members by name; names of nested enums contain a dot."""

    version: str
    classes: Mapping[str, ClassContract]
    enums: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> frozenset[str]:
        """All names that `ContractBindings.used` can return: classes, members, enum members."""
        members = {f"{c.name}.{m}" for c in self.classes.values() for m in c.members}
        arguments = {
            f"{c.name}({a.name})"
            for c in self.classes.values()
            for i in c.inits
            for a in i.arguments
        }
        enums = {f"{name}.{member}" for name, group in self.enums.items() for member in group}
        return frozenset(self.classes.keys() | self.enums.keys() | members | arguments | enums)


def read_signatures() -> dict[str, Any]:
    """The parsed JSON file; its keys `cli` and `engine_dir` are about building engines."""
    text = files(__package__).joinpath("signatures.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@cache
def load_contract() -> Contract:
    document = read_signatures()
    enums = {name: tuple(members) for name, members in document["enums"].items()}
    nested = {name: entry.get("nested_in") for name, entry in document["classes"].items()}
    classes = {
        name: _class_contract(name, entry, nested, enums)
        for name, entry in document["classes"].items()
    }
    return Contract(document["version"], classes, enums)


def _class_contract(
    name: str,
    entry: Mapping[str, Any],
    nested: Mapping[str, str | None],
    enums: Mapping[str, tuple[str, ...]],
) -> ClassContract:
    overloads = entry.get("init_overloads") or ([entry["init"]] if "init" in entry else [])
    keyword_only_from = entry.get("keyword_only_from")
    methods = {
        method: tuple(_signature(o["args"]) for o in about.get("overloads", [about]))
        for method, about in entry.get("methods", {}).items()
    }
    if entry.get("context_manager"):
        methods |= {"__enter__": (_signature([]),), "__exit__": (_signature(_EXIT_ARGUMENTS),)}
    inner_enums = {enum.split(".")[1] for enum in enums if enum.startswith(f"{name}.")}
    inner_classes = {inner for inner, outer in nested.items() if outer == name}
    return ClassContract(
        name=name,
        inits=tuple(_signature(overload, keyword_only_from) for overload in overloads),
        attributes=frozenset(entry.get("attributes", ())) | set(entry.get("class_constants", ())),
        writable=frozenset(entry.get("writable_attributes", ())),
        methods=methods,
        statics=frozenset(entry.get("static_methods", ())),
        nested=frozenset(inner_enums | inner_classes),
        submodule=entry.get("module", "").partition(".executor.")[2],
    )


def _signature(arguments: Sequence[Any], keyword_only_from: str | None = None) -> Signature:
    """From rows of name, kind, is required, default; or from names only, whose kind is unknown."""
    rows: list[list[Any]] = [[a, "Any", True, None] if isinstance(a, str) else a for a in arguments]
    names = [row[0] for row in rows]
    first = names.index(keyword_only_from) if keyword_only_from else len(names)
    return Signature(
        tuple(
            Argument(name, kind, is_required, default, is_keyword_only=index >= first)
            for index, (name, kind, is_required, default) in enumerate(rows)
        )
    )
