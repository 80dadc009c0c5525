"""Checks of arguments: a value of the wrong type is refused by name, before anything is created."""

from __future__ import annotations

import operator
from enum import IntEnum, IntFlag
from typing import TypeVar

import numpy as np

from ..errors import InvalidValueError

_T = TypeVar("_T")
_E = TypeVar("_E", bound=IntEnum)
_F = TypeVar("_F", bound=IntFlag)


def whole(name: str, value: object) -> int:
    """Return a whole number as an int: Python's, NumPy's, a boolean or a member of an enumeration."""
    try:
        return int(operator.index(value.item() if isinstance(value, np.generic) else value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidValueError(
            f"{name} = {value!r} is of type {type(value).__name__}: it must be a whole number"
        ) from None


def within(name: str, value: object, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`."""
    number = whole(name, value)
    if not least <= number <= most:
        raise InvalidValueError(f"{name} = {number}: it must be {least} to {most}")
    return number


def member(name: str, value: object, kind: type[_E]) -> _E:
    """Return a member of an enumeration, given as the member or its number."""
    number = whole(name, value)
    if number not in list(kind):
        raise InvalidValueError(
            f"{name} = {number}: it is one of {', '.join(f'{m.name} ({m.value})' for m in kind)}"
        )
    return kind(number)


def flags(name: str, value: object, kind: type[_F]) -> _F:
    """Return flags of a set, given as flags or their number."""
    number = whole(name, value)
    if unknown := number & ~sum(kind):
        raise InvalidValueError(f"{name} = {number:#x} has unknown bits {unknown:#x}: its bits are {sum(kind):#x}")
    return kind(number)


def instance(name: str, value: object, *kinds: type[_T]) -> _T:
    """Return an object of one of these types."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidValueError(f"{name} = {value!r} is of type {type(value).__name__}: it must be of type {wanted}")
    return value
