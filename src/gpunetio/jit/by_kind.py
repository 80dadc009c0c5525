"""Dispatch by kind: compiled code calls one of several functions, which a table lists by number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from .compile import DeviceFunction, engine_function


def by_kind(
    functions: Mapping[int, DeviceFunction | None],
) -> Callable[[Callable[..., object]], DeviceFunction]:
    """Make a compiled function that calls `functions[kind]`. It takes the place of the decorated one.

    The decorated function has no body. Its first parameter is `kind`, and the rest are the arguments of all functions.
    For a kind that is not in the table, or whose entry is None, the result is 0. The calls are direct, so LLVM may
    inline them; Numba has no table of functions that CUDA could call, too.
    """

    def decorate(stub: Callable[..., object]) -> DeviceFunction:
        name, (kind, *arguments) = stub.__name__, inspect.signature(stub).parameters
        listed = {int(number): function for number, function in functions.items() if function is not None}
        lines = [f"def {name}({', '.join((kind, *arguments))}):"]
        lines += [f"    if {kind} == {number}: return _{number}({', '.join(arguments)})" for number in listed]
        lines += ["    return 0"]
        names = {**stub.__globals__, **{f"_{number}": function for number, function in listed.items()}}
        exec(compile("\n".join(lines), inspect.getfile(stub), "exec"), names)
        made = names[name]
        made.__doc__, made.__qualname__ = stub.__doc__, stub.__qualname__
        return engine_function(made)

    return decorate
