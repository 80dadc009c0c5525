"""Checks of arguments: a value of the wrong type is refused by name, before anything is created."""

from __future__ import annotations

import math
import operator
import os
import time
from enum import IntEnum, IntFlag
from numbers import Real
from typing import TypeVar

import numpy as np

from .errors import InvalidValueError

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
    names = ", ".join(f"{one.name} ({one.value})" for one in kind)
    try:
        number = whole(name, value)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error}: one of {names}") from None
    if number not in list(kind):
        raise InvalidValueError(f"{name} = {number}: it is one of {names}")
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


def number(name: str, value: object, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a number from `least` to `most` as a float. NaN is refused."""
    try:
        found = float(instance(name, value, Real))  # type: ignore[type-abstract]
    except OverflowError:
        raise InvalidValueError(f"{name} is larger than any float: give a number up to {most:g}") from None
    if math.isnan(found):
        raise InvalidValueError(f"{name} = {value}: it must be a number")
    if not least <= found <= most:
        raise InvalidValueError(f"{name} = {value}: it must be {least:g} to {most:g}")
    return found


def deadline(timeout: object) -> float:
    """Return when a wait of `timeout` seconds ends, in the time of `time.monotonic()`."""
    return time.monotonic() + number("timeout", timeout)


def device_deadline(timeout: object) -> float:
    """Return the most seconds that a kernel waits for a NIC: more than 0, and finite."""
    found = number("timeout", timeout)
    if not 0 < found < math.inf:
        raise InvalidValueError(f"timeout {found:g} s: a device wait needs a positive deadline")
    return found


def truth(name: str, value: object) -> bool:
    """Return a boolean: Python's or NumPy's, or 0 or 1."""
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise InvalidValueError(f"{name} = {value!r}: it must be True or False")
    return bool(value)


def text(name: str, value: object) -> str:
    """Return a string that the system accepts: no NUL, and no code point that is not a character."""
    found = instance(name, value, str)
    try:
        found.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(f"{name} = {found!r}: it contains a code point that is no character") from None
    if "\0" in found:
        raise InvalidValueError(f"{name} = {found!r}: it must not contain a NUL")
    return found


def path(name: str, value: object) -> str:
    """Return the path of a file, given as a string or a path."""
    return text(name, os.fspath(instance(name, value, str, os.PathLike)))


def octets(name: str, value: object) -> bytes:
    """Return the bytes of an object with the buffer protocol."""
    if isinstance(value, str | int):  # bytes(5) would be five zeros
        raise InvalidValueError(f"{name} = {value!r} is of type {type(value).__name__}: it must be bytes")
    try:
        return bytes(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidValueError(f"{name} = {value!r} is of type {type(value).__name__}: it must be bytes") from None
