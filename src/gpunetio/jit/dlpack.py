"""Arrays of other libraries through DLPack, without a copy.

On the host, NumPy reads the tensor. On a GPU, this module reads it and describes it by `__cuda_array_interface__`,
which has the same information (DLPack, "C API"; CUDA Array Interface, version 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dlpack import BOOL, COMPLEX, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, FLOAT, INT, UINT, DLTensor, tensor_in
from ..errors import InvalidValueError

_ON_THE_HOST = CPU, CUDA_HOST, CUDA_MANAGED  # memory that a CPU reaches
_KINDS = {INT: "int", UINT: "uint", FLOAT: "float", COMPLEX: "complex"}


class DeviceArray:
    """An array on a GPU that uses the memory of a tensor, and keeps this memory allocated."""

    def __init__(self, capsule: Any, tensor: DLTensor, dtype: np.dtype):
        self._capsule = capsule  # its destructor releases the tensor, because nothing consumes the capsule
        dims = tensor.ndim
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape[:dims]),
            "typestr": dtype.str,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "strides": tuple(n * dtype.itemsize for n in tensor.strides[:dims]) if tensor.strides else None,
            "version": 3,
        }


def is_tensor(arg: object) -> bool:
    """Return whether an object provides its memory by DLPack. False for NumPy arrays, which do not need it."""
    return not isinstance(arg, np.ndarray) and hasattr(arg, "__dlpack__") and hasattr(arg, "__dlpack_device__")


def array_of(what: str, tensor: Any) -> np.ndarray | DeviceArray:
    """Return an array that uses the memory of a tensor: a NumPy array, or one on a GPU. `what` names it in errors."""
    kind = type(tensor).__name__
    try:
        device, _ = tensor.__dlpack_device__()
        if device in _ON_THE_HOST:
            return np.from_dlpack(tensor)
        # Without a stream, the tensor is ready for CUDA's default stream, which a launch waits for.
        capsule = tensor.__dlpack__() if device == CUDA else None
        read = tensor_in(capsule) if capsule is not None else None
    except Exception as error:  # of the library
        raise InvalidValueError(f"{what} is of type {kind}, which does not give its memory: {error}") from error
    if read is None:
        raise InvalidValueError(f"{what} is of type {kind}, in memory of a device where no kernels run")
    try:
        dtype = np.dtype("bool" if (read.code, read.bits) == (BOOL, 8) else f"{_KINDS[read.code]}{read.bits}")
    except (KeyError, TypeError):  # bfloat16, or floats of 8 bits
        dtype = None
    if dtype is None or read.lanes != 1:
        raise InvalidValueError(f"{what} is of type {kind}, with elements that kernels do not know")
    return DeviceArray(capsule, read, dtype)
