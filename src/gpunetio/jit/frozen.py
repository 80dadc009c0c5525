"""What compiled code has frozen: the values that Numba took for constants.

Numba makes constants of the globals that a function names, of its closure and its defaults, and of attributes of
modules and enumerations. So compiled code is right only for the values with which it was compiled. `Frozen`
finds the values of a function and of all that it calls. Their digest is part of the key of compiled code, and each
launch checks that the values are still the same.

The package's own functions contain constants only. Their stamp covers these (stamps.py).
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, EnumMeta
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.core import config
from numba.core.extending import _Intrinsic  # type: ignore[attr-defined]

from ..errors import InvalidValueError
from .stamps import PACKAGE, is_ours, stamp_of

Function = Callable[..., object]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MISSING = object()
# Stamps contain the versions of these libraries, and the names of cache files contain Python's.
_LIBRARIES = frozenset({__name__.partition(".")[0], "numba", "llvmlite", "numpy", "cuda", *sys.stdlib_module_names})
_BY_ADDRESS = 1_000_000  # bytes; Numba takes the address of a larger array on the host, not its contents


class Frozen:
    """The values that a function contains if it is compiled now.

    `digest` identifies them together with the source. `lasting`: none is an address of this process, so another process
    may use the code.
    """

    def __init__(self, function: Function):
        found = _Search()
        file = function.__code__.co_filename
        if is_ours(file):  # what its closure contains is part of Numba's own key
            self.digest: str = stamp_of(file)
        else:
            found.add(stamp_of(str(PACKAGE / "device" / "__init__.py")), config.BOUNDSCHECK)  # type: ignore[attr-defined]
            found.function(function)
            self.digest = found.digest.hexdigest()
        self.lasting: bool = found.lasting
        self.foreign: list[Any] = found.foreign  # dispatchers of Numba that the function calls
        self._names, self._cells = found.names, found.cells
        self._defaults, self._arrays = found.defaults, found.arrays

    @property
    def still_there(self) -> bool:
        """Whether each name has the very value that it had. If not, the new value may still be equal."""
        for space, name, value in self._names:  # plain loops: every launch asks
            if space.get(name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            if _contents(cell) is not value:
                return False
        for function, *values in self._defaults:
            if function.__defaults__ is not values[0] or function.__kwdefaults__ is not values[1]:
                return False
        return all(array.tobytes() == contents for array, contents in self._arrays)


class Watch:
    """What a function freezes, now and later."""

    def __init__(self, function: Function):
        self._function = function
        self._frozen: Frozen | None = None

    def now(self) -> Frozen:
        """Return what the function freezes if it is compiled now."""
        if self._frozen is None or not self._frozen.still_there:
            self._frozen = Frozen(self._function)
        return self._frozen


def stamp(function: Function) -> str:
    """Return the stamp of a function: a hash of all that its compiled code may contain, and of what compiles it."""
    return Frozen(function).digest


# By dispatcher of Numba: the digest of what it had frozen when a kernel was first compiled with it.
_first: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def check_foreign(frozen: Frozen) -> None:
    """Raise InvalidValueError if a function of Numba's own decorators was compiled with other values than now."""
    for dispatcher in frozen.foreign:
        digest = Frozen(dispatcher.py_func).digest
        if _first.setdefault(dispatcher, digest) != digest:
            name = dispatcher.py_func.__name__
            raise InvalidValueError(
                f"it calls {name}, which Numba has compiled with values that have changed since: "
                f"decorate {name} with @device_function instead, or pass it the values as arguments"
            )


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # its variable has no value yet
        return _MISSING


class _Names:
    """What the code of a function and of the functions inside it names."""

    def __init__(self, code: CodeType):
        parts = list(_with_inner(code))
        self.globals = sorted({
            instruction.argval
            for part in parts
            for instruction in dis.get_instructions(part)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        })  # fmt: skip
        self.all = frozenset(name for part in parts for name in part.co_names)  # with attributes of anything


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


_names_of = functools.cache(_Names)


