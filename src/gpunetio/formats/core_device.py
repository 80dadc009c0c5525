"""The structures of DOCA Core's objects: those that kernels have pointers to, and one that a process sends to another.

GPUNetIO's own are not public, so these are ours. Kernels only read the first two, which are in the byte order of the
host; the third one travels, and is big-endian.
"""

from .layout import I64, U32, Entry, Record


class DevBuf(Record, size=32):
    """A range of memory that a NIC can access.

        address   first byte, as keys and kernels address it; below 2^63
        nbytes    its length; offsets that kernels give lie inside
        lkey      key of memory of this process, or 0: the memory is a peer's
        rkey      key for the peer's requests, of the peer's memory or of ours; in the byte order of the host
    """

    address: I64 = 0
    nbytes: I64 = 8
    lkey: U32 = 16
    rkey: U32 = 20


DEV_BUF = DevBuf.entry


class DevBufArr(Record, size=32):
    """An array of `num` DevBufs, which follow it in memory."""

    num: I64 = 0


DEV_BUF_ARR = DevBufArr.entry

# A memory map as its owner describes it to a peer. `access` is an `enums.Access`: what the peer may do.
MEMORY_EXPORT = Entry("memory_export", 32, """
    magic                   0  be32
    version                 4  be32
    address                 8  be64
    nbytes                 16  be64
    rkey                   24  be32
    access                 28  be32
""")
MEMORY_EXPORT_MAGIC = int.from_bytes(b"GNmm", "big")
MEMORY_EXPORT_VERSION = 1
