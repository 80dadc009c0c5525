"""The values of expressions while a function is compiled.

A value is
- a Python `int` or `float`: a constant,
- `None`: nothing,
- a `Word`: a number that is known only at run time,
- an `At`: a structure in memory, by its address,
- an `Array`: an array in memory,
- a `Several`: a tuple,
- any other Python object: a module, an enumeration, a function, a string. Code can name its attributes or call it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ..errors import InvalidValueError
from ..formats.layout import Record
from .kinds import FLOAT32, FLOAT64, INT, NOTHING, ArrayType, Scalar, StructType, TupleType, in_words, words_of
from .struct_view import kind_of_record

_WORD = 1 << 64
INTEGERS: tuple[Any, ...] = (int, np.integer, np.bool_)
_FLOAT32: Any = np.float32  # a type that checkers take for a generic one


class CompileError(InvalidValueError):
    """A function does not compile. The message names file and line, and shows the source."""


class Mistake(Exception):
    """A mistake in the statement that is being compiled. The compiler continues with the next statement."""


class Silent(Exception):
    """A statement cannot be compiled because of a mistake that has been reported."""


@dataclass(frozen=True, slots=True)
class Word:
    """A number: an LLVM operand, such as %7."""

    kind: Scalar
    text: str


@dataclass(frozen=True, slots=True)
class At:
    """A structure at an address, which is a constant or a Word. Where an integer is needed, it is the address."""

    kind: StructType
    address: Any


@dataclass(frozen=True, slots=True)
class Array:
    """An array. `shape` and `strides`, in bytes, are integers: constants or Words."""

    kind: ArrayType
    address: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Several:
    """Values: a tuple. `names`: the fields of a named tuple."""

    values: tuple[Any, ...]
    names: tuple[str, ...] = ()


def wrapped(number: int) -> int:
    """Return the signed integer with the same low 64 bits."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


def of_python(thing: Any) -> Any:
    """Return a Python object as a value. Raise a Mistake if it is an integer of more than 64 bits."""
    if isinstance(thing, float) or thing is None or isinstance(thing, (Word, At, Array, Several)):
        return thing
    if isinstance(thing, Record):
        return At(kind_of_record(type(thing)), wrapped(int(thing)))
    if isinstance(thing, INTEGERS):  # includes members of enumerations
        number = int(thing)
        if not -_WORD // 2 <= number < _WORD:
            raise Mistake(f"{number:#x} has more than 64 bits")
        return wrapped(number)
    if isinstance(thing, _FLOAT32):
        return Word(FLOAT32, float_text(float(thing), FLOAT32))
    if isinstance(thing, Enum) and isinstance(thing.value, int):
        return of_python(thing.value)
    if isinstance(thing, tuple):
        return Several(tuple(map(of_python, thing)), getattr(thing, "_fields", ()))
    return thing


def plain(value: Any) -> Any:
    """Return the address of a structure as an integer, and any other value unchanged."""
    return value.address if isinstance(value, At) else value


def is_constant(value: Any) -> bool:
    """Return whether a value is a number that is known at compile time."""
    return isinstance(value, (int, float))


def is_number(value: Any) -> bool:
    """Return whether a value is a number."""
    return isinstance(value, (int, float, Word))


def kind_of(value: Any) -> Any:
    """Return the type of a value that a variable can hold."""
    if isinstance(value, int):
        return INT
    if isinstance(value, float):
        return FLOAT64
    if value is None:
        return NOTHING
    if isinstance(value, (Word, At, Array)):
        return value.kind
    if isinstance(value, Several):
        return TupleType(tuple(map(kind_of, value.values)), value.names)
    raise Mistake(
        f"{thing_in_words(value)} is no value that compiled code can hold: it has numbers, structures, arrays, and "
        "tuples of them"
    )


def float_text(number: float, kind: Scalar) -> str:
    """Return a constant as LLVM writes it: the bits of a double, even for a narrower type."""
    if kind is FLOAT32:
        number = float(np.float32(number))
    return "0x" + struct.pack(">d", number).hex().upper()


def texts_of(value: Any) -> list[str]:
    """Return a value as LLVM operands, one for each of its words."""
    if isinstance(value, int):
        return [str(value)]
    if isinstance(value, Word):
        return [value.text]
    if isinstance(value, float):
        return [float_text(value, FLOAT64)]
    if value is None:
        return []
    if isinstance(value, At):
        return texts_of(value.address)
    if isinstance(value, Array):
        parts = (value.address, *value.shape, *(() if value.kind.contiguous else value.strides))
        return [text for part in parts for text in texts_of(part)]
    kind_of(value)
    return [text for part in value.values for text in texts_of(part)]


def typed_texts(value: Any) -> list[str]:
    """Return a value's operands with their types, as arguments of a call."""
    return [f"{word} {text}" for word, text in zip(words_of(kind_of(value)), texts_of(value), strict=True)]


def from_texts(kind: Any, texts: Sequence[str]) -> Any:
    """Return the value of a type that consists of these operands. An array's strides are filled in by `whole`."""
    if isinstance(kind, Scalar):
        return None if kind is NOTHING else Word(kind, texts[0])
    if isinstance(kind, TupleType):
        values, at = [], 0
        for part in kind.kinds:
            count = len(words_of(part))
            values.append(from_texts(part, texts[at : at + count]))
            at += count
        return Several(tuple(values), kind.names)
    if isinstance(kind, ArrayType):
        address, *sizes = (Word(INT, text) for text in texts)
        return Array(kind, address, tuple(sizes[: kind.dims]), tuple(sizes[kind.dims :]))
    return At(kind, Word(INT, texts[0]))


def thing_in_words(value: Any) -> str:
    """Describe a value to the author of the code."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if value is None or isinstance(value, (int, float, Word, At, Array, Several)):
        return in_words(kind_of(value)) if not isinstance(value, Several) else f"a tuple of {len(value.values)}"
    return f"{getattr(value, '__name__', value)!r} ({type(value).__name__})"
