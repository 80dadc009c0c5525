"""The structure of a DMA context that kernels have a pointer to. GPUNetIO's own is not public, so this is ours."""

from .layout import I64, U32, Record


class DevDma(Record, size=32):
    """A DMA context. Kernels only read it.

        qp           address of the VerbsQp of a queue pair with `memcpy`
        max_nbytes   most bytes that a WQE copies
        opaque_addr  the buffer that its WQEs name (`MMO_SEG`)
        opaque_lkey  the key of that buffer
    """

    qp: I64 = 0
    max_nbytes: I64 = 8
    opaque_addr: I64 = 16
    opaque_lkey: U32 = 24


DEV_DMA = DevDma.entry
