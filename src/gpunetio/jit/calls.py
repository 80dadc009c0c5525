"""Functions of Python and NumPy that compiled code can call: built-in functions, `math`, and conversions."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .kinds import FLOAT32, FLOAT64, INT, Scalar
from .numbers import as_int, binary, compared, converted, int_text, number, promoted, truth, unary
from .values import Array, Mistake, Several, Word, is_constant, kind_of, texts_of, thing_in_words

Given = list[Any]


def _one(given: Given, name: str) -> Any:
    if len(given) != 1:
        raise Mistake(f"{name}() takes 1 argument, not {len(given)}")
    return given[0]


def _extreme(how: type[ast.cmpop], name: str) -> Callable[[Any, Given], Any]:
    def emit(e: Any, given: Given) -> Any:
        """Return the first of equal values, as Python does: a later value wins only if it is less, or greater."""
        if len(given) == 1 and isinstance(given[0], Several):
            given = list(given[0].values)
        if not given:
            raise Mistake(f"{name}() takes numbers")
        best = number(given[0])
        for one in map(number, given[1:]):
            kind = promoted(best, one)
            best, one = converted(e, best, kind), converted(e, one, kind)
            if kind is INT and not (is_constant(best) and is_constant(one)):
                best = e.word(INT, f"call i64 @llvm.s{name}.i64(i64 {int_text(best)}, i64 {int_text(one)})")
                continue
            better = compared(e, how(), one, best)
            if isinstance(better, bool):
                best = one if better else best
            else:
                best = e.word(kind, f"select i1 {better}, {kind.llvm} {texts_of(one)[0]}, "
                                    f"{kind.llvm} {texts_of(best)[0]}")
        return best

    return emit


def _abs(e: Any, given: Given) -> Any:
    value = number(_one(given, "abs"))
    if is_constant(value):
        return unary(e, ast.USub(), value) if value < 0 else value
    if value.kind is INT:
        return e.word(INT, f"call i64 @llvm.abs.i64(i64 {value.text}, i1 false)")
    return _intrinsic(e, "fabs", value)


def _len(e: Any, given: Given) -> Any:
    value = _one(given, "len")
    if isinstance(value, Several):
        return len(value.values)
    if isinstance(value, Array):
        return value.shape[0]
    if isinstance(value, np.ndarray) and value.ndim:  # a constant of the program
        return len(value)
    raise Mistake(f"len() takes tuples and arrays, not {thing_in_words(value)}")


def _bool(e: Any, given: Given) -> Any:
    return as_int(e, truth(e, _one(given, "bool")))


def _as(kind: Scalar, name: str) -> Callable[[Any, Given], Any]:
    return lambda e, given: converted(e, _one(given, name), kind)


def _narrow(bits: int, signed: bool, name: str) -> Callable[[Any, Given], Any]:
    def emit(e: Any, given: Given) -> Any:
        """Return the low bits of an integer, as a signed or unsigned integer."""
        value = converted(e, _one(given, name), INT)
        if isinstance(value, int):
            low = value & (1 << bits) - 1
            return low - (1 << bits) if signed and low >> bits - 1 else low
        narrow = e.let(f"trunc i64 {value.text} to i{bits}")
        return e.word(INT, f"{'sext' if signed else 'zext'} i{bits} {narrow} to i64")

    return emit


def _divmod(e: Any, given: Given) -> Any:
    if len(given) != 2:
        raise Mistake(f"divmod() takes 2 numbers, not {len(given)}")
    return Several(tuple(binary(e, how, *given) for how in (ast.FloorDiv(), ast.Mod())))


def _range(e: Any, given: Given) -> Any:
    raise Mistake("compiled code has range() in for loops only")


def _print(e: Any, given: Given) -> None:
    e.unit.target.print_values(e, given)


# --- math -------------------------------------------------------------------------------------------------------------


def _float(e: Any, value: Any) -> Any:
    """Return a number as a float; a float32 stays one."""
    value = number(value)
    return value if kind_of(value) is FLOAT32 else converted(e, value, FLOAT64)


def _intrinsic(e: Any, name: str, *values: Any) -> Any:
    """Call an intrinsic that LLVM has for all targets."""
    kind = kind_of(values[0])
    taken = ", ".join(f"{kind.llvm} {texts_of(value)[0]}" for value in values)
    return e.word(kind, f"call {kind.llvm} @llvm.{name}.{'f32' if kind is FLOAT32 else 'f64'}({taken})")


def _everywhere(name: str, intrinsic: str) -> Callable[[Any, Given], Any]:
    return lambda e, given: _intrinsic(e, intrinsic, _float(e, _one(given, f"math.{name}")))


def _whole(name: str, intrinsic: str) -> Callable[[Any, Given], Any]:
    """Return a function that rounds to an integer, as Python does."""
    def emit(e: Any, given: Given) -> Any:
        value = number(_one(given, f"math.{name}"))
        return value if kind_of(value) is INT else converted(e, _intrinsic(e, intrinsic, _float(e, value)), INT)

    return emit


def _library(name: str, count: int) -> Callable[[Any, Given], Any]:
    def emit(e: Any, given: Given) -> Any:
        """Call a function of the C library, or of CUDA's libdevice."""
        if len(given) != count:
            raise Mistake(f"math.{name}() takes {count} number{'s' * (count > 1)}, not {len(given)}")
        values = [_float(e, value) for value in given]
        kind = FLOAT64 if FLOAT64 in map(kind_of, values) else FLOAT32
        taken = ", ".join(f"{kind.llvm} {texts_of(converted(e, value, kind))[0]}" for value in values)
        return e.word(kind, f'call {kind.llvm} @"{e.math(name, kind)}"({taken})')

    return emit


