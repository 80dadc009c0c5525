"""Tensors of other libraries, as DLPack's capsules describe them (dlpack.h)."""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
INT, UINT, FLOAT, COMPLEX, BOOL = 0, 1, 2, 5, 6  # DLDataTypeCode


class DLTensor(ctypes.Structure):
    """DLTensor, the first field of the DLManagedTensor in a "dltensor" capsule."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def tensor_in(capsule: Any) -> DLTensor:
    """Return the tensor in a capsule. It is valid as long as the capsule, which is not consumed and releases it.

    ValueError if `capsule` is another kind of capsule, such as a versioned one, or no capsule.
    """
    return DLTensor.from_address(_pointer(capsule, b"dltensor"))
