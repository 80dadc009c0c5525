"""Check the arguments of a kernel launch, and convert them to what compiled code takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import BadStateError, InvalidValueError
from .code import Arguments
from .dlpack import array_of, is_tensor
from .kinds import ELEMENTS, FLOAT32, FLOAT64, INT, MOST_DIMS, NOTHING, ArrayType, TupleType
from .values import INTEGERS

_WORD = 1 << 64
_FLOATS: tuple[Any, ...] = (float, np.floating)
_FLOAT32: Any = np.float32  # a type that checkers take for a generic one
_BUFFERS = bytes, bytearray, memoryview, list
_REGISTER = "register it with pd.register(), and pass mr.address and mr.lkey or mr.rkey"


def checked(kernel: str, names: Sequence[str], args: Arguments, reaches_gpu_memory: bool) -> Arguments:
    """Return the arguments as kernels take them: 64-bit integers, and addresses of objects with a `device_address`.

    InvalidValueError if a kernel cannot take an argument, BadStateError if it is closed. Both messages name it.
    """
    named = (*names, *(f"number {n + 1}" for n in range(len(names), len(args))))
    return tuple(
        _plain(f"{kernel}: argument {name}", arg, reaches_gpu_memory) for name, arg in zip(named, args, strict=False)
    )


def _plain(what: str, arg: Any, reaches_gpu_memory: bool) -> object:
    if isinstance(arg, INTEGERS):  # members of enumerations are ints
        return word(what, int(arg))
    if (address := getattr(arg, "device_address", None)) is not None:
        if getattr(arg, "closed", False):
            raise BadStateError(f"{what} is closed ({type(arg).__name__}): its memory is gone")
        return int(address)
    if isinstance(arg, np.ndarray) and not arg.dtype.hasobject:
        return arg
    if isinstance(arg, _FLOATS):
        return arg if isinstance(arg, _FLOAT32) else float(arg)
    if isinstance(arg, tuple):
        make = getattr(arg, "_make", tuple)  # a named tuple stays a named tuple
        return make(_plain(what, item, reaches_gpu_memory) for item in arg)
    if _in_cuda(arg):
        if reaches_gpu_memory:
            return arg
        raise _not_on_the_host(what, arg)
    if is_tensor(arg):
        array = array_of(what, arg)
        if isinstance(array, np.ndarray) or reaches_gpu_memory:
            return array
        raise _not_on_the_host(what, arg)
    raise InvalidValueError(f"{what} is {_cure(arg)}")


def _not_on_the_host(what: str, arg: object) -> InvalidValueError:
    return InvalidValueError(f"{what} is memory of a GPU ({type(arg).__name__}), but the kernel runs on the host")


def word(what: str, value: int) -> int:
    """Return the signed integer with the same 64 bits."""
    if not -_WORD // 2 <= value < _WORD:
        raise InvalidValueError(f"{what} = {value:#x} has more than 64 bits")
    return value - _WORD if value >= _WORD // 2 else value


def _in_cuda(arg: object) -> bool:
    try:
        return getattr(arg, "__cuda_array_interface__", None) is not None
    except (RuntimeError, TypeError, KeyError):  # some tensors refuse access to it
        return False


def _cure(arg: object) -> str:
    """Describe the object, and name what to pass instead."""
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


def kind_and_words(what: str, value: Any) -> tuple[Any, list[Any]]:
    """Return the type of an argument in compiled code, and the words that are passed. `what` names it in errors."""
    if isinstance(value, INTEGERS):
        return INT, [word(what, int(value))]
    if isinstance(value, _FLOAT32):
        return FLOAT32, [float(value)]
    if isinstance(value, _FLOATS):
        return FLOAT64, [float(value)]
    if value is None:
        return NOTHING, []
    if isinstance(value, tuple):
        parts = [kind_and_words(what, item) for item in value]
        kind = TupleType(tuple(kind for kind, _ in parts), getattr(value, "_fields", ()))
        return kind, [word for _, words in parts for word in words]
    if isinstance(value, np.ndarray):
        place = int(value.ctypes.data), value.shape, value.strides
        return _array(what, value.dtype, *place)
    if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = interface.get("strides") or _strides(shape, dtype.itemsize)
        return _array(what, dtype, int(interface["data"][0]), shape, tuple(strides))
    if is_tensor(value):  # owned by the caller, who keeps it
        return kind_and_words(what, array_of(what, value))
    raise InvalidValueError(f"{what} is {_cure(value)}")


def _strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the strides of an array without gaps."""
    strides: list[int] = []
    for length in reversed(shape):
        strides.insert(0, size)
        size *= length
    return tuple(strides)


def _array(what: str, dtype: np.dtype, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if dtype.name not in ELEMENTS or not dtype.isnative:
        raise InvalidValueError(f"{what} is an array of {dtype}: kernels take arrays of {', '.join(ELEMENTS)}")
    if not 1 <= len(shape) <= MOST_DIMS:
        raise InvalidValueError(f"{what} is an array with {len(shape)} dimensions: kernels take 1 to {MOST_DIMS}")
    contiguous = 0 in shape or strides == _strides(shape, dtype.itemsize)
    kind = ArrayType(dtype.name, len(shape), contiguous)
    return kind, [address, *shape, *(() if contiguous else strides)]
