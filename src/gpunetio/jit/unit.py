"""A unit: functions that are compiled together for one target, each once for each combination of argument types."""

from __future__ import annotations

import inspect
import itertools
from types import FunctionType
from typing import Any, NamedTuple

from llvmlite import ir

from ..formats.layout import Record
from .annotations import taken
from .by_kind import ByKind
from .calls import LIBRARY
from .compile import Function, helper
from .kinds import INT, StructType
from .lines import Lines
from .lower import TOO_DEEP, Lowering
from .numbers import DIVISIONS, array_cure, int_text
from .ops.lowering import Primitive, target_of_ops
from .shared import ALIGNMENT, emit, shared_array
from .signatures import signature_of
from .struct_view import kind_of_record
from .targets import PURE_PTX, Cuda, Host, Target
from .values import (
    At,
    CompileError,
    Mistake,
    Several,
    Silent,
    Word,
    is_number,
    kind_of,
    of_python,
    plain,
    thing_in_words,
)

_I64: Any = ir.IntType(64)
_READNONE = "readnone"  # the only attribute of llvmlite for what PURE_PTX says
_FLOATS = ("f32", "float"), ("f64", "double")
_INTRINSICS = {
    **{f"llvm.bswap.i{bits}": f"i{bits} @llvm.bswap.i{bits}(i{bits})" for bits in (16, 32, 64)},
    **{f"llvm.{name}.i64": f"i64 @llvm.{name}.i64(i64, i64)" for name in ("smin", "smax")},
    "llvm.abs.i64": "i64 @llvm.abs.i64(i64, i1)",
    **{f"llvm.{name}.{bits}": f"{kind} @llvm.{name}.{bits}({kind})"
       for name in ("sqrt", "fabs", "floor", "ceil", "trunc", "rint") for bits, kind in _FLOATS},
    **{f"llvm.copysign.{bits}": f"{kind} @llvm.copysign.{bits}({kind}, {kind})" for bits, kind in _FLOATS},
    **{f"llvm.fptosi.sat.i64.{bits}": f"i64 @llvm.fptosi.sat.i64.{bits}({kind})" for bits, kind in _FLOATS},
}


class Failure(NamedTuple):
    """An exception that compiled code may raise: its class and message, and where."""

    kind: str
    message: str
    place: str


