"""The device functions for other compilers on the host: as LLVM bitcode, and for Numba's `@njit` functions.

They have the names of the device library for CUDA C++: `gpunetio_put` for `device.put`. Arguments and results are
64-bit integers. C has no defaults, so pass all arguments. A thread that runs no kernel of this package is alone in its
block and its warp.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from llvmlite import binding as llvm

from .compiler import compiling, little_garbage_collection
from .device.library import Function, functions
from .errors import InvalidValueError, NotSupportedError
from .jit import machine
from .jit.c_function import c_function
from .jit.kinds import INT
from .jit.ops import THREAD_KEY_SYMBOL
from .jit.unit import Unit


def bitcode(names: Iterable[str] | None = None) -> bytes:
    """Return device functions for this machine as LLVM bitcode: all of them, or those with these names, such as "put".

    The bitcode is optimized, and has the version of llvmlite's LLVM. It calls the C library, and reads `symbols`.
    """
    with compiling(), little_garbage_collection():
        unit = Unit(machine.host())
        for one in _named(names):
            unit.entry(one.compiled, one.c_name, (INT,) * len(one.parameters))
        return machine.optimized(unit).as_bitcode()


def _named(names: Iterable[str] | None) -> list[Function]:
    known = {one.name: one for one in functions()}
    if names is None:
        return list(known.values())
    wanted = list(dict.fromkeys(names))
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidValueError(f"the device library has no {', '.join(unknown)}: docs/device-lib.md says what it has")
    return [known[name] for name in wanted]


def symbols() -> dict[str, int]:
    """Return the addresses of symbols that the bitcode reads in this process and that the C library does not have."""
    return {THREAD_KEY_SYMBOL: llvm.address_of_symbol(THREAD_KEY_SYMBOL) or 0}


def numba_functions(*names: str) -> Any:
    """Return a namespace of device functions that `@njit` functions on the host can call, those with these names.

        nic = numba_functions("put", "wait")

        @numba.njit(nogil=True)
        def send(qp, raddr, rkey, laddr, lkey, nbytes):
            ticket = nic.put(qp, raddr, rkey, laddr, lkey, nbytes, GPU, AUTO, THREAD)
            return nic.wait(qp, ticket, GPU, THREAD)

    The functions are compiled now, or loaded from the cache. NotSupportedError without Numba.
    """
    try:
        from numba import int64, types  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotSupportedError(f"functions for Numba need it: pip install numba ({error})") from error
    found: Any = ModuleType("gpunetio_functions", "Device functions of gpunetio for Numba.")  # Numba looks into modules
    for one in _named(names):
        llvm.add_symbol(one.c_name, c_function(one.compiled, *[64] * len(one.parameters)))
        setattr(found, one.name, types.ExternalFunction(one.c_name, int64(*[int64] * len(one.parameters))))
    return found
