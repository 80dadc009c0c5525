"""Arithmetic of compiled code. Integers wrap at 64 bits; floats follow IEEE 754.

Operations on constants are calculated here, as compiled code would calculate them. `promoted` returns the type in which
the two sides of an operator are calculated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from .emit import Emitter
from .kinds import FLOAT32, FLOAT64, INT, Scalar, in_words
from .values import (
    Array,
    Mistake,
    Word,
    float_text,
    is_constant,
    is_number,
    kind_of,
    plain,
    texts_of,
    thing_in_words,
    wrapped,
)

SIGNS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}

# For integers: LLVM's instruction, or a function of DIVISIONS.
_INT_OPS: dict[type, str] = {
    ast.Add: "add i64 {}, {}", ast.Sub: "sub i64 {}, {}", ast.Mult: "mul i64 {}, {}",
    ast.BitAnd: "and i64 {}, {}", ast.BitOr: "or i64 {}, {}", ast.BitXor: "xor i64 {}, {}",
    ast.LShift: "shl i64 {}, {}", ast.RShift: "ashr i64 {}, {}",
    ast.FloorDiv: "call i64 @gpunetio.floor_div(i64 {}, i64 {})", ast.Mod: "call i64 @gpunetio.modulo(i64 {}, i64 {})",
    ast.Pow: "call i64 @gpunetio.power(i64 {}, i64 {})",
}
_FLOAT_OPS: dict[type, str] = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_SHIFTS = (ast.LShift, ast.RShift)

_FOLD_INT: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.BitAnd: lambda a, b: a & b, ast.BitOr: lambda a, b: a | b, ast.BitXor: lambda a, b: a ^ b,
    ast.LShift: lambda a, b: a << (b & 63), ast.RShift: lambda a, b: a >> (b & 63),
    ast.FloorDiv: lambda a, b: a // b if b else 0, ast.Mod: lambda a, b: a % b if b else 0,
    ast.Pow: lambda a, b: pow(a, b, 1 << 64) if b >= 0 else 0,
}

COMPARE_INT = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge"}
_COMPARE_FLOAT = {ast.Eq: "oeq", ast.NotEq: "une", ast.Lt: "olt", ast.LtE: "ole", ast.Gt: "ogt", ast.GtE: "oge"}
_FOLD_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
}

# These round as Python does: the quotient towards minus infinity, and the remainder has the sign of the divisor.
# Division by 0 returns 0. The quotient of the least number and -1, which no instruction can calculate, wraps.
DIVISIONS = """
define internal i64 @gpunetio.floor_div(i64 %a, i64 %b) alwaysinline nounwind {
  %none = icmp eq i64 %b, 0
  br i1 %none, label %zero, label %divide
divide:
  %minus = icmp eq i64 %b, -1
  %by = select i1 %minus, i64 1, i64 %b
  %q = sdiv i64 %a, %by
  %r = srem i64 %a, %by
  %signs = xor i64 %r, %by
  %differ = icmp slt i64 %signs, 0
  %left = icmp ne i64 %r, 0
  %below = and i1 %differ, %left
  %one = sext i1 %below to i64
  %floor = add i64 %q, %one
  %negated = sub i64 0, %a
  %all = select i1 %minus, i64 %negated, i64 %floor
  ret i64 %all
zero:
  ret i64 0
}
define internal i64 @gpunetio.modulo(i64 %a, i64 %b) alwaysinline nounwind {
  %none = icmp eq i64 %b, 0
  br i1 %none, label %zero, label %divide
divide:
  %minus = icmp eq i64 %b, -1
  %by = select i1 %minus, i64 1, i64 %b
  %r = srem i64 %a, %by
  %signs = xor i64 %r, %by
  %differ = icmp slt i64 %signs, 0
  %left = icmp ne i64 %r, 0
  %below = and i1 %differ, %left
  %more = select i1 %below, i64 %b, i64 0
  %modulo = add i64 %r, %more
  ret i64 %modulo
zero:
  ret i64 0
}
define internal i64 @gpunetio.power(i64 %a, i64 %n) nounwind {
entry:
  %none = icmp slt i64 %n, 0
  br i1 %none, label %zero, label %head
head:
  %total = phi i64 [ 1, %entry ], [ %product, %body ]
  %base = phi i64 [ %a, %entry ], [ %square, %body ]
  %left = phi i64 [ %n, %entry ], [ %half, %body ]
  %over = icmp eq i64 %left, 0
  br i1 %over, label %done, label %body
body:
  %bit = and i64 %left, 1
  %odd = icmp ne i64 %bit, 0
  %factor = select i1 %odd, i64 %base, i64 1
  %product = mul i64 %total, %factor
  %square = mul i64 %base, %base
  %half = lshr i64 %left, 1
  br label %head
done:
  ret i64 %total
zero:
  ret i64 0
}
"""


ARRAY_CURE = ": register it with pd.register(), and pass mr.address to the kernel"


def array_cure(value: Any) -> str:
    """Say what to pass to a kernel where an address is needed and an array is given."""
    return ARRAY_CURE if isinstance(value, Array) else ""


def number(value: Any) -> Any:
    """Return a value that is a number. Raise a Mistake if it is none."""
    value = plain(value)
    if not is_number(value):
        raise Mistake(f"a number is needed here, not {thing_in_words(value)}")
    return value


def int_text(value: Any) -> str:
    """Return an integer as an operand. Raise a Mistake if the value is not an integer."""
    value = plain(value)
    if isinstance(value, int) or (isinstance(value, Word) and value.kind is INT):
        return texts_of(value)[0]
    if isinstance(value, (float, Word)):
        raise Mistake(f"an integer is needed here, not {in_words(kind_of(value))}: convert it with int()")
    raise Mistake(f"an integer is needed here, not {thing_in_words(value)}")


def promoted(left: Any, right: Any) -> Scalar:
    """Return the type in which two numbers are calculated: the type of the wider one.

    A constant takes the type of the other side, so `x * 0.5` is a float32 if x is a float32.
    """
    left, right = number(left), number(right)
    kinds = {kind_of(left), kind_of(right)}
    if kinds == {INT}:
        return INT
    variable = {kind_of(one) for one in (left, right) if not is_constant(one)}
    if FLOAT32 in variable and FLOAT64 not in variable:
        return FLOAT32
    return FLOAT64 if FLOAT64 in kinds else FLOAT32


def converted(e: Emitter, value: Any, kind: Scalar) -> Any:
    """Return a number converted to another type."""
    value = number(value)
    has = kind_of(value)
    if has is kind:
        return value
    if is_constant(value):
        if kind is INT:
            return _to_int(value)
        if kind is FLOAT64:
            return float(value)
        return Word(FLOAT32, float_text(float(value), FLOAT32))
    text = value.text
    if has is INT:
        return e.word(kind, f"sitofp i64 {text} to {kind.llvm}")
    if kind is INT:  # towards zero, clamped to 64 bits; not-a-number becomes 0
        bits = {FLOAT32: "f32", FLOAT64: "f64"}[has]
        return e.word(INT, f"call i64 @llvm.fptosi.sat.i64.{bits}({has.llvm} {text})")
    return e.word(kind, f"{'fpext' if kind is FLOAT64 else 'fptrunc'} {has.llvm} {text} to {kind.llvm}")


def _to_int(value: float) -> int:
    if math.isnan(value):
        return 0
    return max(_LEAST, min(_MOST, int(value) if math.isfinite(value) else _MOST if value > 0 else _LEAST))


def binary(e: Emitter, how: ast.operator, left: Any, right: Any) -> Any:
    """Return `left how right`."""
    kind, left, right = type(how), plain(left), plain(right)
    if kind not in SIGNS:
        raise Mistake(f"compiled code has no operator for this ({kind.__name__})")
    for side in (left, right):
        if not is_number(side):
            raise Mistake(f"{SIGNS[kind]} takes numbers, not {thing_in_words(side)}{array_cure(side)}")
    of = FLOAT64 if kind is ast.Div and promoted(left, right) is INT else promoted(left, right)
    if is_constant(left) and is_constant(right):
        return _folded(kind, left, right, of)
    if of is INT:
        return _of_ints(e, kind, left, right)
    one, other = (texts_of(converted(e, side, of))[0] for side in (left, right))
    if kind in _FLOAT_OPS:
        return e.word(of, f"{_FLOAT_OPS[kind]} {of.llvm} {one}, {other}")
    if kind in (ast.FloorDiv, ast.Mod):
        return _float_division(e, kind, one, other, of)
    if kind is ast.Pow:
        if right == 2:
            return e.word(of, f"fmul {of.llvm} {one}, {one}")
        return e.word(of, f'call {of.llvm} @"{e.math("pow", of)}"({of.llvm} {one}, {of.llvm} {other})')  # type: ignore[attr-defined]
    raise Mistake(f"{SIGNS[kind]} takes integers, and one side is {in_words(of)}: convert it with int()")


def _folded(kind: type, left: Any, right: Any, of: Scalar) -> Any:
    if of is INT:
        return wrapped(_FOLD_INT[kind](left, right))
    try:
        return {
            ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
            ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
            ast.Pow: lambda a, b: a**b,
        }[kind](float(left), float(right))
    except KeyError:
        raise Mistake(f"{SIGNS[kind]} takes integers, and one side is a float: convert it with int()") from None
    except (ZeroDivisionError, OverflowError) as error:
        why = "division by zero" if isinstance(error, ZeroDivisionError) else error  # in any version of Python
        raise Mistake(f"{left} {SIGNS[kind]} {right}: {why}") from None


def _of_ints(e: Emitter, kind: type, left: Any, right: Any) -> Any:
    one, other = int_text(left), int_text(right)
    if kind in _SHIFTS:  # the count is taken modulo 64, as on processors
        other = str(right & 63) if isinstance(right, int) else e.let(f"and i64 {other}, 63")
    return e.word(INT, _INT_OPS[kind].format(one, other))


def _float_division(e: Emitter, kind: type, one: str, other: str, of: Scalar) -> Any:
    """Return the quotient or remainder as Python defines it (float_floor_div, float_rem in Objects/floatobject.c)."""
    t = of.llvm
    bits = "f32" if of is FLOAT32 else "f64"
    rest = e.let(f'call {t} @"{e.math("fmod", of)}"({t} {one}, {t} {other})')  # type: ignore[attr-defined]
    differ = e.let(f"xor i1 {e.let(f'fcmp olt {t} {rest}, 0.0')}, {e.let(f'fcmp olt {t} {other}, 0.0')}")
    left = e.let(f"fcmp une {t} {rest}, 0.0")
    below = e.let(f"and i1 {differ}, {left}")
    modulo = e.let(f"select i1 {below}, {t} {e.let(f'fadd {t} {rest}, {other}')}, {t} {rest}")
    if kind is ast.Mod:
        zero = e.let(f"call {t} @llvm.copysign.{bits}({t} 0.0, {t} {other})")
        return e.word(of, f"select i1 {left}, {t} {modulo}, {t} {zero}")
    quotient = e.let(f"fdiv {t} {e.let(f'fsub {t} {one}, {modulo}')}, {other}")
    return e.word(of, f"call {t} @llvm.rint.{bits}({t} {quotient})")


def unary(e: Emitter, how: ast.unaryop, value: Any) -> Any:
    """Return `how value`, for signs and `~`."""
    value = plain(value)
    if isinstance(how, ast.Invert):
        if isinstance(value, int):
            return ~value
        return e.word(INT, f"xor i64 {int_text(value)}, -1")
    kind = kind_of(number(value))
    if isinstance(how, ast.UAdd):
        return value
    if is_constant(value):
        return wrapped(-value) if kind is INT else -value
    return e.word(kind, f"sub i64 0, {value.text}" if kind is INT else f"fneg {kind.llvm} {value.text}")


def compared(e: Emitter, how: ast.cmpop, left: Any, right: Any) -> bool | str:
    """Return whether `left how right` is true: a boolean if known now, else a condition of LLVM."""
    kind, left, right = type(how), plain(left), plain(right)
    if kind not in COMPARE_INT:
        raise Mistake(f"compiled code cannot compare so ({kind.__name__})")
    if is_constant(left) and is_constant(right):
        return _FOLD_COMPARE[kind](left, right)
    for side in (left, right):
        if not is_number(side):
            raise Mistake(f"{SIGNS[kind]} compares numbers, not {thing_in_words(side)}")
    of = promoted(left, right)
    one, other = (texts_of(converted(e, side, of))[0] for side in (left, right))
    if of is INT:
        return e.let(f"icmp {COMPARE_INT[kind]} i64 {one}, {other}")
    return e.let(f"fcmp {_COMPARE_FLOAT[kind]} {of.llvm} {one}, {other}")


def truth(e: Emitter, value: Any) -> bool | str:
    """Return whether a number is not 0: a boolean if known now, else a condition of LLVM."""
    value = plain(value)
    if value is None:
        return False
    if is_constant(value):
        return bool(value)
    kind = kind_of(number(value))
    return e.let(f"icmp ne i64 {value.text}, 0" if kind is INT else f"fcmp une {kind.llvm} {value.text}, 0.0")


def as_int(e: Emitter, condition: bool | str) -> Any:
    """Return a condition as an integer, 0 or 1."""
    return int(condition) if isinstance(condition, bool) else e.word(INT, f"zext i1 {condition} to i64")
