"""Bufs: ranges of registered memory with their keys, in an array that the host has filled for kernels.

A buf is the address of its descriptor (formats/core_device.py). It describes memory of this process or of a peer.
"""

from __future__ import annotations

from ..formats.core_device import DevBuf, DevBufArr
from ..jit.compile import device_function
from ..jit.ops import ld_fixed32, ld_fixed64
from .status import EINVAL


@device_function
def buf_get(array: DevBufArr, index: int) -> int:
    """Return the buf at an index of an array (`doca_gpu_dev_buf_get_buf`), or EINVAL if there is no such index."""
    if index < 0 or index >= ld_fixed64(array + DevBufArr.num):
        return EINVAL
    return array + DevBufArr.size + DevBuf.size * index


@device_function
def buf_addr(buf: int) -> int:
    """Return the address of a buf's memory (`doca_gpu_dev_buf_get_addr`), or EINVAL if `buf` is 0 or negative."""
    if buf <= 0:
        return EINVAL
    return ld_fixed64(buf + DevBuf.address)


@device_function
def buf_nbytes(buf: int) -> int:
    """Return the length of a buf in bytes, or EINVAL if `buf` is 0 or negative."""
    if buf <= 0:
        return EINVAL
    return ld_fixed64(buf + DevBuf.nbytes)


@device_function
def buf_mkey(buf: int) -> int:
    """Return the key of a buf (`doca_gpu_dev_buf_get_mkey`): the lkey of local memory, or the rkey of a peer's.

    The key is in host byte order, as `put`, `send` and related functions expect it. EINVAL if `buf` is 0 or negative.
    """
    if buf <= 0:
        return EINVAL
    lkey = ld_fixed32(buf + DevBuf.lkey)
    return lkey if lkey != 0 else ld_fixed32(buf + DevBuf.rkey)


@device_function
def buf_at(buf: int, offset: int, nbytes: int) -> int:
    """Return the address of `nbytes` at an offset of a buf, or EINVAL if they are not inside the buf."""
    if offset < 0 or nbytes < 0 or offset > ld_fixed64(buf + DevBuf.nbytes) - nbytes:
        return EINVAL
    return ld_fixed64(buf + DevBuf.address) + offset
