"""Buffers: ranges of registered memory with their keys, which the host has put into an array for kernels.

A buf is the address of its description (formats/core_device.py). It names memory of this process, or of a peer.
"""

from __future__ import annotations

from ..formats.core_device import DevBuf, DevBufArr
from ..jit.compile import device_function
from ..jit.ops import ld_fixed32, ld_fixed64
from .status import EINVAL


@device_function
def buf_get(array: DevBufArr, index: int):
    """Return a buf of an array (`doca_gpu_dev_buf_get_buf`), or EINVAL: there is none with this index."""
    if index < 0 or index >= ld_fixed64(array + DevBufArr.num):
        return EINVAL
    return array + DevBufArr.size + DevBuf.size * index


@device_function
def buf_addr(buf: int):
    """Return the address of a buf's memory (`doca_gpu_dev_buf_get_addr`), or EINVAL for what is no buf."""
    if buf <= 0:
        return EINVAL
    return ld_fixed64(buf + DevBuf.address)


@device_function
def buf_nbytes(buf: int):
    """Return the bytes of a buf, or EINVAL for what is no buf."""
    if buf <= 0:
        return EINVAL
    return ld_fixed64(buf + DevBuf.nbytes)


@device_function
def buf_mkey(buf: int):
    """Return the key of a buf (`doca_gpu_dev_buf_get_mkey`): the lkey of memory of this process, a peer's rkey.

    It is in the byte order of the host, as `put`, `send` and their relatives take keys. EINVAL for what is no buf.
    """
    if buf <= 0:
        return EINVAL
    lkey = ld_fixed32(buf + DevBuf.lkey)
    return lkey if lkey != 0 else ld_fixed32(buf + DevBuf.rkey)


@device_function
def buf_at(buf: int, offset: int, nbytes: int):
    """Return the address of `nbytes` at an offset of a buf, or EINVAL: they are not inside."""
    if offset < 0 or nbytes < 0 or offset > ld_fixed64(buf + DevBuf.nbytes) - nbytes:
        return EINVAL
    return ld_fixed64(buf + DevBuf.address) + offset
