"""Annotations of compiled functions: the types of parameters and results, as type checkers read them.

    Record      an address that knows its fields: an integer becomes one; other structures are mistakes
    int         an integer, a boolean or an enumeration; for a structure, its address
    float       a float; np.float32 a float32
    None        nothing
    tuple, |    combinations of these

Other annotations are for type checkers only. A parameter without an annotation takes anything.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from types import CodeType, FunctionType
from typing import Annotated, Any

import numpy as np

from ..formats.layout import Record
from .kinds import FLOAT32, FLOAT64, INT, NOTHING, ArrayType, Scalar, StructType, TupleType, in_words
from .numbers import ARRAY_CURE
from .struct_view import kind_of_record
from .values import At, Mistake, Several, plain

_UNIONS = typing.Union, types.UnionType
_NUMBERS: tuple[tuple[tuple[Any, ...], Scalar], ...] = (
    ((np.float32,), FLOAT32), ((float,), FLOAT64), ((int, np.integer, np.bool_), INT), ((type(None),), NOTHING),
)


class Unfit(Exception):
    """A value does not fit an annotation. The message says what is wanted."""


def annotations_of(fn: FunctionType) -> dict[str, Any]:
    """Return the annotations of a function as written: objects or strings."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(fn, format=annotationlib.Format.FORWARDREF)
    return fn.__annotations__


@functools.cache
def code_of(text: str) -> CodeType | None:
    """Return the code of an annotation that is a string."""
    try:
        return compile(text, "<annotation>", "eval", dont_inherit=True)
    except SyntaxError:
        return None


def hints_of(fn: FunctionType) -> dict[str, Any]:
    """Return the objects that annotations stand for. Leave out annotations with names that only type checkers know."""
    hints = annotations_of(fn)
    if not hints:
        return {}
    found = {}
    around: dict[str, Any] | None = None
    for name, hint in hints.items():
        if isinstance(hint, str):
            code = code_of(hint)
            if code is None:
                continue
            if around is None:
                around = _around(fn)
            try:
                hint = eval(code, fn.__globals__, around)
            except Exception:  # whatever an expression can raise
                continue
        found[name] = hint
    return found


def _around(fn: FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that this function uses."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_full(cell)}


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def record_of(hint: Any) -> type[Record] | None:
    """Return the record that an annotation names, alone or in a union; None if there is none."""
    if isinstance(hint, type) and issubclass(hint, Record) and hint is not Record:
        return hint
    if typing.get_origin(hint) in _UNIONS:
        return next(filter(None, map(record_of, typing.get_args(hint))), None)
    return None


def fitting(kind: Any, hint: Any) -> Any:
    """Return the type of a value of type `kind` under an annotation: it has as many words. Unfit if it does not fit."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fitting(kind, parts[0])
    if origin in _UNIONS:
        return _one_of(kind, parts)
    if origin is tuple and Ellipsis not in parts:
        return _tuple(kind, parts)
    if hint is None:
        hint = type(None)
    if origin is not None or not isinstance(hint, type) or hint is Record:
        return kind
    if issubclass(hint, Record):
        record = kind_of_record(hint)
        if kind is INT or (isinstance(kind, StructType) and kind.is_a(record)):
            return record
        raise Unfit(in_words(record))
    for classes, wanted in _NUMBERS:
        if issubclass(hint, classes):
            if kind is wanted or (wanted is INT and isinstance(kind, StructType)):
                return wanted
            raise Unfit(wanted.words)
    return kind


def _one_of(kind: Any, hints: tuple[Any, ...]) -> Any:
    """Return the type under one of several annotations: the first record that fits, else the first other that does."""
    wanted = []
    for hint in sorted(hints, key=lambda one: record_of(one) is None):
        try:
            return fitting(kind, hint)
        except Unfit as error:
            wanted.append(str(error))
    raise Unfit(" or ".join(wanted))


def _tuple(kind: Any, hints: tuple[Any, ...]) -> Any:
    if not isinstance(kind, TupleType) or len(kind.kinds) != len(hints):
        raise Unfit(f"a tuple of {len(hints)}")
    try:
        return TupleType(tuple(map(fitting, kind.kinds, hints)), kind.names)
    except Unfit as error:
        raise Unfit(f"{error} in a tuple") from None


def taken(fn: FunctionType, signature: inspect.Signature, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the types of a function's parameters for arguments of these types. A Mistake if one does not fit."""
    hints = hints_of(fn)
    if not hints.keys() - {"return"}:
        return kinds
    found = []
    for (name, parameter), kind in zip(signature.parameters.items(), kinds, strict=True):
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_POSITIONAL and isinstance(kind, TupleType):
            hint = tuple[(hint,) * len(kind.kinds)] if kind.kinds else Any
        try:
            found.append(fitting(kind, hint))
        except Unfit as error:
            given = f"{in_words(kind)}{_cure(kind, str(error))}"
            raise Mistake(f"{fn.__name__}(): {name} is {error}, not {given}") from None
    return tuple(found)


def _cure(kind: Any, wanted: str) -> str:
    if isinstance(kind, ArrayType):
        return ARRAY_CURE
    return _CONVERT.get(wanted, "") if isinstance(kind, Scalar) and kind is not NOTHING else ""


_CONVERT = {INT.words: ": convert it with int()", FLOAT64.words: ": convert it with float()",
            FLOAT32.words: ": convert it with np.float32()"}


def as_kind(value: Any, kind: Any) -> Any:
    """Return a value as one of the type that `fitting` returned for it."""
    if isinstance(kind, StructType):
        return At(kind, plain(value))
    if isinstance(value, Several):
        return Several(tuple(map(as_kind, value.values, kind.kinds)), value.names)
    return plain(value) if kind is INT else value
