"""Find everything that is frozen into compiled code: the values that are constants to it, and the source it reaches.

Constants are the globals that a function names, its closure and its defaults, and attributes of modules, enumerations
and other objects. `Frozen` follows a function to all of them, and to all functions that it calls. The digest is part of
the name of compiled code, so an edit or another value causes only the code that it reaches to be compiled again. Each
launch of a program's kernel checks that the values are still the same.

Functions are compared by their bytecode. Functions of programs are also compared by their lines, which errors and
debuggers show: a function that has moved is compiled again. Functions of this package are not, because compiling a NIC
takes seconds: their lines are those of the time when they were compiled.
"""

from __future__ import annotations

import functools
import hashlib
import opcode
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numpy as np

from ..formats.layout import Record
from .annotations import annotations_of, code_of
from .kinds import StructType

PACKAGE = Path(__file__).parents[1]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MISSING = object()
_LIBRARIES = frozenset({"numpy", "llvmlite", "cuda", *sys.stdlib_module_names})
_HAS_DOCSTRING = 0x4000000  # CO_HAS_DOCSTRING of CPython
_LOAD_GLOBAL, _EXTENDED_ARG = opcode.opmap["LOAD_GLOBAL"], opcode.opmap["EXTENDED_ARG"]


@functools.cache
def compiler_stamp() -> str:
    """Return a hash of the compiler: the source of this package's compiler, and the versions of Python and llvmlite."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag}, llvmlite {llvmlite.__version__}".encode())
    for source in sorted((PACKAGE / "jit").rglob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


@functools.cache
def is_ours(file: str) -> bool:
    """Return whether a file belongs to this package."""
    return PACKAGE in Path(file).parents


class Frozen:
    """The values that a function contains if it is compiled now. `digest` identifies them together with the code."""

    def __init__(self, function: FunctionType, direct: bool = False):
        found = _Search(direct)
        found.follow(function)
        self.digest: str = found.digest()
        self._names, self._cells = found.names, found.cells
        self._attributes, self._defaults, self._arrays = found.attributes, found.defaults, found.arrays

    @property
    def still_there(self) -> bool:
        """Return whether each name of the program has the same value object as before. A new one may still be equal."""
        for space, name, value in self._names:  # plain loops: every launch asks
            if space.get(name, _MISSING) is not value:
                return False
        for thing, name, value in self._attributes:
            if getattr(thing, name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            if _contents(cell) is not value:
                return False
        for function, *values in self._defaults:
            if function.__defaults__ is not values[0] or function.__kwdefaults__ is not values[1]:
                return False
        return all(array.tobytes() == contents for array, contents in self._arrays)


class Watch:
    """What a function freezes, now and later. `direct`: functions of extensions are called directly."""

    def __init__(self, function: FunctionType, direct: bool = False):
        self._function, self._direct = function, direct
        self._frozen: Frozen | None = None

    def now(self) -> Frozen:
        """Return what the function freezes if it is compiled now."""
        if self._frozen is None or not self._frozen.still_there:
            self._frozen = Frozen(self._function, self._direct)
        return self._frozen


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # its variable has no value yet
        return _MISSING


class _Names:
    """A description of a function's code, and the names in it."""

    def __init__(self, code: CodeType):
        self.described = repr(_described(code)).encode()
        parts = list(_with_inner(code))
        self.globals = sorted({name for part in parts for name in _globals_of(part)})
        self.all = frozenset(name for part in parts for name in part.co_names)  # including attributes of anything


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the globals that bytecode loads. `dis` would take twenty times as long."""
    operand = 0
    text = code.co_code
    for at in range(0, len(text), 2):
        operand = operand << 8 | text[at + 1]
        if text[at] == _LOAD_GLOBAL:
            yield code.co_names[operand >> 1]  # the lowest bit says that a call follows
        if text[at] != _EXTENDED_ARG:
            operand = 0


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _described(code: CodeType) -> tuple[object, ...]:
    """Return a description of what the code does. It is the same in all processes."""
    constants = tuple(
        _described(constant) if isinstance(constant, CodeType)
        else sorted(map(repr, constant)) if isinstance(constant, frozenset)
        else (type(constant).__name__, repr(constant))
        for constant in code.co_consts[_documented(code) :]
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _documented(code: CodeType) -> int:
    """Return 1 if the first constant is a docstring, which is not compiled."""
    if sys.version_info >= (3, 14):
        return int(bool(code.co_flags & _HAS_DOCSTRING))
    # Before 3.14, it is a function's docstring or None, except for <lambda> and similar code.
    return int(bool(code.co_consts) and isinstance(code.co_consts[0], str) and code.co_name[0] != "<")


_names_of = functools.cache(_Names)


class _Search:
    """Follows a function to all values that it freezes, and hashes them."""

    def __init__(self, direct: bool) -> None:
        self._direct = direct
        self.names: list[tuple[Mapping[str, object], str, object]] = []
        self.attributes: list[tuple[object, str, object]] = []
        self.cells: list[tuple[CellType, object]] = []
        self.defaults: list[tuple[Any, object, object]] = []
        self.arrays: list[tuple[np.ndarray, bytes]] = []
        self._hash = hashlib.sha256(compiler_stamp().encode())
        self._todo: list[FunctionType] = []
        self._seen: dict[Any, int] = {}
        self._kept: list[object] = []  # keeps what was seen, so that no other object gets its identity

    def digest(self) -> str:
        """Return the hash of everything that was added."""
        return self._hash.hexdigest()

    def follow(self, function: FunctionType) -> None:
        """Add a function, with everything that it reaches."""
        self._function(function)
        while self._todo:
            self._take(self._todo.pop())

    def _add(self, *what: object) -> None:
        self._hash.update(repr(what).encode())

    def _is_new(self, value: object, attributes: frozenset[str] = frozenset()) -> bool:
        """Return whether an object that may contain itself is met for the first time."""
        key = id(value), attributes
        if key in self._seen:
            self._add(self._seen[key])
            return False
        self._seen[key] = len(self._seen)
        self._kept.append(value)
        return True

    def _function(self, function: FunctionType) -> None:
        if self._is_new(function):
            self._add(function.__module__, function.__qualname__)
            self._todo.append(function)

    def _take(self, function: FunctionType) -> None:
        code = function.__code__
        names = _names_of(code)
        watched = not is_ours(code.co_filename)
        self._hash.update(names.described)
        if watched:
            self._add([(part.co_filename, part.co_firstlineno, part.co_linetable) for part in _with_inner(code)])
        self._annotations(function, watched)
        for name in names.globals:
            self._named(function.__globals__, name, names.all, watched)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _contents(cell)
            if watched:
                self.cells.append((cell, value))
            self._add("cell", name)
            self._value(value, names.all, watched)
        if watched:
            self.defaults.append((function, function.__defaults__, function.__kwdefaults__))
        if function.__defaults__ or function.__kwdefaults__:
            self._value(function.__defaults__, names.all, watched)
            self._value(tuple((function.__kwdefaults__ or {}).items()), names.all, watched)

    def _annotations(self, function: FunctionType, watched: bool) -> None:
        """Add the types of the parameters and of the result."""
        for name, hint in annotations_of(function).items():
            self._add(name, str(hint))
            if isinstance(hint, str):
                code = code_of(hint)
                names = () if code is None else code.co_names
                for one in names:
                    self._named(function.__globals__, one, frozenset(names), watched)
            for record in _records_of(hint):
                self._value(record, frozenset(), watched)

    def _named(self, space: Mapping[str, object], name: str, attributes: frozenset[str], watched: bool) -> None:
        value = space.get(name, _MISSING)
        if value is _MISSING:  # a built-in function, or nothing yet
            return
        if watched:
            self.names.append((space, name, value))
        self._add(name)
        self._value(value, attributes, watched)

    def _value(self, value: Any, attributes: frozenset[str], watched: bool) -> None:
        """Add a value, and those of its attributes that the code may load."""
        if isinstance(value, Record):
            self._record(type(value))
            self._add(int(value))
        elif isinstance(value, type) and issubclass(value, Record):
            self._record(value)
        elif isinstance(value, Enum):
            self._add(type(value).__qualname__, value.name, value.value)
        elif isinstance(value, _PLAIN):
            self._add(type(value).__name__, value)
        elif (freezes := getattr(type(value), "freezes", None)) is not None:  # objects of this package's compiler
            what, functions = freezes(value)
            self._add(type(value).__name__, what)
            for function in functions:
                self._function(function)
            if self._direct and (called := getattr(value, "direct", None)) is not None:
                self._value(called, attributes, watched)
        elif isinstance(value, StructType):
            if self._is_new(value):
                self._add(value.name, value.fields, value.alignment, value.shared)
        elif isinstance(value, tuple):
            if self._is_new(value):
                self._add(type(value).__qualname__, getattr(value, "_fields", ()), len(value))
                for item in value:
                    self._value(item, attributes, watched)
        elif isinstance(value, np.dtype):
            self._add(str(value))
        elif isinstance(value, np.generic):
            self._add(str(value.dtype), value.tobytes())
        elif isinstance(value, np.ndarray):
            self._array(value, watched)
        elif isinstance(value, FunctionType):
            if _of_a_library(value.__module__ or ""):
                self._add(value.__module__, value.__qualname__)
            else:
                self._function(value)
        elif isinstance(value, BuiltinFunctionType):
            self._add(value.__module__, value.__qualname__)
        elif isinstance(value, ModuleType) and _of_a_library(value.__name__):
            self._add(value.__name__)
        else:
            self._object(value, attributes, watched)

    def _record(self, record: type[Record]) -> None:
        """Add the places of a record's fields."""
        for one in record.__mro__:
            if issubclass(one, Record) and one is not Record:
                self._add(one.__name__)
                if self._is_new(one):
                    self._add(one.size, one.alignment, one.entry.dtype)

    def _array(self, array: np.ndarray, watched: bool) -> None:
        contents = array.tobytes()
        self._add(str(array.dtype), array.shape, hashlib.sha256(contents).hexdigest())
        if watched:
            self.arrays.append((array, contents))

    def _object(self, value: Any, attributes: frozenset[str], watched: bool) -> None:
        """Add the attributes that the code may read of a module, a class or another object. It can do nothing else."""
        name = getattr(value, "__name__", None) or type(value).__qualname__
        self._add("object", name, getattr(value, "_fields", ()))
        if not self._is_new(value, attributes):
            return
        for default in getattr(value, "_field_defaults", {}).items():  # of a named tuple's class
            self._value(default, frozenset(), watched)
        for attribute in sorted(attributes):
            found = getattr(value, attribute, _MISSING)
            if found is _MISSING or callable(getattr(found, "__func__", None)):
                continue
            if watched and isinstance(value, ModuleType):
                self.names.append((vars(value), attribute, found))
            elif watched:
                self.attributes.append((value, attribute, found))
            self._add(attribute)
            self._value(found, attributes, watched)


def _records_of(hint: object) -> Iterator[type[Record]]:
    """Yield the records in an annotation that is not a string."""
    if isinstance(hint, type) and issubclass(hint, Record):
        yield hint
    for part in typing.get_args(hint):
        yield from _records_of(part)


def _of_a_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


Function = Callable[..., object]
