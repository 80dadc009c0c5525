"""Dispatch by kind: compiled code calls one of several functions, which a table lists by number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from .compile import DeviceFunction
from .signatures import signature_of


class ByKind:
    """A function that calls one of `functions`: its first argument is the number, and the others are passed on.

    For a number that is not in the table, the result is 0. The calls are direct, so LLVM may inline them.
    """

    __name__: str
    functions: dict[int, DeviceFunction]
    signature: inspect.Signature

    def __init__(self, functions: Mapping[int, DeviceFunction | None], stub: Callable[..., object]):
        functools.update_wrapper(self, stub)
        self.functions = {int(number): function for number, function in functions.items() if function is not None}
        self.signature = signature_of(stub)

    def freezes(self) -> tuple[object, tuple[FunctionType, ...]]:
        """Return everything that determines its code, and the functions whose code it contains (frozen.py)."""
        called = tuple(one for function in self.functions.values() for one in function.freezes()[1])
        return (sorted(self.functions), str(self.signature)), called

    def __call__(self, kind: int, *given: Any) -> Any:
        """Call the function of a kind, on the host."""
        function = self.functions.get(kind)
        return 0 if function is None else function(*given) or 0


def by_kind(functions: Mapping[int, DeviceFunction | None]) -> Callable[[Callable[..., object]], ByKind]:
    """Return a decorator that replaces a function by a compiled one, which calls `functions[kind]`.

    The decorated function has no body. Its first parameter is `kind`, and the rest are the arguments of all functions.
    """
    return functools.partial(ByKind, functions)
