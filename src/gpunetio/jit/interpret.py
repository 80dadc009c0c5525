"""Run device code as plain Python: the reference for compiled code, and for use with `pdb`, `print` and coverage.

    work.interpret[grid, block, place](qp, n).wait(timeout=10)     # a kernel
    put.interpret(qp, raddr, rkey, laddr, lkey, nbytes)            # a device function
    GPUNETIO_INTERPRET=1 python program.py                         # all kernels on the host

Lines and names stay those of the source. Only operators change, as docs/kernel-language.md says: integers wrap at 64
bits, shifts take their count modulo 64, division by 0 does not raise, and a float32 stays a float32. Structures and
primitives access memory; a primitive is machine code (roots.py), as everywhere.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import operator
import os
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ..formats.layout import Record
from .annotations import hints_of, record_of
from .by_kind import ByKind
from .calls import LIBRARY
from .compile import DeviceFunction
from .kinds import StructInMemory
from .numbers import SIGNS
from .source import tree_of
from .struct_view import kind_of_record
from .values import INTEGERS, CompileError, wrapped

SWITCH = "GPUNETIO_INTERPRET"  # if not empty, kernels on the host are interpreted


def wanted() -> bool:
    """Return whether the environment asks for kernels to be interpreted."""
    return bool(os.environ.get(SWITCH))


def interpreted(fn: FunctionType) -> FunctionType:
    """Return a Python function that does what the compiled function does."""
    free = [cell.cell_contents for cell in fn.__closure__ or ()]
    names: dict[str, Any] = {}
    exec(_code(fn), fn.__globals__, names)
    made = names["make"](_Meanings, _records_of(fn), *free)
    made.__defaults__, made.__kwdefaults__, made.__qualname__ = fn.__defaults__, fn.__kwdefaults__, fn.__qualname__
    return made


@functools.cache
def _code(fn: FunctionType) -> CodeType:
    """Return code that defines the function inside another one, which provides the names that are not its module's."""
    try:
        return _changed(fn)
    except RecursionError:
        raise CompileError(f"{fn.__qualname__}() nests too deeply to be run as Python") from None


def _changed(fn: FunctionType) -> CodeType:
    tree = tree_of(fn)
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults = [ast.Constant(None)] * len(tree.args.defaults)
    tree.args.kw_defaults = [ast.Constant(None) if one else None for one in tree.args.kw_defaults]
    local = {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}
    changed = _Operators(local).visit(tree)
    changed.body[:0] = _as_records(changed, _records_of(fn))
    outer = [ast.arg(name) for name in (_MEANINGS, _RECORDS, *fn.__code__.co_freevars)]
    arguments = ast.arguments(posonlyargs=[], args=outer, kwonlyargs=[], kw_defaults=[], defaults=[])
    give = ast.Return(ast.Name(tree.name, ast.Load()))
    module = ast.Module([ast.FunctionDef("make", arguments, [changed, give], [], None)], [])
    if hasattr(module.body[0], "type_params"):
        module.body[0].type_params = []  # type: ignore[attr-defined]  # since Python 3.12
    ast.copy_location(module.body[0], tree)
    return compile(ast.fix_missing_locations(module), fn.__code__.co_filename, "exec")


_MEANINGS, _RECORDS = "__meanings", "__records"


def _records_of(fn: FunctionType) -> dict[str, Callable[[Any], Any]]:
    """Return the functions that make records of arguments, by parameter; "return" is for the result."""
    found = {name: record_of(hint) for name, hint in hints_of(fn).items()}
    return {name: functools.partial(_as_record, fn.__name__, name, one) for name, one in found.items() if one}


def _as_record(function: str, name: str, record: type[Record], given: Any) -> Any:
    """Return an argument as the record that the annotation names."""
    if given is None or isinstance(given, record):
        return given
    if isinstance(given, StructInMemory) and given.kind.is_a(kind_of_record(record)):
        return record(given)
    if isinstance(given, (Record, StructInMemory)) or not isinstance(given, INTEGERS):
        kind = given.kind.name if isinstance(given, StructInMemory) else type(given).__name__
        raise TypeError(f"{function}(): {name} is a structure ({record.__name__}), not {kind}")
    return record(given)


def _as_records(tree: ast.FunctionDef, records: dict[str, Any]) -> list[ast.stmt]:
    """Return the first statements of a function, which make records of its arguments."""
    made: list[ast.stmt] = []
    for name in records.keys() - {"return"}:
        record = ast.Subscript(ast.Name(_RECORDS, ast.Load()), ast.Constant(name), ast.Load())
        called = ast.Call(record, [ast.Name(name, ast.Load())], [])
        made.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], called), tree.args))
    return made


