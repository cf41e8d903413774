"""A wrapper for TensorRT-LLM's executor bindings that checks each use against their signatures.

The bindings are not installed where the tests run. Without this check, a misspelt keyword would
fail only in production. `ContractBindings` makes it fail in a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smartspec_trtllm.contract_data import (
    ClassContract,
    Contract,
    ContractError,
    Signature,
    load_contract,
)

__all__ = ["ContractBindings", "ContractError", "load_contract"]


class ContractBindings:
    """Replaces `tensorrt_llm.bindings.executor` and forwards to `inner`, a fake of it.

    It checks and records every constructor, method, attribute and enum member that is used through
    it. Wrap an executor that was made directly from the fake with `checked`, so that its results
    are checked too:

        bindings = ContractBindings(fake_executor)
        target = TrtllmTarget(bindings.checked(Executor(limits)), bindings, capabilities)

    Raises ContractError, which names class, argument and value.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._recorder = _Recorder(load_contract())

    def __getattr__(self, name: str) -> Any:
        contract = self._recorder.contract
        if name in contract.enums:
            return _Enum(name, getattr(self._inner, name), self._recorder)
        if name not in contract.classes or name in _nested_names(contract):
            raise ContractError(f"the bindings have no {name}")
        return _Class(contract.classes[name], getattr(self._inner, name), self._recorder)

    def checked(self, value: Any) -> Any:
        """A wrapper of `value`, an object of the fake, that checks the use of its members."""
        return _wrap(value, self._recorder)

    def used(self) -> frozenset[str]:
        """Names used: `Request`, `Request(end_id)`, `Result.is_final`, `FinishReason.END_ID`.

        All of them are in `load_contract().names`. Any other name would have raised.
        """
        return frozenset(self._recorder.used)


class _Recorder:
    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.used: set[str] = set()

    def check_call(
        self,
        where: str,
        signatures: Sequence[Signature],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Signature:
        """The overload that accepts the call."""
        problems = [signature.problem(args, kwargs) for signature in signatures]
        for signature, problem in zip(signatures, problems, strict=True):
            if problem is None:
                return signature
        raise ContractError(f"{where}: {'; or '.join(filter(None, problems)) or 'not callable'}")


class _Enum:
    """Returns members without a wrapper, so that they compare equal to those in results."""

    def __init__(self, name: str, inner: Any, recorder: _Recorder) -> None:
        self._name, self._inner, self._recorder = name, inner, recorder

    def __getattr__(self, member: str) -> Any:
        if member not in self._recorder.contract.enums[self._name]:
            raise ContractError(f"enum {self._name} has no member {member}")
        self._recorder.used |= {self._name, f"{self._name}.{member}"}
        return getattr(self._inner, member)


class _Class:
    """A class: it can be called, and it has static and nested members."""

    def __init__(self, contract: ClassContract, inner: Any, recorder: _Recorder) -> None:
        self._contract, self._inner, self._recorder = contract, inner, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contract, recorder = self._contract, self._recorder
        args, kwargs = _unwrap(args), _unwrap(kwargs)
        signature = recorder.check_call(contract.name, contract.inits, args, kwargs)
        names = [argument.name for argument in signature.arguments[: len(args)]] + list(kwargs)
        recorder.used |= {contract.name} | {f"{contract.name}({name})" for name in names}
        return _wrap(self._inner(*args, **kwargs), recorder)

    def __getattr__(self, name: str) -> Any:
        contract, recorder = self._contract, self._recorder
        inner = getattr(self._inner, name, None)
        if f"{contract.name}.{name}" in recorder.contract.enums:
            return _Enum(f"{contract.name}.{name}", inner, recorder)
        if name in contract.nested:
            return _Class(recorder.contract.classes[name], inner, recorder)
        if name not in contract.statics:
            raise ContractError(f"class {contract.name} has no static member {name}")
        recorder.used.add(f"{contract.name}.{name}")
        return inner


class _Object:
    """An object of the fake. Its own state is in slots whose names cannot occur in the bindings."""

    __slots__ = ("_contract_", "_inner_", "_recorder_")

    def __init__(self, contract: ClassContract, inner: Any, recorder: _Recorder) -> None:
        object.__setattr__(self, "_contract_", contract)
        object.__setattr__(self, "_inner_", inner)
        object.__setattr__(self, "_recorder_", recorder)

    def __getattr__(self, name: str) -> Any:
        contract, recorder = self._contract_, self._recorder_
        if name in contract.methods:
            return _Method(contract, name, getattr(self._inner_, name), recorder)
        if name not in contract.attributes:
            raise ContractError(f"class {contract.name} has no attribute {name}")
        recorder.used.add(f"{contract.name}.{name}")
        return _wrap(getattr(self._inner_, name), recorder)

    def __setattr__(self, name: str, value: Any) -> None:
        contract = self._contract_
        if name not in contract.attributes:
            raise ContractError(f"class {contract.name} has no attribute {name} (got {value!r})")
        if name not in contract.writable:
            raise ContractError(f"attribute {name} of {contract.name} is read-only (got {value!r})")
        plain = _unwrap(value)
        _check_attribute(contract, name, plain)
        self._recorder_.used.add(f"{contract.name}.{name}")
        setattr(self._inner_, name, plain)

    def __enter__(self) -> Any:
        self.__getattr__("__enter__")()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(*error)

    def __repr__(self) -> str:
        return repr(self._inner_)


class _Method:
    def __init__(self, contract: ClassContract, name: str, inner: Any, recorder: _Recorder) -> None:
        self._contract, self._name = contract, name
        self._inner, self._recorder = inner, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = f"{self._contract.name}.{self._name}"
        args, kwargs = _unwrap(args), _unwrap(kwargs)
        self._recorder.check_call(where, self._contract.methods[self._name], args, kwargs)
        self._recorder.used.add(where)
        return _wrap(self._inner(*args, **kwargs), self._recorder)


def _check_attribute(contract: ClassContract, name: str, value: Any) -> None:
    """Check a value by the constructor's argument of the same name; both have the same type."""
    for init in contract.inits:
        signature = Signature(tuple(a for a in init.arguments if a.name == name))
        problem = signature.problem((), {name: value}) if signature.arguments else None
        if problem is not None:
            raise ContractError(f"{contract.name}: {problem}")


def _wrap(value: Any, recorder: _Recorder) -> Any:
    """Wrap objects whose class is in the contract, also in lists. Return others unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(_wrap(item, recorder) for item in value)
    for base in type(value).__mro__:
        if base.__name__ in recorder.contract.classes:
            return _Object(recorder.contract.classes[base.__name__], value, recorder)
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_unwrap, value))
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    return value._inner_ if isinstance(value, _Object) else value


def _nested_names(contract: Contract) -> frozenset[str]:
    return frozenset().union(*(c.nested for c in contract.classes.values()))
