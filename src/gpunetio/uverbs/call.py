"""One call of the kernel's ioctl: its object and method, and the attributes that go in and out.

The layouts are those of <rdma/rdma_user_ioctl_cmds.h>.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ..formats.layout import Entry
from .abi import DRIVER_MLX5

if TYPE_CHECKING:
    import numpy as np

HEADER = Entry("ib_uverbs_ioctl_hdr", 24, """
    length      0  u16
    object_id   2  u16
    method_id   4  u16
    num_attrs   6  u16
    driver_id  16  u32
""")
ATTRIBUTE = Entry("ib_uverbs_attr", 16, """
    attr_id     0  u16
    len         2  u16
    flags       4  u16
    data        8  u64
""")
_MANDATORY, _VALID_OUTPUT = 1, 2  # UVERBS_ATTR_F_*
_MOST_INT = (1 << 31) - 1
_INLINE = 8  # bytes that an attribute holds itself


class Refused(Exception):
    """The call fails with `code`, an errno. `expected` is set if the program only probes whether the call exists."""

    def __init__(self, code: int, why: str, *, expected: bool = False):
        super().__init__(why)
        self.code, self.expected = code, expected


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = _libc.process_vm_writev.restype = ctypes.c_ssize_t


def _copy(call: Callable[..., int], ours: ctypes.Array[ctypes.c_char], address: int, nbytes: int) -> None:
    """Copy between our memory and the program's. Refused with EFAULT if the program's memory is not mapped."""
    here, there = _Range(ctypes.addressof(ours), nbytes), _Range(address, nbytes)
    if call(threading.get_native_id(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != nbytes:
        raise Refused(errno.EFAULT, f"{nbytes} bytes at {address:#x} are not the program's memory")


def bytes_at(address: int, nbytes: int) -> bytes:
    """Return a copy of the program's memory."""
    room = ctypes.create_string_buffer(nbytes)
    _copy(_libc.process_vm_readv, room, address, nbytes)
    return room.raw


def store_at(address: int, data: bytes) -> None:
    """Store bytes into the program's memory."""
    _copy(_libc.process_vm_writev, ctypes.create_string_buffer(data, len(data)), address, len(data))


class Call:
    """A call, whose header is at `address` in the program's memory."""

    object: int
    method: int

    def __init__(self, address: int):
        header = HEADER.at(bytes_at(address, HEADER.size))
        count = int(header["num_attrs"])
        if int(header["length"]) != HEADER.size + count * ATTRIBUTE.size:
            raise Refused(errno.EINVAL, f"a header of {int(header['length'])} bytes for {count} attributes")
        if int(header["driver_id"]) != DRIVER_MLX5:
            raise Refused(errno.EINVAL, f"a call of driver {int(header['driver_id'])}, not of mlx5")
        self.object, self.method = int(header["object_id"]), int(header["method_id"])
        bytes_at(address + HEADER.size, count * ATTRIBUTE.size)  # checks that it is mapped
        raw = (ctypes.c_ubyte * (count * ATTRIBUTE.size)).from_address(address + HEADER.size)
        self._attributes: dict[int, np.ndarray] = {}
        for i in range(count):
            attribute = ATTRIBUTE.at(memoryview(raw), i * ATTRIBUTE.size)
            self._attributes[int(attribute["attr_id"])] = attribute

    def __repr__(self) -> str:
        attributes = ", ".join(f"{key:#x}: {int(a['len'])} bytes" for key, a in self._attributes.items())
        return f"<call of method {self.method:#x} of object {self.object:#x} with {{{attributes}}}>"

    def __contains__(self, attribute: int) -> bool:
        return attribute in self._attributes

    def check_known(self, known: Collection[int]) -> None:
        """Refuse unknown attributes that the program marks as mandatory, as the kernel does."""
        for number, attribute in self._attributes.items():
            if number not in known and int(attribute["flags"]) & _MANDATORY:
                raise Refused(errno.EPROTONOSUPPORT, f"{self}: attribute {number:#x} is not supported")

    def _attribute(self, number: int) -> np.ndarray:
        if number not in self._attributes:
            raise Refused(errno.EINVAL, f"{self} has no attribute {number:#x}")
        return self._attributes[number]

    def number(self, attribute: int, without: int | None = None) -> int:
        """Return an attribute that is a number, a handle or a descriptor, or `without` if an optional one is missing.
        """
        if without is not None and attribute not in self._attributes:
            return without
        return int(self._attribute(attribute)["data"])

    def descriptor(self, attribute: int) -> int:
        """Return an attribute that is a descriptor. Refused with EBADF if it cannot be one."""
        value = self.number(attribute)
        if value > _MOST_INT:
            raise Refused(errno.EBADF, f"{value:#x} is no descriptor")
        return value

    def data(self, attribute: int) -> bytes:
        """Return the bytes of an attribute, or no bytes if it is missing."""
        if attribute not in self._attributes:
            return b""
        found = self._attributes[attribute]
        nbytes, data = int(found["len"]), int(found["data"])
        if nbytes <= _INLINE:
            return data.to_bytes(_INLINE, "little")[:nbytes]
        return bytes_at(data, nbytes)

    def take(self, attribute: int, layout: Entry) -> np.ndarray:
        """Return a structure that the program has filled. Members that are missing in older headers are 0."""
        return layout.at(bytearray(self.data(attribute).ljust(layout.size, b"\0")))

    def room(self, attribute: int) -> int:
        """Return how many bytes of answer the program has room for."""
        return int(self._attributes[attribute]["len"]) if attribute in self._attributes else 0

    def put(self, attribute: int, data: bytes) -> None:
        """Answer with bytes, as many as there is room for, and clear the rest of the room."""
        if attribute not in self._attributes:
            return
        found = self._attributes[attribute]
        nbytes = int(found["len"])
        if nbytes:
            store_at(int(found["data"]), data[:nbytes].ljust(nbytes, b"\0"))
        found["flags"] |= _VALID_OUTPUT

    def put_number(self, attribute: int, value: int) -> None:
        """Answer with a number of as many bytes as there is room for."""
        self.put(attribute, (value & (1 << 64) - 1).to_bytes(8, "little"))

    def name(self, attribute: int, handle: int) -> None:
        """Give the program a new object's handle or descriptor."""
        self._attribute(attribute)["data"] = handle