class Unit:
    """Functions for a target, and their IR. `name` is the prefix of symbols.

    `inlines`: whether device functions are inlined wherever they are called; otherwise LLVM decides.
    """

    target: Target
    checks_bounds: bool
    lines: Lines | None
    shared_bytes: int  # the bytes of shared arrays that a block needs

    def __init__(
        self, target: Target, name: str = "", inlines_last_call: bool = False, checks_bounds: bool = False,
        inlines: bool = True, lines: Lines | None = None,
    ):
        self.target, self._name, self.checks_bounds, self.lines = target, name, checks_bounds, lines
        self._inlined = "alwaysinline" if inlines else "inlinehint"
        # LLVM inlines an internal function with a single call, whatever its size. On CUDA, where such functions are not
        # inlined, LLVM learns from the calls which arguments are constants, and from the function what it returns.
        self._linkage = "internal" if inlines_last_call or isinstance(target, Cuda) else "linkonce_odr hidden"
        self._module = self._new_module()  # the primitives, which llvmlite writes
        # The primitives that are pure PTX. While LLVM optimizes, they are only declared, as speculatable, which inline
        # PTX cannot be: so LLVM moves them out of loops. They are inlined afterwards. Loads of constant fields are
        # among them. On an H200, a put with completion takes 2.4 µs instead of 3.4 µs. In return, kernels that receive
        # packets take up to twice as many registers.
        self._late = self._new_module()
        self.failures: list[Failure] = []
        self.shared_bytes = 0
        self.library: dict[str, str] = {}  # mathematical functions: their types, by symbol
        self._declared: list[str] = []
        self._texts: list[str] = []
        self._functions: dict[Any, tuple[str, Any]] = {}  # symbol and result, by function and types
        self._broken: set[Any] = set()
        self._primitives: dict[Any, Any] = {}
        self._symbol_of: dict[Any, str] = {}
        self._constants: dict[Any, str] = {}
        self._symbols: set[str] = set()
        self._numbers = itertools.count(1)

    def _new_module(self) -> Any:
        module: Any = ir.Module()
        module.triple = self.target.machine.triple
        module.data_layout = str(self.target.machine.target_data)
        return module

    # --- functions ----------------------------------------------------------------------------------------------------

    def need(self, function: Function, kinds: tuple[Any, ...]) -> tuple[str, Any]:
        """Return the symbol of a function, and the type of its result. Compile the function unless it already is."""
        kinds = taken(function.py_func, function.signature, kinds)
        key = function, kinds
        if key in self._broken:
            raise Silent
        found = self._functions.get(key)
        if found is None:
            self._functions[key] = "", None  # detects a function that calls itself
            try:
                lowered = Lowering(self, function.py_func, kinds)
            except CompileError:
                self._broken.add(key)
                raise
            symbol = self._symbol(f"{self._name}{function.py_func.__module__}.{function.py_func.__qualname__}")
            target, inlined = self.target, function.inlined
            attributes = f"{self._inlined if inlined else target.called} {target.attributes}"
            linkage = "internal" if inlined else self._linkage
            first = "" if inlined else target.first_of_called
            self._texts.append(lowered.text(symbol, linkage, attributes, first))
            found = self._functions[key] = symbol, lowered.result
        if not found[0]:
            raise Mistake(f"{function.py_func.__qualname__}() calls itself: compiled code has no recursion")
        return found

    def entry(self, function: Function, symbol: str, kinds: tuple[Any, ...], widths: tuple[int, ...] = ()) -> Any:
        """Add a function for outside callers, with the ABI of C or as a CUDA kernel. Return the type of its result."""
        with target_of_ops(self.target):
            try:
                inner, result = self.need(function, kinds)
                text = self.target.entry(symbol, inner, kinds, result, bool(self.failures), widths)
                self._texts.append(self.lines.of_entry(text, function.py_func) if self.lines else text)
            except Mistake as mistake:
                called = f"{function.py_func.__name__}(): "
                raise CompileError(f"{called}{str(mistake).removeprefix(called)}") from None
            except RecursionError:
                raise CompileError(f"{function.py_func.__qualname__}(): {TOO_DEEP}") from None
        return result

    def primitive_entry(self, primitive: Any, symbol: str) -> None:
        """Add a primitive operation for outside callers."""
        with target_of_ops(self.target):
            constant = self.constant(primitive)
        given = ", ".join(f"i64 %a{i}" for i in range(len(primitive.widths)))
        result = constant if constant is not None else "%r"
        called = f'  %r = call i64 @"{self._symbol_of[primitive]}"({given})'
        self._texts.append(f'define i64 @"{symbol}"({given}) nounwind {{\n{called}\n  ret i64 {result}\n}}\n')

    def add(self, text: str, fn: FunctionType | None = None) -> None:
        """Add the text of a function. Its calls, which LLVM may inline, have the line of `fn`."""
        self._texts.append(self.lines.of_entry(text, fn) if self.lines and fn else text)

    def _symbol(self, name: str) -> str:
        name = plain = self.target.symbol(name)
        while name in self._symbols:
            name = f"{plain}_{next(self._numbers)}"
        self._symbols.add(name)
        return name

    def failure(self, kind: str, message: str, fn: FunctionType, line: int) -> int:
        """Return the number of an exception, from 1."""
        failure = Failure(kind, message, f"{fn.__qualname__}, {fn.__code__.co_filename}:{line}")
        if failure not in self.failures:
            self.failures.append(failure)
        return self.failures.index(failure) + 1

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, e: Lowering, callee: Any, given: list[Any], named: dict[str, Any]) -> Any:
        """Emit a call of anything that compiled code can call. Return its value."""
        if isinstance(self.target, Cuda):  # a kernel is compiled with the functions of extensions that it calls
            callee = getattr(callee, "direct", callee)
        if callee is shared_array:
            return emit(e, self._bound("shared_array", signature_of(shared_array), given, named))
        if isinstance(callee, Primitive):
            if named:
                raise Mistake(f"{callee.__name__}() takes no named arguments")
            return self._call_primitive(e, callee, given)
        if isinstance(callee, type) and issubclass(callee, Record) and callee is not Record:
            callee = kind_of_record(callee)
        if isinstance(callee, StructType):
            if len(given) != 1 or named:
                raise Mistake(f"{callee.name} takes an address")
            int_text(given[0])
            return At(callee, plain(given[0]))
        if isinstance(callee, type) and issubclass(callee, tuple) and hasattr(callee, "_fields"):
            values = self._bound(callee.__name__, signature_of(callee), given, named)
            return Several(tuple(values), callee._fields)  # type: ignore[attr-defined]
        if isinstance(callee, ByKind):
            return self._call_by_kind(e, callee, given, named)
        if isinstance(callee, FunctionType):
            callee = helper(callee)
        elif not isinstance(callee, Function):
            raise Mistake(f"compiled code cannot call {thing_in_words(callee)}")
        given = self._bound(callee.__name__, callee.signature, given, named)
        if callee.takes_integers:
            need_integers(callee.__name__, tuple(callee.signature.parameters), given)
        symbol, result = self.need(callee, tuple(map(kind_of, given)))
        return e.call(symbol, given, result)

    def _bound(self, name: str, signature: inspect.Signature, given: list[Any], named: dict[str, Any]) -> list[Any]:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise Mistake(f"{name}(): {error}") from None
        if any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
            raise Mistake(f"{name}() has a parameter with **, which compiled code has not: name each parameter")
        bound.apply_defaults()
        return [of_python(bound.arguments[parameter]) for parameter in signature.parameters]

    def _call_by_kind(self, e: Lowering, table: ByKind, given: list[Any], named: dict[str, Any]) -> Any:
        """Emit a switch over the kinds, with a call for each: LLVM may inline it."""
        kind, *rest = self._bound(table.__name__, table.signature, given, named)
        calls, after, other = [(n, e.label()) for n in table.functions], e.label(), e.label()
        cases = " ".join(f"i64 {n}, label %{label}" for n, label in calls)
        e.emit(f"switch i64 {int_text(kind)}, label %{other} [{cases}]")
        e.open = False
        (slot,) = e.slots(INT, "result")
        for number, label in calls:
            e.begin(label)
            value = plain(self.call(e, table.functions[number], list(rest), {}))
            e.store(0 if value is None else value if is_number(value) else _no_number(table), [slot])
            e.go(after)
        e.begin(other)
        e.store(0, [slot])
        e.begin(after)
        return e.load(INT, [slot])

    def _call_primitive(self, e: Lowering, primitive: Any, given: list[Any]) -> Any:
        if len(given) != len(primitive.widths):
            raise Mistake(f"{primitive.__name__}() takes {len(primitive.widths)} integers, not {len(given)}")
        need_integers(primitive.__name__, primitive.parameters, given)
        constant = self.constant(primitive)
        if constant is not None:
            return constant
        returned = e.call(self._symbol_of[primitive], given, INT)
        return returned if primitive.ret is not None else None

    def constant(self, primitive: Any) -> int | None:
        """Return the value of a primitive that is a constant on this target; None for any other object."""
        if not isinstance(primitive, Primitive):
            return None
        if primitive not in self._primitives:
            self._primitives[primitive] = self._emit(primitive)
        return self._primitives[primitive]

    def _emit(self, primitive: Any) -> int | None:
        symbol = self._symbol_of[primitive] = f"op.{self._symbol(primitive.__name__)}"
        if isinstance(self.target, Cuda):
            trial = self._define(self._new_module(), primitive, symbol)[0]
            if _mark_pure(trial):
                _mark_pure(self._define(self._late, primitive, symbol)[0])
                known = f"range(i64 0, {1 << primitive.ret}) " if primitive.ret < 64 else ""
                taken = ", ".join(["i64"] * len(primitive.widths))
                self._declared.append(f'declare {known}i64 @"{symbol}"({taken}) speculatable {PURE_PTX}')
                return None
        function, value = self._define(self._module, primitive, symbol)
        function.linkage = "internal"
        _mark_pure(function)
        if primitive.ret is None or not isinstance(value, ir.Constant):
            return None
        return value.constant if isinstance(value.constant, int) else None

    def _define(self, module: Any, primitive: Any, symbol: str) -> tuple[Any, Any]:
        """Return the LLVM function of a primitive, and the value that it returns."""
        function = ir.Function(module, ir.FunctionType(_I64, [_I64] * len(primitive.widths)), symbol)
        function.attributes.add("alwaysinline")
        function.attributes.add("nounwind")
        if isinstance(self.target, Cuda):
            function.attributes.add("convergent")
        b: Any = ir.IRBuilder(function.append_basic_block("entry"))
        narrow = [a if w == 64 else b.trunc(a, ir.IntType(w)) for a, w in zip(function.args, primitive.widths)]
        value = (primitive.cuda if isinstance(self.target, Cuda) else primitive.cpu)(b, *narrow)
        if primitive.ret is None:
            b.ret(_I64(0))
        elif value.type.width < 64:
            extend = b.sext if primitive.signed else b.zext
            b.ret(_I64(value.constant) if isinstance(value, ir.Constant) else extend(value, _I64))
        else:
            b.ret(value)
        return function, value

    # --- constants ----------------------------------------------------------------------------------------------------

    def table(self, numbers: tuple[int, ...]) -> str:
        """Return the symbol of a constant array."""
        return self._constants.setdefault(numbers, f"@table.{len(self._constants)}")

    def text_constant(self, text: str) -> str:
        """Return the symbol of a C string."""
        return self._constants.setdefault(text, f"@text.{len(self._constants)}")

    def shared(self, nbytes: int) -> str:
        """Return the place of a shared array: its symbol on CUDA, its offset in the block's memory on the host."""
        before, self.shared_bytes = self.shared_bytes, self.shared_bytes + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not isinstance(self.target, Cuda):
            return str(before)
        symbol = f"@shared.{before}"
        self._texts.append(f"{symbol} = internal addrspace(3) global [{nbytes} x i8] undef, align {ALIGNMENT}")
        return symbol

    def math(self, name: str, kind: Any) -> str:
        """Return the symbol of a mathematical function of the target."""
        symbol = self.target.math(name, kind)
        self.library[symbol] = f"{kind.llvm} ({', '.join([kind.llvm] * LIBRARY[name])})"
        return symbol

    # --- text ---------------------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Return how many lines of IR the longest function has."""
        return max(text.count("\n") for text in self._texts)

    def late_text(self) -> str:
        """Return the IR of the primitives that are inlined late."""
        return str(self._late).replace(_READNONE, PURE_PTX)

    def text(self) -> str:
        """Return the IR of the whole unit."""
        parts = [str(self._module).replace(_READNONE, PURE_PTX), DIVISIONS, *map(_constant, *_unzip(self._constants))]
        if self.failures:
            parts.append(self.target.failing())
        parts += [f'declare {kind.replace("(", f"@{symbol}(", 1)}' for symbol, kind in self.library.items()]
        parts += [*self._declared, *self._texts]
        whole = "\n".join(parts)
        declared = [
            f"declare {text}" for name, text in _INTRINSICS.items()
            if f"@{name}(" in whole and not _declares(parts[0], name)
        ]
        if "@dprintf(" in whole:
            declared.append("declare i32 @dprintf(i32, ptr, ...)")
        if self.failures and isinstance(self.target, Host) and "@pthread_getspecific(" not in parts[0]:
            declared.append("declare ptr @pthread_getspecific(i32)")
        return "\n".join([whole, *declared, self.lines.text() if self.lines else "", ""])


