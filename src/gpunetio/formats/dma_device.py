"""The structure of a DMA context that kernels have a pointer to. GPUNetIO's own is not public, so this is ours."""

from .layout import Entry

# Kernels only read it.
#
#     qp           address of the DEV_QP of a queue pair with `memcpy`
#     max_nbytes   most bytes that a WQE copies
#     opaque_addr  the buffer that its WQEs name (`MMO_SEG`)
#     opaque_lkey  the key of that
DEV_DMA = Entry("dev_dma", 32, """
    qp                      0  i64
    max_nbytes              8  i64
    opaque_addr            16  i64
    opaque_lkey            24  u32
""")
