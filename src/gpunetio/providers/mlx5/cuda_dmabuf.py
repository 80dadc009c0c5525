"""Export GPU memory as a dmabuf through the CUDA driver, so that a device can register it without nvidia-peermem."""

from __future__ import annotations

import ctypes
import functools
from contextlib import ExitStack

from ...errors import NotSupportedError
from ...memory import PAGE

_OF_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT
_DMABUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def dmabuf_of(address: int, nbytes: int) -> tuple[int, int]:
    """Return a descriptor of the pages that hold [address, address + nbytes), and the offset in them.

    The caller closes the descriptor. NotSupportedError if the driver cannot export dmabufs: this needs CUDA 11.7 and
    the open kernel modules.
    """
    start = address & -PAGE
    size = -(-(address + nbytes - start) // PAGE) * PAGE
    fd = ctypes.c_int(-1)
    try:
        driver = _driver()
        export = driver.cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as error:
        raise NotSupportedError(f"the CUDA driver has no dmabufs: {error}") from None
    with ExitStack() as undo:
        context = ctypes.c_void_p()  # stays NULL for memory of a pool
        driver.cuPointerGetAttribute(ctypes.byref(context), _OF_CONTEXT, ctypes.c_uint64(address))
        if context and driver.cuCtxPushCurrent_v2(context) == 0:
            undo.callback(driver.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
        code = export(ctypes.byref(fd), ctypes.c_uint64(start), ctypes.c_size_t(size), _DMABUF_FD, ctypes.c_uint64(0))
    if code != 0:
        raise NotSupportedError(
            f"the CUDA driver gives no dmabuf of {size} bytes at {start:#x} (CUresult {code}): this needs GPU memory "
            "and the open kernel modules"
        )
    return fd.value, address - start
