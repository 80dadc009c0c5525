"""Check the arguments of a kernel launch, and convert them to what Numba takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import BadStateError, InvalidValueError
from .code import Arguments

_WORD = 1 << 64
_NUMBERS = float, complex, np.number, np.void  # what Numba takes by value, besides integers
_BUFFERS = bytes, bytearray, memoryview, list
_REGISTER = "register it with pd.register(), and pass mr.address and mr.lkey or mr.rkey"


def checked(kernel: str, names: Sequence[str], args: Arguments, reaches_gpu_memory: bool) -> Arguments:
    """Return the arguments as Numba takes them: 64-bit integers, and addresses of objects with a `device_address`.

    InvalidValueError: a kernel cannot take the argument. BadStateError: it is closed. Both messages name the argument.
    """
    named = (*names, *(f"number {n + 1}" for n in range(len(names), len(args))))
    return tuple(
        _plain(f"{kernel}: argument {name}", arg, reaches_gpu_memory)
        for name, arg in zip(named, args, strict=False)
    )


def _plain(what: str, arg: object, reaches_gpu_memory: bool) -> object:
    if isinstance(arg, (int, np.integer, np.bool_)):  # members of enumerations are ints
        return _word(what, int(arg))
    if (address := getattr(arg, "device_address", None)) is not None:
        if getattr(arg, "closed", False):
            raise BadStateError(f"{what} is closed ({type(arg).__name__}): its memory is gone")
        return int(address)
    if isinstance(arg, np.ndarray) and not arg.dtype.hasobject:
        return arg
    if isinstance(arg, _NUMBERS):
        return arg
    if isinstance(arg, tuple):
        make = getattr(arg, "_make", tuple)  # a named tuple stays one
        return make(_plain(what, item, reaches_gpu_memory) for item in arg)
    if _in_cuda(arg):
        if reaches_gpu_memory:
            return arg
        raise InvalidValueError(f"{what} is memory of a GPU ({type(arg).__name__}), but the kernel runs on the host")
    raise InvalidValueError(f"{what} is {_cure(arg)}")


def _word(what: str, value: int) -> int:
    """Return the int64 with the same 64 bits. Numba would convert a uint64 to floating point."""
    if not -_WORD // 2 <= value < _WORD:
        raise InvalidValueError(f"{what} = {value:#x} has more than 64 bits")
    return value - _WORD if value >= _WORD // 2 else value


def _in_cuda(arg: object) -> bool:
    try:
        return getattr(arg, "__cuda_array_interface__", None) is not None
    except (RuntimeError, TypeError, KeyError):  # some tensors refuse to give it
        return False


def _cure(arg: object) -> str:
    """Describe the object, and say what to pass instead."""
    if arg is None:
        return "None, which is not an address: pass 0 for no address"
    kind = type(arg).__name__
    if hasattr(arg, "lkey"):
        state = ", closed" if getattr(arg, "closed", False) else ""
        return f"a memory region ({kind}{state}): pass mr.address, and mr.lkey or mr.rkey"
    if hasattr(arg, "qpn"):
        return f"a queue pair that kernels cannot use ({kind}): pass what Gpu.create_qp() or Gpu.export_qp() returns"
    if isinstance(arg, _BUFFERS) or hasattr(arg, "__array__") or hasattr(arg, "__dlpack__"):
        return f"of type {kind}, memory that a kernel cannot take: {_REGISTER}"
    return f"of type {kind}: a kernel takes integers, floats, NumPy arrays, exported queues and memory of a Gpu"