class _Operators(ast.NodeTransformer):
    """Replaces operators and calls by those of `_Meanings`."""

    def __init__(self, local: set[str]):
        self._local = local

    def _call(self, node: ast.expr, name: str, *given: Any) -> ast.expr:
        called = ast.Attribute(ast.Name(_MEANINGS, ast.Load()), name, ast.Load())
        passed = [one if isinstance(one, ast.AST) else ast.Constant(one) for one in given]
        return ast.copy_location(ast.Call(called, passed, []), node)  # type: ignore[arg-type]

    def _is_constant(self, node: ast.expr) -> bool:
        """Return whether a value is known at compile time. It then takes the type of the operator's other side."""
        if isinstance(node, ast.Name):
            return node.id not in self._local
        if isinstance(node, ast.Attribute):
            return self._is_constant(node.value)
        if isinstance(node, ast.BinOp):
            return self._is_constant(node.left) and self._is_constant(node.right)
        return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and self._is_constant(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        constant = self._is_constant(node.left), self._is_constant(node.right)
        sign = SIGNS.get(type(node.op), "?")
        return self._call(node, "binary", sign, self.visit(node.left), self.visit(node.right), *constant)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        name = {ast.USub: "negative", ast.Invert: "inverse", ast.Not: "no", ast.UAdd: "positive"}[type(node.op)]
        return self._call(node, name, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if any(type(how) not in SIGNS for how in node.ops):  # `in`, `is`
            self.generic_visit(node)
            return ast.copy_location(ast.Call(ast.Name("int", ast.Load()), [node], []), node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        rest = [ast.Lambda(nothing, self.visit(one)) for one in node.comparators]  # run only if reached
        return self._call(node, "compared", self.visit(node.left), *(
            part for how, one in zip(node.ops, rest) for part in (SIGNS[type(how)], one)
        ))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        target: Any = node.target
        read = ast.copy_location(_as_read(target), target)
        value = self.visit_BinOp(ast.copy_location(ast.BinOp(read, node.op, node.value), node))  # type: ignore[arg-type]
        return ast.copy_location(ast.Assign([self.visit(target)], value), node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        node.value = self._call(node.value, "value", node.value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        if node.value is not None:
            makers = ast.Name(_RECORDS, ast.Load())
            node.value = self._call(node.value, "returned", makers, node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.func = self._call(node.func, "function", node.func)
        return node


def _as_read(target: Any) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return ast.Subscript(target.value, target.slice, ast.Load())


_INTS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63),
    "//": lambda a, b: a // b if b else 0, "%": lambda a, b: a % b if b else 0,
    "**": lambda a, b: pow(a, b, 1 << 64) if b >= 0 else 0,
}
_COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class _Meanings:
    """The meanings of operators and functions in device code."""

    @staticmethod
    def value(value: Any) -> Any:
        """Return a number as compiled code holds it. A structure stays a structure."""
        if isinstance(value, (Record, StructInMemory)):
            return value
        if isinstance(value, INTEGERS):
            return wrapped(int(value))
        return float(value) if isinstance(value, np.float64) else value

    @staticmethod
    def returned(records: dict[str, Any], value: Any) -> Any:
        """Return the result of a function, as a record if its annotation says so."""
        made = records.get("return")
        return value if made is None else made(value)

    @classmethod
    def binary(cls, sign: str, left: Any, right: Any, left_constant: bool, right_constant: bool) -> Any:
        """Return `left sign right`."""
        left, right = cls.value(left), cls.value(right)
        if isinstance(left, tuple):
            return left + right
        if isinstance(left, int) and isinstance(right, int) and sign != "/":
            return wrapped(_INTS[sign](left, right))
        narrow = _is_narrow(left, right, left_constant, right_constant)
        return _of_floats(sign, left, right, np.float32 if narrow else np.float64)

    @classmethod
    def compared(cls, left: Any, *rest: Any) -> int:
        """Return whether a chain of comparisons holds."""
        left = cls.value(left)
        for sign, right_of in zip(rest[::2], rest[1::2], strict=True):
            right = cls.value(right_of())
            one, other = left, right
            if isinstance(left, int) != isinstance(right, int):  # as the wider type
                kind = np.float32 if np.float32 in (type(left), type(right)) else float
                one, other = kind(left), kind(right)
            if not _COMPARE[sign](one, other):
                return 0
            left = right
        return 1

    @classmethod
    def negative(cls, value: Any) -> Any:
        """Return `-value`."""
        value = cls.value(value)
        return wrapped(-value) if isinstance(value, int) else -value

    @classmethod
    def positive(cls, value: Any) -> Any:
        """Return `+value`."""
        return cls.value(value)

    @classmethod
    def inverse(cls, value: Any) -> int:
        """Return `~value`."""
        return ~cls.value(value)

    @classmethod
    def no(cls, value: Any) -> int:
        """Return `not value`."""
        return int(not cls.value(value))

    @staticmethod
    def function(called: Any) -> Any:
        """Return what to call for a function. Functions of the package and of the program are also interpreted."""
        if isinstance(called, DeviceFunction):
            return interpreted(called.py_func)
        if isinstance(called, ByKind):
            return functools.partial(_by_kind, called)
        try:
            return _FUNCTIONS.get(called, called)
        except TypeError:  # it cannot be hashed
            return called


def _by_kind(table: ByKind, kind: int, *given: Any) -> Any:
    function = table.functions.get(kind)
    return 0 if function is None else interpreted(function.py_func)(*given) or 0


def _is_narrow(left: Any, right: Any, left_constant: bool, right_constant: bool) -> bool:
    wide = [type(one) is float and not constant for one, constant in ((left, left_constant), (right, right_constant))]
    return np.float32 in (type(left), type(right)) and not any(wide)


def _of_floats(sign: str, left: Any, right: Any, kind: Any) -> Any:
    one, other = kind(left), kind(right)
    with np.errstate(all="ignore"):
        if sign in "+-*/":
            result = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[sign](one, other)
        elif sign == "**":
            result = one * one if other == 2 else np.power(one, other)
        else:
            rest = np.fmod(one, other)
            modulo = rest + other if rest != 0 and (rest < 0) != (other < 0) else rest
            if sign == "%":
                result = modulo if rest != 0 else np.copysign(kind(0), other)
            else:
                result = np.rint((one - modulo) / other)
    return kind(result) if kind is np.float32 else float(result)


def _int(value: Any = 0) -> int:
    """Return a number as an integer, rounded towards zero and clamped to 64 bits; 0 for not-a-number."""
    if isinstance(value, int):
        return wrapped(value)
    number = float(value)
    if math.isnan(number):
        return 0
    return max(_LEAST, min(_MOST, int(number) if math.isfinite(number) else _MOST if number > 0 else _LEAST))


def _rounded(how: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda value: value if isinstance(value, int) else _int(how(value))


def _of_numpy(name: str) -> Callable[..., Any]:
    """Return a function of `math` that behaves as in the C library: it raises nothing."""
    function = getattr(np, {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh",
                            "acosh": "arccosh", "atanh": "arctanh", "pow": "power", "atan2": "arctan2",
                            "sqrt": "sqrt"}.get(name, name), None) or np.vectorize(getattr(math, name))

    def call(*given: Any) -> Any:
        narrow = np.float32 in map(type, given) and not any(type(one) is float for one in given)
        kind = np.float32 if narrow else np.float64
        with np.errstate(all="ignore"):
            result = function(*map(kind, given))
        return kind(result) if narrow else float(result)

    return call


def _narrow(kind: Any) -> Callable[[Any], int]:
    info = np.iinfo(kind)
    return lambda value: (_int(value) - int(info.min)) % (1 << info.bits) + int(info.min)


def _extreme(better: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def best_of(*given: Any) -> Any:
        values = given[0] if len(given) == 1 else given
        best, *others = map(_Meanings.value, values)
        for one in others:
            if type(one) is not type(best):
                kind = np.float32 if np.float32 in (type(one), type(best)) else float
                one, best = kind(one), kind(best)
            best = one if better(one, best) else best
        return best

    return best_of


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    int: _int, bool: lambda value: int(bool(value)), np.bool_: lambda value: int(bool(value)),
    abs: lambda value: wrapped(builtins.abs(value)) if isinstance(value, int) else builtins.abs(value),
    min: _extreme(operator.lt), max: _extreme(operator.gt),
    divmod: lambda a, b: tuple(_Meanings.binary(sign, a, b, False, False) for sign in ("//", "%")),
    range: lambda *given: range(*map(_int, given)) if len(given) < 3 or given[2] else (),
    np.int64: _int, np.uint64: _int, np.float64: float,
    **{kind: _narrow(kind) for kind in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)},
    math.floor: _rounded(np.floor), math.ceil: _rounded(np.ceil), math.trunc: _rounded(np.trunc),
    math.isnan: lambda value: int(np.isnan(value)), math.isinf: lambda value: int(np.isinf(value)),
    math.isfinite: lambda value: int(np.isfinite(value)),
    **{getattr(math, name): _of_numpy(name) for name in (*LIBRARY, "sqrt", "fabs", "copysign")},
}
