"""Enumerations in compiled code: there, `QpState.RTS` is an int64 constant, just as `QP_ROW.state` is.

Numba gives the members of each enumeration a type of their own. A function would be compiled once for each of these
types, and members of an `IntFlag` would not be integers at all.
"""

from __future__ import annotations

from enum import EnumMeta
from types import ModuleType
from typing import Any, TypeVar

from numba import typeof, types
from numba.core.typing.templates import AttributeTemplate, builtin_registry

import gpunetio.enums as enums  # `from .. import enums` would put the whole package into stamps (compile.py)

from ..formats import commands, cqe, ethernet, events, packet, wqe

E = TypeVar("E", bound=EnumMeta)


def constants(enumeration: E) -> E:
    """Make the members of an enumeration int64 constants in compiled code, on CPU and GPU."""

    @builtin_registry.register_attr
    class Members(AttributeTemplate):
        """The types of the members. Numba lowers their values."""

        def __init__(self, context: Any):
            super().__init__(context)
            # Numba looks for attributes of this very type before those of its class. numba-cuda takes no templates of
            # classes that have a type of Numba's as their `key`; an instance may have one.
            self.key = typeof(enumeration)

        def generic_resolve(self, value: types.EnumClass, attr: str) -> types.Type | None:
            return types.int64 if attr in enumeration.__members__ else None

    return enumeration


def _constants_of(module: ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, EnumMeta) and value.__module__ == module.__name__:
            constants(value)


for _module in (enums, commands, cqe, ethernet, events, packet, wqe):
    _constants_of(_module)
