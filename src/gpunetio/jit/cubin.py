"""Compile kernels for CUDA: LLVM or libNVVM makes PTX, and nvJitLink, if installed, or else the driver assembles it.

Cubins are cached (cache.py) with the name of their assembler. Another version of the assembler assembles them again,
but cubins that come with a wheel are taken from any.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ..compiler import compiling, little_garbage_collection
from ..errors import DriverError, InvalidValueError, NotSupportedError
from . import cache, machine, prebuilt
from .compile import DeviceFunction
from .frozen import Watch
from .kinds import INT
from .lines import Lines
from .progress import told
from .roots import checks_bounds
from .targets import ptx_symbol
from .unit import Unit

Capability = tuple[int, int]
REGISTERS, LINE_INFO = "-maxrregcount", "-lineinfo"  # options of nvJitLink
LINES = "GPUNETIO_LINEINFO"  # if not empty, kernels have line tables, which may change their code a little
BACKEND = "GPUNETIO_CUDA_BACKEND"  # llvm, or nvvm: libNVVM, CUDA's own compiler
_BACKENDS = "llvm", "nvvm"
# A kernel is compiled for blocks of up to one of these numbers of threads. This limits the registers of a thread,
# because a multiprocessor has 65,536 (CUDA C++ Programming Guide, "Technical Specifications").
BLOCKS = (256, 512, 1024)
_MOST_REGISTERS, _ALL_REGISTERS = 255, 65536


def threads_of(block: int) -> int:
    """Return the number of threads that a kernel with blocks of `block` threads is compiled for."""
    return next(threads for threads in BLOCKS if block <= threads)


def limit_of(threads: int) -> tuple[str, ...]:
    """Return the linker's option for registers, which also applies to functions that a kernel calls."""
    return (f"{REGISTERS}={min(_MOST_REGISTERS, _ALL_REGISTERS // threads)}",) if threads else ()


@dataclass(frozen=True)
class Image:
    """A compiled kernel: a cubin, the kernel's name in it, and the exceptions that it may raise."""

    code: bytes
    symbol: str
    failures: tuple[tuple[str, str, str], ...]


@functools.cache
def _watch(function: FunctionType) -> Watch:
    return Watch(function, direct=True)


@functools.cache
def body_of(function: FunctionType) -> DeviceFunction:
    """Return the body of a kernel, as a function that is inlined into the entry."""
    return DeviceFunction(function, inlined=True)


def digest_of(function: FunctionType) -> str:
    """Return the digest of a kernel for CUDA, with the values that it freezes now."""
    return _watch(function).now().digest


def symbol_of(function: FunctionType) -> str:
    """Return the name of a kernel in PTX."""
    return ptx_symbol(function.__name__)


def ptx_of(
    function: Any, kinds: Sequence[Any], capability: Capability, threads: int = 0, lines: bool = False, by: str = ""
) -> tuple[str, Unit]:
    """Return a kernel as PTX for GPUs of a compute capability, and its unit. No such GPU is needed.

    The kernel has the name of the function (`symbol_of`). `threads`: the most threads of a block, which limits the
    registers; 0: not known. `lines`: whether the PTX names the lines of Python that it is made from. `by`: the back
    end; by default, the environment's.
    """
    body = body_of(getattr(function, "py_func", function))
    with compiling(), little_garbage_collection():
        by = by or backend()
        if lines and by == "nvvm":
            raise NotSupportedError(f"libNVVM gets no lines: leave out {LINES} or {BACKEND}=nvvm")
        marks = Lines(whole=False) if lines else None
        unit = Unit(machine.cuda(capability, threads), checks_bounds=checks_bounds(), lines=marks)
        unit.entry(body, symbol_of(body.py_func), tuple(kinds))
        if by == "llvm":
            return machine.ptx_of(unit), unit
        from .nvvm import ptx

        return ptx(unit, capability), unit


def backend(preferred: str = _BACKENDS[0]) -> str:
    """Return the back end that makes PTX: the one that the environment names, else `preferred` if it can be used.

    InvalidValueError if the environment names an unknown one.
    """
    name = os.environ.get(BACKEND)
    if not name:
        return preferred if preferred == _BACKENDS[0] or (has_nvvm() and not os.environ.get(LINES)) else _BACKENDS[0]
    if name not in _BACKENDS:
        raise InvalidValueError(f"{BACKEND} is {name!r}: there are {' and '.join(_BACKENDS)}")
    return name


@functools.cache
def has_nvvm() -> bool:
    """Return whether libNVVM is installed."""
    try:
        from cuda.bindings import nvvm  # type: ignore[attr-defined]

        nvvm.version()
    except Exception:  # no bindings, or no library: each has classes of its own
        return False
    return True