class _Search:
    """Follows a function to all values that it freezes, and hashes them."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.lasting = True
        self.foreign: list[Any] = []
        self.names: list[tuple[Mapping[str, object], str, object]] = []
        self.cells: list[tuple[CellType, object]] = []
        self.defaults: list[tuple[Any, object, object]] = []
        self.arrays: list[tuple[np.ndarray, bytes]] = []
        self._seen: dict[tuple[int, frozenset[str]], int] = {}
        self._kept: list[object] = []  # so that no other object gets the identity of one that was seen

    def add(self, *what: object) -> None:
        """Hash something."""
        self.digest.update(repr(what).encode())

    def _is_new(self, value: object, attributes: frozenset[str]) -> bool:
        """Whether something that may contain itself is met for the first time."""
        key = id(value), attributes
        if key in self._seen:
            self.add("seen", self._seen[key])
            return False
        self._seen[key] = len(self._seen)
        self._kept.append(value)
        return True

    def function(self, function: Any) -> None:
        """Take a function in, with all that it names."""
        if not self._is_new(function, frozenset()):
            return
        code: CodeType = function.__code__
        if is_ours(code.co_filename):
            self.add("ours", function.__module__, function.__qualname__, stamp_of(code.co_filename))
            self._data_of(function)
            return
        self.add("function", function.__module__, function.__qualname__, *_described(code))
        file = Path(code.co_filename)
        if file.is_file():  # it may contain overloads for Numba, which nothing here names
            self.add("file", hashlib.sha256(file.read_bytes()).hexdigest())
        names = _names_of(code)
        for name in names.globals:
            self._named(function.__globals__, name, names.all)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _contents(cell)
            self.cells.append((cell, value))
            self.add("cell", name)
            self.value(value, names.all)
        self.defaults.append((function, function.__defaults__, function.__kwdefaults__))
        self.value(function.__defaults__, names.all)
        self.value(tuple((function.__kwdefaults__ or {}).items()), names.all)

    def _data_of(self, function: Any) -> None:
        """Take in what a function of the package got from the program: offsets of a structure, for example."""
        for cell in function.__closure__ or ():
            if isinstance(value := _contents(cell), (*_PLAIN, types.Type)):
                self.value(value, frozenset())

    def _named(self, space: Mapping[str, object], name: str, attributes: frozenset[str]) -> None:
        value = space.get(name, _MISSING)
        if value is _MISSING:  # a built-in function, or nothing yet
            return
        self.names.append((space, name, value))
        self.add("name", name)
        self.value(value, attributes)

    def value(self, value: Any, attributes: frozenset[str]) -> None:
        """Take a value in, and those of its attributes that the code may load."""
        if isinstance(value, Enum):
            self.add("member", type(value).__module__, type(value).__qualname__, value.name)
            self.value(value.value, attributes)
        elif isinstance(value, _PLAIN):
            self.add(type(value).__name__, value)
        elif isinstance(value, (types.Type, np.dtype)):
            self.add("type", str(value))
        elif isinstance(value, np.generic):
            self.add(str(value.dtype), value.tobytes())
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, tuple):
            self.add("tuple", type(value).__qualname__, getattr(value, "_fields", ()), len(value))
            for item in value:
                self.value(item, attributes)
        elif isinstance(value, ModuleType):
            self._module(value, attributes)
        elif isinstance(value, type):
            self._class(value, attributes)
        elif isinstance(value, _Intrinsic):
            self.function(value._defn)
        elif isinstance(getattr(value, "py_func", None), FunctionType):
            self._dispatcher(value)
        elif isinstance(value, FunctionType):
            self._plain_function(value)
        elif isinstance(value, BuiltinFunctionType):
            self.add("built in", value.__module__, value.__qualname__)
        else:
            self.add("object", type(value).__module__, type(value).__qualname__, id(value))
            self.lasting = False

    def _array(self, array: np.ndarray) -> None:
        contents = array.tobytes()
        self.add("array", str(array.dtype), array.shape, array.strides, hashlib.sha256(contents).hexdigest())
        self.arrays.append((array, contents))
        if array.nbytes > _BY_ADDRESS or not (array.flags.c_contiguous or array.flags.f_contiguous):
            self.lasting = False

    def _module(self, module: ModuleType, attributes: frozenset[str]) -> None:
        self.add("module", module.__name__)
        if not _of_a_library(module.__name__) and self._is_new(module, attributes):
            for name in sorted(attributes):
                self._named(vars(module), name, attributes)

    def _class(self, kind: type, attributes: frozenset[str]) -> None:
        self.add("class", kind.__module__, kind.__qualname__, getattr(kind, "_fields", ()))
        if isinstance(kind, EnumMeta):  # Numba reads attributes of no other class
            for name, member in kind.__members__.items():
                self.add("member", name)
                self.value(member.value, attributes)  # type: ignore[attr-defined]

    def _dispatcher(self, dispatcher: Any) -> None:
        if not hasattr(dispatcher, "units"):
            self.foreign.append(dispatcher)
            self.add("options", *sorted(f"{name}={value}" for name, value in dispatcher.targetoptions.items()))
        self.function(dispatcher.py_func)

    def _plain_function(self, function: FunctionType) -> None:
        if _of_a_library(function.__module__ or ""):
            self.add("function of a library", function.__module__, function.__qualname__)
        else:
            self.function(function)


def _of_a_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _described(code: CodeType) -> tuple[object, ...]:
    """Return what the code does. Two processes describe the same code alike."""
    constants = tuple(
        _described(constant) if isinstance(constant, CodeType)
        else sorted(map(repr, constant)) if isinstance(constant, frozenset)
        else (type(constant).__name__, repr(constant))
        for constant in code.co_consts
    )  # fmt: skip
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
