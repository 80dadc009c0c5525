"""Arrays of other libraries by DLPack: their memory as it is, without a copy.

On the host, NumPy reads them. Of a GPU, the tensor is read here and described by `__cuda_array_interface__`, which says
the same (DLPack, "C API"; CUDA Array Interface, version 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dlpack import BOOL, COMPLEX, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, FLOAT, INT, UINT, DLTensor, tensor_in
from ..errors import InvalidValueError

_ON_THE_HOST = CPU, CUDA_HOST, CUDA_MANAGED  # what a CPU reaches
_KINDS = {INT: "int", UINT: "uint", FLOAT: "float", COMPLEX: "complex"}


class DeviceArray:
    """An array of a GPU, which has the memory of a tensor. While this exists, so does the memory."""

    def __init__(self, capsule: Any, tensor: DLTensor, dtype: np.dtype):
        self._capsule = capsule  # its destructor gives the tensor back, as nobody takes it
        dims = tensor.ndim
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape[:dims]),
            "typestr": dtype.str,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "strides": tuple(n * dtype.itemsize for n in tensor.strides[:dims]) if tensor.strides else None,
            "version": 3,
        }


def is_tensor(arg: object) -> bool:
    """Return whether an object gives its memory by DLPack. An array of NumPy need not."""
    return not isinstance(arg, np.ndarray) and hasattr(arg, "__dlpack__") and hasattr(arg, "__dlpack_device__")


def array_of(what: str, tensor: Any) -> np.ndarray | DeviceArray:
    """Return an array that has the memory of a tensor: NumPy's, or one of a GPU. `what` names it in errors."""
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