def image_of(
    function: FunctionType, kinds: tuple[Any, ...], capability: Capability, options: Sequence[str] = (),
    threads: int = 0, preferred: str = _BACKENDS[0],
) -> Image:
    """Return a kernel for GPUs of a compute capability, compiled, from the cache, or from the wheel.

    `options` are nvJitLink's. `preferred`: the back end that makes the faster code. If it is not installed, its code
    may still come from the wheel.
    """
    options = *options, *limit_of(threads)
    if os.environ.get(LINES):
        options = *options, LINE_INFO
    decides = (digest_of(function), kinds, capability, options, threads, checks_bounds())

    def name_by(back_end: str) -> str:
        digest = hashlib.sha256(repr((*decides, back_end)).encode()).hexdigest()[:32]
        return f"{function.__name__}-{digest}.sm_{capability[0]}{capability[1]}.cubin"

    name = name_by(by := backend(preferred))
    packed = [name] if os.environ.get(BACKEND) else [name_by(preferred), name]
    in_wheel = filter(None, (cache.load_from(prebuilt.FOLDER, each) for each in packed))
    contents = _if_assembled_here(cache.load(name)) or next(in_wheel, None)
    if contents is None:
        with cache.turn(name) as made_elsewhere:
            contents = _if_assembled_here(made_elsewhere)
            if contents is None:
                with told(body_of(function)):
                    contents = _compile(function, kinds, capability, options, threads, by)
                cache.save(name, contents)
    header, _, code = contents.partition(b"\n")
    return Image(code, symbol_of(function), tuple(map(tuple, json.loads(header)["failures"])))


def _if_assembled_here(contents: bytes | None) -> bytes | None:
    """Return cached contents, unless another assembler has made them."""
    if contents is None or json.loads(contents.partition(b"\n")[0])["assembler"] != _assembler():
        return None
    return contents


def _compile(
    function: FunctionType, kinds: tuple[Any, ...], capability: Capability, options: Sequence[str], threads: int,
    by: str,
) -> bytes:
    text, unit = ptx_of(function, kinds, capability, threads, LINE_INFO in options, by)
    code = assemble(text, capability, options)[0] if linker_version() else assemble_by_driver(text, options)
    header = {"assembler": _assembler(), "failures": unit.failures}
    return json.dumps(header).encode() + b"\n" + code


def cubin(
    kernel: Callable[..., None], capability: Capability, options: Sequence[str] = (), preferred: str = _BACKENDS[0]
) -> bytes:
    """Return a kernel of integers as a cubin for GPUs of a compute capability. Arguments as for `image_of`."""
    count = kernel.__code__.co_argcount  # type: ignore[attr-defined]
    kinds = (INT,) * count
    return image_of(kernel, kinds, capability, options, preferred=preferred).code  # type: ignore[arg-type]


@functools.cache
def linker_version() -> str:
    """Return the version of nvJitLink; "" if it is not installed."""
    try:
        from cuda.bindings import nvjitlink  # type: ignore[attr-defined]

        return ".".join(map(str, nvjitlink.version()))
    except Exception:  # no bindings, or no library: each has classes of its own
        return ""


def _assembler() -> str:
    """Return the name and version of the assembler of PTX that is used here."""
    if version := linker_version():
        return f"nvJitLink {version}"
    from cuda.bindings import driver  # type: ignore[attr-defined]

    return f"driver {driver.cuDriverGetVersion()[1]}"


def assemble_by_driver(ptx: str, options: Sequence[str] = ()) -> bytes:
    """Assemble PTX for the GPU whose context is current, and return the cubin. DriverError if the driver refuses it.

    Of nvJitLink's options, only those for registers and lines are used.
    """
    from cuda.bindings import driver  # type: ignore[attr-defined]

    known = {REGISTERS: driver.CUjit_option.CU_JIT_MAX_REGISTERS,
             LINE_INFO: driver.CUjit_option.CU_JIT_GENERATE_LINE_INFO}
    parts = (option.partition("=") for option in options)
    given = {known[name]: int(value or 1) for name, _, value in parts if name in known}
    error, link = driver.cuLinkCreate(len(given), list(given), list(given.values()))
    what, place, size = "cuLinkCreate", 0, 0
    try:
        text = ptx.encode() + b"\0"
        if int(error) == 0:
            kind, what = driver.CUjitInputType.CU_JIT_INPUT_PTX, "cuLinkAddData"
            (error,) = driver.cuLinkAddData(link, kind, text, len(text), b"kernel", 0, [], [])
        if int(error) == 0:
            what = "cuLinkComplete"
            error, place, size = driver.cuLinkComplete(link)
        if int(error) != 0:
            raise DriverError(f"the kernel's PTX does not assemble: {what} returns {int(error)}", status=int(error))
        return ctypes.string_at(int(place), size)
    finally:
        driver.cuLinkDestroy(link)


def assemble(ptx: str, capability: Capability, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Assemble PTX. Return the cubin, and the linker's log. DriverError if the linker refuses the PTX."""
    from cuda.bindings import nvjitlink  # type: ignore[attr-defined]

    arch = "sm_{}{}".format(*capability)
    given = [f"-arch={arch}", *options]
    try:
        linker = nvjitlink.create(len(given), given)
    except nvjitlink.nvJitLinkError as error:
        raise DriverError(f"nvJitLink {linker_version()} refuses {' '.join(given)}: {error}") from None
    try:
        text = ptx.encode()
        try:
            nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel")
            nvjitlink.complete(linker)
        except nvjitlink.nvJitLinkError as error:
            said = _log(linker, "error")
            raise DriverError(f"the kernel's PTX does not assemble for {arch}: {error}: {said}") from None
        made = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, made)
        return bytes(made), _log(linker, "info")
    finally:
        nvjitlink.destroy(linker)


def _log(linker: int, which: str) -> str:
    from cuda.bindings import nvjitlink  # type: ignore[attr-defined]

    log = bytearray(getattr(nvjitlink, f"get_{which}_log_size")(linker))
    getattr(nvjitlink, f"get_{which}_log")(linker, log)
    return log.rstrip(b"\0").decode(errors="replace")