def _declares(text: str, name: str) -> bool:
    return f'@"{name}"(' in text or f"@{name}(" in text


def _unzip(constants: dict[Any, str]) -> tuple[list[Any], list[str]]:
    return list(constants), list(constants.values())


def _constant(value: Any, symbol: str) -> str:
    """Return the definition of a constant: numbers, or a C string."""
    if isinstance(value, str):
        contents = value.encode() + b"\0"
        escaped = "".join(f"\\{byte:02X}" for byte in contents)
        return f'{symbol} = private unnamed_addr constant [{len(contents)} x i8] c"{escaped}"'
    numbers = ", ".join(f"i64 {one}" for one in value)
    return f"{symbol} = private unnamed_addr constant [{len(value)} x i64] [{numbers}]"


def _no_number(table: ByKind) -> Any:
    raise Mistake(f"the functions of {table.__name__}() return integers, or nothing")


def _mark_pure(function: Any) -> bool:
    """Mark the inline PTX of a primitive that has no side effects. Return whether the primitive is nothing else."""
    alone, some = True, False
    for block in function.blocks:
        for instruction in block.instructions:
            if isinstance(instruction, ir.CallInstr) and isinstance(instruction.callee, ir.InlineAsm):
                if not instruction.callee.side_effect:
                    instruction.attributes.add(_READNONE)
                    some = True
                    continue
            elif isinstance(instruction, (ir.CastInstr, ir.Ret)):
                continue
            alone = False
    return alone and some


def need_integers(function: str, names: tuple[str, ...], given: list[Any]) -> None:
    """Raise a Mistake unless all arguments are integers: an array is not an address, and a float not a count."""
    for name, value in zip(names, given, strict=False):
        value = plain(value)
        if isinstance(value, int) or (isinstance(value, Word) and value.kind is INT):
            continue
        what = "None" if value is None else thing_in_words(value)
        cure = array_cure(value) or ": pass an integer"
        raise Mistake(f"{function}() takes integers only, and {name} is {what}{cure}")
