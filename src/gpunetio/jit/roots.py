"""Roots: functions that Python, C and launches call on the host. A root is one object file with all that it reaches.

A root is compiled once for this machine and cached (cache.py), under a name made from everything that determines it.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding as llvm

from ..compiler import compiling, little_garbage_collection
from ..errors import InvalidValueError
from . import cache, machine, perf, prebuilt, python_call
from .arguments import kind_and_words
from .compile import DeviceFunction
from .frozen import compiler_stamp
from .kinds import INT, NOTHING, in_words, words_of
from .lines import Lines
from .ops.lowering import Primitive
from .progress import told
from .targets import FAIL_KEY_SYMBOL
from .unit import Unit

CHECKS_BOUNDS = "GPUNETIO_BOUNDS"  # if not empty, an index outside an array raises IndexError


class DeviceCodeError(RuntimeError):
    """An exception of compiled code whose class is not a built-in one."""


@dataclass(frozen=True)
class Root:
    """Loaded machine code. `call` calls it from Python (python_call.py); None if a parameter is not 64 bits wide."""

    address: int
    returns: bool
    failures: tuple[tuple[str, str, str], ...]
    shared_bytes: int  # the bytes of shared arrays that a block needs
    call: Callable[..., Any] | None

    @property
    def plain(self) -> Callable[..., Any] | None:
        """Return the function that calls it, if it cannot fail and needs no block."""
        return None if self.failures or self.shared_bytes else self.call

    def run(self, words: list[Any]) -> Any:
        """Call it. Raise the exception that it raises."""
        assert self.call is not None
        if not self.failures:
            return self.call(*words)
        number, value = self.call(*words)
        if number:
            raise exception_of(self.failures[number - 1])
        return value


def exception_of(failure: tuple[str, str, str]) -> Exception:
    """Return the exception that compiled code has raised, with a note that says where."""
    kind, message, place = failure
    found, said = getattr(builtins, kind, None), (message,) if message else ()
    error = found(*said) if isinstance(found, type) else DeviceCodeError(": ".join((kind, *said)))
    error.add_note(f"raised by compiled code: {place}")
    return error


_roots: dict[Any, Root] = {}  # by everything that determines them


def name_of(function: DeviceFunction, kinds: tuple[Any, ...], widths: tuple[int, ...], target: tuple[str, ...]) -> str:
    """Return the name of a root's file, made from everything that determines its contents."""
    itself = function.freezes()[0], function.extension is not None, function.is_kernel
    decides = (function.watch.now().digest, itself, kinds, widths, target, checks_bounds())
    digest = hashlib.sha256(repr(decides).encode()).hexdigest()
    return f"{function.__name__}-{digest[:32]}.o"


def checks_bounds() -> bool:
    """Return whether indices of arrays are checked."""
    return bool(os.environ.get(CHECKS_BOUNDS))


def root(function: DeviceFunction, kinds: tuple[Any, ...], widths: tuple[int, ...] = ()) -> Root:
    """Return a function for arguments of these types, compiled or loaded from the cache.

    `widths`: the sizes in bits of its parameters in C, if they are integers of other sizes than 64. CompileError if it
    does not compile.
    """
    key = function, function.watch.now().digest, kinds, widths, checks_bounds()
    found = _roots.get(key)
    if found is None:
        with compiling():
            found = _roots.get(key)
            if found is None:
                name = name_of(function, kinds, widths, prebuilt.here().key())
                found = _roots[key] = _load(function, kinds, widths, name)
    return found


def _load(function: DeviceFunction, kinds: tuple[Any, ...], widths: tuple[int, ...], name: str) -> Root:
    contents = cache.load(name)
    if contents is None and (built := prebuilt.usable()) is not None:
        contents = cache.load_from(prebuilt.FOLDER, name_of(function, kinds, widths, built.key()))
    if contents is None:
        prebuilt.tell_why_not()
        with cache.turn(name) as found:
            contents = found
            if contents is None:
                contents = _compile(function, kinds, widths, name)
                cache.save(name, contents)
                stats["compiled"] += 1
                compiled.append(function.__name__)
    else:
        stats["loaded"] += 1
    return _linked(contents, function)


stats: dict[str, int] = {"compiled": 0, "loaded": 0}
compiled: list[str] = []  # the names of the functions that this process has compiled


