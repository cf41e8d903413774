"""Classes and enums of the bindings that only carry values: made from the contract, not written.

A class takes the arguments that `smartspec_trtllm/signatures.json` lists, with its defaults, and
has its attributes; those that the constructor does not take begin as None. Nothing is checked here:
that is what `smartspec_trtllm.contract` is for.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, field, make_dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from smartspec_trtllm.contract_data import Argument, ClassContract, load_contract

RENAMED_ATTRIBUTES = {"type": "request_type"}
"""Arguments whose attribute bears another name."""


@cache
def plain_enum(name: str) -> type[IntEnum]:
    """The values count from 0: what the real ones are is not known, so nothing may rest on them.

    Raises KeyError where the contract has no such enum; so do the others below.
    """
    members = load_contract().enums[name]
    values = [(member, value) for value, member in enumerate(members)]
    made: Any = IntEnum
    enum: type[IntEnum] = made(name.rsplit(".", 1)[-1], values)
    return enum


@cache
def plain_class(name: str) -> type[Any]:
    contract = load_contract().classes[name]
    made = make_dataclass(
        name,
        [*_argument_fields(contract), *_other_fields(contract)],
        namespace=dict.fromkeys((*contract.methods, *contract.statics), _nothing),
        eq=False,
    )
    for inner in contract.nested:
        enum = f"{name}.{inner}"
        is_enum = enum in load_contract().enums
        setattr(made, inner, plain_enum(enum) if is_enum else plain_class(inner))
    return made


def plain(name: str) -> Any:
    """The enum or class of this name."""
    return plain_enum(name) if name in load_contract().enums else plain_class(name)


def _argument_fields(contract: ClassContract) -> list[Any]:
    """Of the first overload, required ones before the others, as in the constructor."""
    made: list[Any] = []
    arguments = contract.inits[0].arguments if contract.inits else ()
    for argument in arguments:
        if argument.is_keyword_only and not any(row[0] == "_" for row in made):
            made.append(("_", KW_ONLY))
        name = argument.name
        if argument.is_required:
            made.append((name, Any))
        else:
            made.append((name, Any, _default_field(argument)))
    return made


def _other_fields(contract: ClassContract) -> list[Any]:
    arguments = contract.inits[0].arguments if contract.inits else ()
    taken = {argument.name for argument in arguments}
    rest = sorted(contract.attributes - taken - contract.methods.keys())
    return [(name, Any, field(default=None, init=False)) for name in rest]


def _default_field(argument: Argument) -> Any:
    """The default: "ModelType.DECODER_ONLY" and "KvCacheConfig()" stand for values."""
    default = argument.default
    if isinstance(default, str) and default.endswith("()"):
        return field(default_factory=plain_class(default.removesuffix("()")))
    if isinstance(default, str) and "." in default:
        enum, member = default.rsplit(".", 1)
        return field(default=plain_enum(enum)[member])
    return field(default=default)


def _nothing(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("the fake carries values, and has no methods on them")