def _copysign(e: Any, given: Given) -> Any:
    if len(given) != 2:
        raise Mistake(f"math.copysign() takes 2 numbers, not {len(given)}")
    kind = promoted(*(_float(e, value) for value in given))
    return _intrinsic(e, "copysign", *(_variable(e, converted(e, value, kind)) for value in given))


def _variable(e: Any, value: Any) -> Any:
    return Word(kind_of(value), texts_of(value)[0])


def _is(name: str, test: str) -> Callable[[Any, Given], Any]:
    def emit(e: Any, given: Given) -> Any:
        value = _float(e, _one(given, f"math.{name}"))
        kind, text = kind_of(value), texts_of(value)[0]
        if test == "uno":
            return as_int(e, e.let(f"fcmp uno {kind.llvm} {text}, {text}"))
        size = texts_of(_intrinsic(e, "fabs", value))[0]
        infinity = "0x7FF0000000000000"
        return as_int(e, e.let(f"fcmp {test} {kind.llvm} {size}, {infinity}"))

    return emit


# Functions of the C library that `math` has under the same name, with the number of their arguments.
LIBRARY: dict[str, int] = {
    **dict.fromkeys((
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2",
        "expm1", "log", "log2", "log10", "log1p", "cbrt", "erf", "erfc",
    ), 1),
    **dict.fromkeys(("pow", "atan2", "hypot", "fmod"), 2),
}

BUILTINS: dict[Any, Callable[[Any, Given], Any]] = {
    min: _extreme(ast.Lt, "min"), max: _extreme(ast.Gt, "max"), abs: _abs, len: _len, divmod: _divmod,
    int: _as(INT, "int"), float: _as(FLOAT64, "float"), bool: _bool, range: _range, print: _print,
    np.float32: _as(FLOAT32, "float32"), np.float64: _as(FLOAT64, "float64"), np.int64: _as(INT, "int64"),
    np.uint64: _as(INT, "uint64"), np.bool_: _bool,
    **{getattr(np, f"{sign}int{bits}"): _narrow(bits, not sign, f"{sign}int{bits}")
       for bits in (8, 16, 32) for sign in ("", "u")},
    math.sqrt: _everywhere("sqrt", "sqrt"), math.fabs: _everywhere("fabs", "fabs"),
    math.floor: _whole("floor", "floor"), math.ceil: _whole("ceil", "ceil"), math.trunc: _whole("trunc", "trunc"),
    math.copysign: _copysign,
    math.isnan: _is("isnan", "uno"), math.isinf: _is("isinf", "oeq"), math.isfinite: _is("isfinite", "one"),
    **{getattr(math, name): _library(name, count) for name, count in LIBRARY.items()},
}