def _compile(function: DeviceFunction, kinds: tuple[Any, ...], widths: tuple[int, ...], name: str) -> bytes:
    """Return the contents of a root's file: a line that describes it, and the object file."""
    symbol = f"root_{name.rpartition('-')[2].removesuffix('.o')}"
    with told(function), little_garbage_collection():
        # With all device functions inlined, the engine is a quarter faster than if LLVM decides. Kernels gain nothing.
        # With `inlines_last_call`, Ethernet frames take a tenth less time, and RDMA, in the root of all other services,
        # a tenth more.
        unit = Unit(
            machine.host(), f"{symbol}.", inlines_last_call=function.extension is not None,
            checks_bounds=checks_bounds(), inlines=not function.is_kernel,
            lines=Lines(whole=True),
        )
        result = unit.entry(function, symbol, kinds, widths)
        header = {
            "symbol": symbol, "returns": result is not NOTHING, "called": not widths,
            "failures": unit.failures, "shared_bytes": unit.shared_bytes,
        }
        if not widths:
            parameters = [word for kind in kinds for word in words_of(kind)]
            entry = python_call.entry(symbol, parameters, result, fails=bool(unit.failures))
            unit.add(entry, function.py_func)
        image = machine.object_of(unit)
    return json.dumps(header).encode() + b"\n" + image


def _linked(contents: bytes, function: DeviceFunction) -> Root:
    text, _, image = contents.partition(b"\n")
    header = json.loads(text)
    machine.load(image)
    symbol = header["symbol"]
    address = machine.address_of(symbol)
    perf.tell(image, symbol, address, f"{function.__module__}.{function.__qualname__}")
    call = python_call.function(function.__name__, machine.address_of(f"{symbol}.python")) if header["called"] else None
    failures = tuple(map(tuple, header["failures"]))
    return Root(address, header["returns"], failures, header["shared_bytes"], call)


def primitive(operation: Primitive) -> Callable[..., Any]:
    """Return the machine code of a primitive operation, for code that is not compiled."""
    decides = compiler_stamp(), operation.__name__, operation.freezes(), prebuilt.here().key()
    digest = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
    name, symbol = f"{operation.__name__}-{digest}.o", f"op_{operation.__name__}_{digest}"
    with compiling():
        image = cache.load(name)
        if image is None:
            unit = Unit(machine.host(), f"{symbol}.")
            unit.primitive_entry(operation, symbol)
            result = NOTHING if operation.ret is None else INT
            unit.add(python_call.entry(symbol, ["i64"] * len(operation.widths), result, fails=False))
            image = machine.object_of(unit)
            cache.save(name, image)
        machine.load(image)
        return python_call.function(operation.__name__, machine.address_of(f"{symbol}.python"))


def call(function: DeviceFunction, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function from Python."""
    try:
        bound = function.signature.bind(*given, **named)
    except TypeError as error:
        raise TypeError(f"{function.__name__}(): {error}") from None
    bound.apply_defaults()
    kinds, words = kinds_and_words(function, bound.arguments.values())
    if function.takes_integers:
        for parameter, kind in zip(bound.arguments, kinds, strict=True):
            if kind is not INT:
                what = f"{parameter} is {in_words(kind)}"
                raise InvalidValueError(f"{function.__name__}() takes integers only, and {what}")
    made = function.compile() if set(kinds) <= {INT} else root(function, kinds)
    if made.shared_bytes:
        raise InvalidValueError(f"{function.__name__}() has a shared array: call it in a kernel")
    return made.run(words)


def values_of(function: DeviceFunction, args: tuple[Any, ...]) -> list[Any]:
    """Return the value of each parameter for positional arguments. A missing argument gets its default."""
    values: list[Any] = []
    for at, parameter in enumerate(function.signature.parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            values.append(tuple(args[at:]))
            args = args[:at]
        else:
            values.append(args[at] if at < len(args) else parameter.default)
    return values


def kinds_and_words(function: DeviceFunction, values: Iterable[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the types of the values of all parameters, and the values as words of C."""
    kinds, words = [], []
    for name, value in zip(function.signature.parameters, values, strict=True):
        kind, passed = kind_and_words(f"{function.__name__}: argument {name}", value)
        kinds.append(kind)
        words += passed
    return tuple(kinds), words


_fail_key = ctypes.c_uint()
if ctypes.CDLL(None).pthread_key_create(ctypes.byref(_fail_key), None):
    raise OSError("pthread_key_create failed: this process has used up its thread-specific keys")
llvm.add_symbol(FAIL_KEY_SYMBOL, ctypes.addressof(_fail_key))
